"""The benchmark of recoveries: it kills what it says, and measures what came after."""

from __future__ import annotations

import json

import pytest

from benchmarks import recovery
from benchmarks.parts.rows import Row


class Arrived(recovery.Stream):
    """A stream whose messages have come."""

    def __init__(self, *arrivals: float) -> None:
        self.arrivals = list(arrivals)


def test_a_silence_ends_with_the_longest_pause_behind_the_kill() -> None:
    # At 5 something waits longer than after the kill at 6.1; at 6.2 comes what was on its way.
    stream = Arrived(0.0, 5.0, 6.0, 6.2, 8.0, 8.5)
    assert stream.silence_after(6.1) == pytest.approx(1.9)


@pytest.mark.timeout(600)
def test_it_measures_both_on_real_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "BARS_S", {"engine": 300.0, "daemon": 300.0})  # of any machine
    assert recovery.main(["--rounds", "1", "--json"]) == 0
    engine, daemon = map(json.loads, capsys.readouterr().out.splitlines())
    assert (engine["name"], daemon["name"]) == ("engine killed", "daemon killed")
    assert engine["value"] > 0 and daemon["value"] > 0 and {engine["unit"], daemon["unit"]} == {"s"}
    monkeypatch.setattr(recovery, "measure", lambda rounds: [Row("recovery", "x", 1, "s", 2, 1, most=True)])
    assert recovery.main([]) == 1
