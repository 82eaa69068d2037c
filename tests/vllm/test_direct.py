"""The daemon's pages as an engine's blocks, with a real daemon, around a double of vLLM's scheduler and model."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from rocmforge.vllm.direct.exchange import AHEAD
from rocmforge.vllm.direct.window import Window
from tests.polling import until
from tests.processes import Service, kvcache
from tests.vllm import doubles
from tests.vllm.direct_doubles import PAGE_BYTES, SIZE, Engine, Request, engine

DEADLINE_S = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Service]:
    with kvcache(tmp_path) as service:
        yield service


def stats(daemon: Service) -> kvcache_pb2.PoolStats:
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    [pool] = stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
    return pool


def clean(daemon: Service) -> None:
    """No page differs from what was published, and nothing is held."""
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not stub.Fsck(kvcache_pb2.FsckRequest(deep=True)).violations
    until(lambda: not ((pool := stats(daemon)).held_pages or pool.quarantined_pages or pool.active_sequences))
    assert not stats(daemon).corrupted_pages


def run(*engines: Engine) -> None:
    until = time.monotonic() + DEADLINE_S
    while not all(one.idle for one in engines):
        for one in engines:
            one.step()
        assert time.monotonic() < until, "the engine does not come to an end"


def wait_over(one: Engine) -> None:
    """Return once the lease may be over."""
    until = time.monotonic() + DEADLINE_S
    while one.link.session.may_write():
        one.link.wait(0.01)
        assert time.monotonic() < until


def right(one: Engine) -> None:
    for request in one.done.values():
        assert request.output == doubles.answer(request.prompt, request.max_tokens)[: len(request.output)]


def numbers(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(doubles.VOCABULARY) for _ in range(count)]


def workload(seed: int, count: int, name: str = "", least: int = 1) -> list[Request]:
    draw = random.Random(seed)
    roots = [numbers(nth, length) for nth, length in enumerate((0, 17, 64, 130))]
    return [
        Request(
            f"{name}{nth}",
            draw.choice(roots) + numbers(seed * 1000 + nth, draw.randint(1, 40)),
            draw.randint(least, least + 39),
        )
        for nth in range(count)
    ]


def test_two_engines_hold_one_copy_of_a_prefix(daemon: Service) -> None:
    prefix = numbers(1, 10 * SIZE)
    with contextlib.closing(engine(daemon.address)) as one, contextlib.closing(engine(daemon.address)) as two:
        first, second = Request("a", [*prefix, 1], 60), Request("b", [*prefix, 2], 60)
        one.add(first)
        while stats(daemon).published_pages < 10:
            one.step()
        two.add(second)
        while len(second.output) < 3:
            one.step()
            two.step()
        assert first.table[:10] == second.table[:10] and two.hits == len(prefix)
        assert set(first.table[10:]).isdisjoint(second.table[10:])
        assert stats(daemon).held_pages <= 10 + 2 * (2 + AHEAD)
        run(one, two)
        right(one)
        right(two)
    clean(daemon)


def test_requests_that_come_together_compute_their_prefix_once(daemon: Service) -> None:
    prefix = numbers(2, 6 * SIZE)
    with contextlib.closing(engine(daemon.address)) as one:
        for nth in range(6):
            one.add(Request(str(nth), [*prefix, nth], 4))
        run(one)
        right(one)
        assert one.hits == 5 * len(prefix)
    clean(daemon)


def test_calls_are_made_once_a_step_and_few_pages_are_held_ahead(daemon: Service) -> None:
    with contextlib.closing(engine(daemon.address)) as one:
        for request in workload(3, 20):
            one.add(request)
        # A step takes longer than a call.
        one.between = lambda: one.tables.wait(DEADLINE_S) if one.tables.unanswered else None
        while not one.idle:
            one.step()
            tables = [each for each in one.tables._tables.values() if each.used]
            assert all(
                len(each.pages) <= max(each.used, -(-each.request.num_tokens // SIZE)) + AHEAD for each in tables
            )
        right(one)
        assert len(one.done) == 20 and one.calls <= one.steps + one.preempted
        assert not one.preempted and not one.waits
    clean(daemon)


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_that_two_engines_fill_gives_right_answers(daemon: Service, seed: int) -> None:
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(contextlib.closing(engine(daemon.address, pool_pages=36))) for _ in range(2)]
        for nth, one in enumerate(both):
            for request in workload(10 + seed, 30, f"{nth}.", 50):
                one.add(request)
        draw, until = random.Random(seed), time.monotonic() + DEADLINE_S
        both[0].between = both[1].step  # the other sees what is published while a step is not computed yet
        while not all(one.idle for one in both):
            both[0].step()
            if draw.random() < 0.05:
                one = draw.choice(both)
                if one.running:
                    one.abort(draw.choice(one.running).request_id)
            if draw.random() < 0.05 and both[1].waiting:
                both[1].abort(draw.choice(both[1].waiting).request_id)
            assert time.monotonic() < until
        for one in both:
            right(one)
            assert len(one.done) == 30
        assert both[0].preempted + both[1].preempted
    clean(daemon)


def test_what_was_complete_when_a_request_ended_is_found(daemon: Service) -> None:
    prompt = numbers(14, 3 * SIZE + 1)
    with contextlib.closing(engine(daemon.address)) as one:
        one.add(first := Request("a", prompt, SIZE))  # its last step completes its fourth page
        run(one)
        one.add(Request("b", [*prompt, *first.output, 1], 3))
        run(one)
        right(one)
        assert one.hits == 4 * SIZE
    clean(daemon)


def test_a_request_that_must_not_share_does_not(daemon: Service) -> None:
    prompt = numbers(4, 5 * SIZE)
    with contextlib.closing(engine(daemon.address)) as one:
        for name in "ab":
            one.add(Request(name, prompt, 9, salt=None))
            run(one)
        assert not stats(daemon).published_pages
        one.add(Request("c", prompt, 9))
        run(one)
        one.add(Request("d", prompt, 9, salt=None))
        run(one)
        right(one)
        assert not one.hits
    clean(daemon)


def test_the_daemon_is_killed_and_comes_back(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(kvcache(tmp_path))
        one = stack.enter_context(contextlib.closing(engine(daemon.address, ttl_s=3)))
        for request in workload(5, 20):
            one.add(request)
        while len(one.done) < 5:
            one.step()
        daemon.kill()
        until = time.monotonic() + DEADLINE_S
        while one.tables.connected:
            one.step()
            assert time.monotonic() < until
        assert not one.idle
        daemon = stack.enter_context(kvcache(tmp_path))
        run(one)
        right(one)
        assert len(one.done) == 20 and one.preempted
        clean(daemon)


def test_a_lease_that_may_be_over_reaches_no_pages(daemon: Service) -> None:
    """The daemon hangs between the schedule of a step and the step. What the step writes must not reach the arena."""
    with contextlib.closing(engine(daemon.address, ttl_s=3)) as one, contextlib.closing(engine(daemon.address)) as two:
        one.add(Request("a", numbers(6, 40), 400))
        for _ in range(30):
            one.step()
        seen: list[bytes] = []

        def pages() -> bytes:
            return one.link.session.pages.array.tobytes()

        def hang() -> None:
            os.kill(daemon.pid, signal.SIGSTOP)
            wait_over(one)
            seen.append(pages())

        one.between = hang
        before = len(one.running[0].output)
        one.step()
        assert one.dropped == 1 and len(one.running[0].output) == before
        assert pages() == seen[0]
        one.between = lambda: None
        one.step()
        assert not one.tables.connected and not one.running and one.preempted == 1
        os.kill(daemon.pid, signal.SIGCONT)
        two.add(Request("b", numbers(7, 60), 30))
        run(one, two)
        right(one)
        right(two)
    clean(daemon)


def test_a_lease_that_ended_in_a_step_does_not_count(daemon: Service) -> None:
    with contextlib.closing(engine(daemon.address, ttl_s=3)) as one:
        one.add(Request("a", numbers(6, 40), 60))
        for _ in range(30):
            one.step()
        compute = one._compute

        def slow(request: Request, start: int, stop: int) -> int | None:
            token = compute(request, start, stop)
            os.kill(daemon.pid, signal.SIGSTOP)
            wait_over(one)
            return token

        one._compute = slow  # type: ignore[method-assign]
        one.step()
        assert one.dropped == 1
        os.kill(daemon.pid, signal.SIGCONT)  # not before: it would answer the renewal that waits for it
        one._compute = compute  # type: ignore[method-assign]
        run(one)
        right(one)
    clean(daemon)


def test_a_hanging_daemon_does_not_hold_up_steps(daemon: Service) -> None:
    with contextlib.closing(engine(daemon.address, ttl_s=600)) as one:
        one.add(Request("a", numbers(8, 40), 60))
        for _ in range(20):
            one.step()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            [request] = one.running
            room = (len(one.tables._tables["a"].pages) * SIZE) - request.num_tokens
            began, waits, said = time.monotonic(), one.waits, len(request.output)
            for _ in range(room):
                one.step()
            assert (len(request.output), one.waits) == (said + room, waits)
            assert time.monotonic() - began < DEADLINE_S, "a call that it waits for is over with the lease"
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        run(one)
        right(one)
    clean(daemon)


def test_an_operator_ends_a_sequence(daemon: Service) -> None:
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    with contextlib.closing(engine(daemon.address)) as one:
        one.add(Request("a", numbers(9, 40), 80))
        for _ in range(20):
            one.step()
        request = kvcache_pb2.ExpireSequencesRequest()
        request.older_than.FromNanoseconds(0)
        assert stub.ExpireSequences(request).expired_sequences == 1
        run(one)
        right(one)
        assert one.preempted == 1
    clean(daemon)


def test_a_reset_hides_what_was_cached_from_those_that_wait(daemon: Service) -> None:
    prompt = numbers(10, 40)
    with contextlib.closing(engine(daemon.address, most=1)) as one:
        one.add(Request("a", prompt, 4))
        run(one)
        one.add(Request("b", numbers(11, 9), 60))
        one.add(waiting := Request("c", prompt, 4))
        until = time.monotonic() + DEADLINE_S
        while not one.tables._tables["c"].open:
            one.step()
            assert time.monotonic() < until
        waiting.salt = "after"
        one.tables.reset()
        run(one)
        right(one)
        assert not one.hits
    clean(daemon)


def test_a_window_keeps_block_0_and_writes_without_a_session_to_itself(tmp_path: Path) -> None:
    pages = 5
    file = tmp_path / "arena"
    file.write_bytes(bytes(8192))
    arena = np.memmap(file, np.uint8, "r+")
    shared = arena[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES)
    window = Window(pages, PAGE_BYTES)
    window.blocks[:] = 1
    assert not arena.any()
    window.attach(shared)
    assert not window.blocks[1:].any() and window.blocks[0].all()
    window.blocks[0] = 2
    window.blocks[1] = 3
    window.blocks[pages] = 4
    assert (shared[0] == 3).all() and (shared[pages - 1] == 4).all() and not shared[1].any()
    window.detach()
    window.blocks[:] = 9
    assert (shared[0] == 3).all() and not shared[1].any()
    window.attach(shared)
    assert (window.blocks[1] == 3).all() and (window.blocks[0] == 9).all()
    with pytest.raises(ValueError, match="do not fit"):
        window.attach(shared[:4])
