"""vLLM's own decoder and event classes make the true map of a daemon's stream."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.kvcache.conftest import Running
from tests.kvcache.kvevents.test_publisher import FLAGS, publish, publisher, truth
from tests.vllm.real.subscribers import Subscriber

pytestmark = pytest.mark.timeout(600)


def compare(subscriber: Subscriber, running: Running) -> dict[str, Any]:
    """Its map is what is cached; its answer."""
    while True:
        blocks, number = truth(running)
        answer = subscriber.ask(read=number)
        if truth(running)[1] == number:  # a reader that connects is a reason to publish
            break
    assert answer["blocks"] == json.loads(json.dumps({at: sorted(one.items()) for at, one in blocks.items() if one}))
    return answer


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with contextlib.closing(Subscriber()) as one:
        yield one


@pytest.mark.parametrize("seed", range(2))
def test_vllms_decoder_makes_the_true_map_of_a_daemons_stream(
    subscriber: Subscriber, tmp_path: Path, seed: int
) -> None:
    """Through evictions, engines that come, leave and are lost, gaps that a replay fills, and a restart."""
    chance = random.Random(seed)
    sessions: dict[str, str] = {}

    def attach(running: Running) -> None:
        name = f"e{chance.randrange(3)}"
        if name not in sessions:
            sessions[name] = running.session(engine_name=name, model="pool")

    def compute(running: Running) -> None:
        tokens = [token for _ in range(chance.randrange(1, 4)) for token in [chance.randrange(3)] * 4]
        session = sessions[chance.choice(sorted(sessions))]
        publish(running, session, f"q{chance.randrange(10**9)}", tokens, chance.choice(["", "", "x"]))

    def evict(running: Running) -> None:
        running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", max_pages=chance.randrange(1, 5)))

    def leave(running: Running) -> None:
        if len(sessions) > 1:
            name = chance.choice(sorted(sessions))
            running.stub.CloseSession(pb.CloseSessionRequest(session_id=sessions.pop(name)))

    def lose(running: Running) -> None:
        running.now += 20
        running.sweep()
        sessions.clear()
        attach(running)

    def miss(running: Running) -> None:
        missed.append(subscriber.ask(miss=True)["missed"])

    def check(running: Running) -> None:
        compare(subscriber, running)

    missed: list[bool] = []
    doing: list[Callable[[Running], None]] = [attach, compute, evict, leave, lose, miss, check]

    def live(running: Running) -> dict[str, Any]:
        attach(running)
        for act in chance.choices(doing, [2, 12, 3, 1, 1, 6, 2], k=60):
            act(running)
        compute(running)
        return compare(subscriber, running)

    with contextlib.closing(Running(tmp_path, *FLAGS)) as one:
        address, replay = publisher(one).bound, publisher(one).replay_bound
        subscriber.ask(publisher=address, replay=replay)
        answer = live(one)
        assert any(missed) and answer["replays"] and answer["blocks"]
    sessions.clear()
    flags = ("--kv-events", address, "--kv-events-replay", replay)
    with contextlib.closing(Running(tmp_path, *flags)) as two:
        attach(two)
        deadline = time.monotonic() + 120
        while not subscriber.ask(read=-1)["resets"]:  # the numbers begin again, once it has connected again
            compute(two)
            assert time.monotonic() < deadline
        answer = live(two)
    assert all(answer["counts"].values()), f"not every class of vLLM's was met: {answer['counts']}"
