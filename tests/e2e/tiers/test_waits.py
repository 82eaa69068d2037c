"""An engine whose daemon says that it is filling pages: who waits, who does not, and what comes out."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.client.transport.channel import channel_to
from rocmforge.conformance.proxy import Proxy
from rocmforge.engine.v1 import engine_pb2_grpc
from tests.e2e.conftest import MODEL
from tests.e2e.tiers.nodes import PATIENCE_S, prompt, until
from tests.generation import collect, request
from tests.processes import Service, engine, kvcache

pytestmark = pytest.mark.timeout(300)
FILL_S = 0.5


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        yield Path(name)


def answer(one: Service, tokens: list[int], max_tokens: int = 8) -> tuple[list[int], float]:
    """The tokens generated for a prompt, and the seconds that it queued."""
    stub: Any = engine_pb2_grpc.EngineServiceStub(one.channel)
    _, generated, finish = collect(stub.Generate(request(tokens, max_tokens), timeout=PATIENCE_S))
    return generated, finish.usage.queue_time.ToNanoseconds() / 1e9


@pytest.mark.parametrize("steps", ["on", "off"])
def test_a_request_waits_for_its_fill_and_others_do_not_wait_for_it(directory: Path, steps: str) -> None:
    with kvcache(directory) as daemon:
        proxy = Proxy(f"unix:{directory}/proxy.sock", channel_to(daemon.address, None))
        try:
            with engine(directory, proxy.address, "--async-steps", steps, model=MODEL) as one:
                alone, _ = answer(one, prompt(1))
                beside, _ = answer(one, prompt(2), 60)
                # Idle: it asks again by itself, when it is told to.
                proxy.filling = [FILL_S, FILL_S]
                tokens, queued_s = answer(one, prompt(1))
                assert tokens == alone and queued_s >= 2 * FILL_S and not proxy.filling
                # Others run meanwhile.
                proxy.filling = [FILL_S] * 4
                waiting: list[tuple[list[int], float]] = []
                thread = threading.Thread(target=lambda: waiting.append(answer(one, prompt(1))))
                thread.start()
                until(lambda: len(proxy.filling) < 4, "nobody was refused")
                left = len(proxy.filling)
                proxy.filling, kept = [], proxy.filling
                tokens, queued_s = answer(one, prompt(2), 60)
                proxy.filling = kept
                assert tokens == beside and queued_s < FILL_S * left
                thread.join()
                assert waiting[0][0] == alone
        finally:
            proxy.close()


def test_no_request_waits_longer_than_its_patience(directory: Path) -> None:
    with kvcache(directory) as daemon:
        proxy = Proxy(f"unix:{directory}/proxy.sock", channel_to(daemon.address, None))
        try:
            with engine(directory, proxy.address, "--fill-wait", "1", model=MODEL) as one:
                alone, _ = answer(one, prompt(1))
                proxy.filling = [FILL_S] * 10**6  # a fill that never ends, however often it is asked for
                tokens, queued_s = answer(one, prompt(1))
                assert tokens == alone and 1 <= queued_s < 4
            proxy.filling = []
            with engine(directory, proxy.address, "--fill-wait", "0", model=MODEL, name="other") as one:
                proxy.filling = [FILL_S]
                tokens, queued_s = answer(one, prompt(1))
                assert tokens == alone and proxy.filling == [FILL_S], "its openings offer no wait"
        finally:
            proxy.close()
