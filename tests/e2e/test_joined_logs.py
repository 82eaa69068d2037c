"""A session is found in both services' logs by one handle and one engine's name."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import MODEL
from tests.polling import until
from tests.processes import engine, kvcache


def test_both_logs_name_the_session_and_the_engine(short_path: Path) -> None:
    with kvcache(short_path) as daemon:
        with engine(short_path, daemon.address, "--engine-name", "replica-7", model=MODEL) as one:
            [opened] = one.events("session_opened")
            [attached] = daemon.events("session_attached")
            assert one.stop() == 0
            [closed] = daemon.events("session_closed")
        with engine(short_path, daemon.address, "--engine-name", "replica-8", model=MODEL, name="other") as other:
            [again] = other.events("session_opened")
            other.kill()
        # A killed engine is noticed by its process.
        lost = until(lambda: daemon.events("session_lost"))
        assert opened["session"] == attached["session"] == closed["session"] != again["session"]
        assert attached["engine"] == closed["engine"] == "replica-7"
        assert attached["pool_id"] == opened["pool_id"] and attached["owner"]
        assert [(event["session"], event["engine"]) for event in lost] == [(again["session"], "replica-8")]
