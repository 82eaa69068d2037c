"""kill -9 and SIGSTOP of the mover, the daemon and the engine while pages move: nothing is torn, and nothing stays."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.e2e.tiers.nodes import (
    PAGE,
    PROMPT_TOKENS,
    Node,
    Served,
    key_file,
    node,
    outer,
    prompt,
    redis,
    until,
    until_gone,
)

pytestmark = pytest.mark.timeout(400)
WHOLE = PROMPT_TOKENS // PAGE
SEEDS = range(1, 4)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        yield Path(name)


def computed(one: Node, tier: pb.Tier) -> dict[int, list[int]]:
    """Compute the prompts, have them stored, and evict them."""
    tokens = {seed: one.generate(prompt(seed)).tokens for seed in SEEDS}
    one.until_stored(tier, WHOLE * len(SEEDS))
    one.evict()
    return tokens


class Asking:
    """All prompts at once."""

    def __init__(self, one: Node) -> None:
        self.served: dict[int, Served] = {}
        self.failed: list[grpc.RpcError] = []
        self._threads = [threading.Thread(target=self._ask, args=(one, seed)) for seed in SEEDS]
        for thread in self._threads:
            thread.start()

    def _ask(self, one: Node, seed: int) -> None:
        try:
            self.served[seed] = one.generate(prompt(seed))
        except grpc.RpcError as failure:
            self.failed.append(failure)

    def all_failed(self) -> bool:
        """Whether all have ended with an error."""
        for thread in self._threads:
            thread.join()
        return len(self.failed) == len(self._threads)

    def tokens(self) -> dict[int, list[int]]:
        """What was generated, once all have ended."""
        for thread in self._threads:
            thread.join()
        assert not self.failed, self.failed
        return {seed: self.served[seed].tokens for seed in SEEDS}


@pytest.mark.parametrize("tier", [pb.TIER_HOST, pb.TIER_OUTER])
def test_a_mover_killed_in_the_middle_of_fills_changes_no_token(directory: Path, tier: pb.Tier) -> None:
    key = key_file(directory)
    with redis(directory) as server:
        flags = ("--host-cache", "32MiB") if tier == pb.TIER_HOST else outer(server, key)
        with node(directory / "a", *flags) as a:
            tokens = computed(a, tier)
            for _ in range(3):
                mover, before = a.mover(), a.stats().mover
                os.kill(mover, signal.SIGSTOP)  # what it is given stays in flight: pages, or a lookup
                asking = Asking(a)
                a.until_awaited(before.waited_openings)
                os.kill(mover, signal.SIGKILL)
                assert asking.tokens() == tokens
                a.until_restarted(before.restarts)
                a.assert_clean()
                a.evict()
            until(lambda: a.tier(tier).available, "the tier is not used again")
            assert all(a.generate(prompt(seed)).tokens == tokens[seed] for seed in SEEDS)
            a.assert_clean()


def test_a_mover_that_is_stopped_is_replaced_and_nobody_waits_for_it(directory: Path) -> None:
    with node(directory / "a", "--host-cache", "32MiB") as a:
        tokens = computed(a, pb.TIER_HOST)
        stopped = a.mover()
        os.kill(stopped, signal.SIGSTOP)
        assert Asking(a).tokens() == tokens
        until(lambda: a.mover() != stopped, "it was not replaced")
        a.evict()
        until(lambda: a.tier(pb.TIER_HOST).available, "the tier is not used again")
        assert Asking(a).tokens() == tokens
        a.assert_clean()


@pytest.mark.parametrize("victim", ["daemon", "engine"])
def test_a_service_killed_in_the_middle_of_fills_leaves_nothing_behind(directory: Path, victim: str) -> None:
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", "--host-cache", "32MiB", *outer(server, key)) as a:
        tokens = computed(a, pb.TIER_OUTER)
        for _ in range(2):
            mover = a.mover()
            os.kill(mover, signal.SIGSTOP)
            awaited = a.stats().mover.waited_openings
            asking = Asking(a)
            a.until_awaited(awaited)
            if victim == "daemon":
                a.daemon.kill()
                os.kill(mover, signal.SIGCONT)
                until_gone(mover)
                a.start_daemon()
                assert asking.tokens() == tokens
            else:
                a.engine.kill()
                os.kill(mover, signal.SIGCONT)
                assert asking.all_failed()
                a.start_engine()
                assert Asking(a).tokens() == tokens
            a.assert_clean()
            a.until_moved()
            a.evict()
        assert Asking(a).tokens() == tokens
        a.assert_clean()
