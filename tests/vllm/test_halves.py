"""Both halves of the vLLM connector with a real daemon, around doubles of vLLM's scheduler, block pool and model."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocmforge.client import KvCache, PageLayout
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from rocmforge.vllm.scheduler import SchedulerHalf
from rocmforge.vllm.worker import WorkerHalf
from tests.processes import Service, kvcache
from tests.vllm import doubles

DEADLINE_S = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Service]:
    with kvcache(tmp_path) as service:
        yield service


@contextlib.contextmanager
def engine(
    daemon: Service,
    *,
    blocks: int = 64,
    block_size: int = 8,
    page_size: int = 8,
    pool_pages: int = 512,
    pool_id: str = "doubles",
    budget: int = 64,
    ttl_s: float = 10,
) -> Iterator[doubles.Engine]:
    """An engine whose connector is on the daemon."""
    layout = PageLayout(page_size, doubles.LAYERS, doubles.HEADS, doubles.DIM, "f32")
    cache = doubles.Cache(blocks, block_size, page_size)
    session = KvCache(daemon.address, f"{pool_id}-{page_size}", layout, pool_pages=pool_pages, ttl_s=ttl_s)
    worker = WorkerHalf(session, cache, page_size=page_size)
    half = SchedulerHalf(
        page_size=page_size, block_size=block_size, salt_of=lambda request: request.salt, lookup_timeout_s=5
    )
    worker.start()
    try:
        yield doubles.Engine(cache, half=half, worker=worker, budget=budget)
    finally:
        worker.close()


def run(one: doubles.Engine, *requests: doubles.Request, cancel: dict[str, int] | None = None) -> None:
    """Step until nothing is left to do."""
    for request in requests:
        one.add(request)
    until = time.monotonic() + DEADLINE_S
    while not one.idle:
        one.step()
        for name, after in (cancel or {}).items():
            if name in one.requests and len(one.requests[name].output) >= after:
                one.abort(name)
        assert time.monotonic() < until, "the engine does not come to an end"


def request(name: str, prompt: list[int], count: int = 6, salt: str | None = "") -> doubles.Request:
    return doubles.Request(name, prompt, count, salt)


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(doubles.VOCABULARY) for _ in range(count)]


def correct(one: doubles.Engine) -> None:
    """Every answer, cancelled ones as far as they came, is what it would be without a cache."""
    for done in one.done.values():
        assert done.output == doubles.answer(done.prompt, done.max_tokens)[: len(done.output)], done.request_id
    assert one.pool.free == len(one.pool.blocks) - 1, "blocks are still held"


def clean(daemon: Service, held: int = 0) -> None:
    """The daemon finds nothing wrong, and as many pages held as expected."""
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not stub.Fsck(kvcache_pb2.FsckRequest(deep=True)).violations
    until = time.monotonic() + DEADLINE_S
    while True:
        pools = stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
        if all(pool.held_pages == held and not pool.quarantined_pages for pool in pools):
            return
        assert time.monotonic() < until, pools


@pytest.mark.parametrize(("block_size", "page_size"), [(8, 8), (8, 16), (16, 8), (8, 32)])
def test_an_engine_takes_the_prefixes_of_another(daemon: Service, block_size: int, page_size: int) -> None:
    draw = random.Random(1)
    shared = tokens(draw, 100)
    prompts = [shared + tokens(draw, 1 + 5 * nth) for nth in range(6)]
    with engine(daemon, block_size=block_size, page_size=page_size) as first:
        run(first, *(request(f"a{nth}", prompt) for nth, prompt in enumerate(prompts)))
        correct(first)
        assert first.external == 0
    with engine(daemon, block_size=block_size, page_size=page_size) as second:
        run(second, *(request(f"b{nth}", prompt) for nth, prompt in enumerate(prompts)))
        correct(second)
        assert second.external >= 96
    clean(daemon)


def test_what_was_generated_is_a_prefix_too(daemon: Service) -> None:
    prompt = tokens(random.Random(2), 20)
    said = doubles.answer(prompt, 30)
    with engine(daemon) as first:
        run(first, request("a", prompt, 30))
    with engine(daemon) as second:
        run(second, request("b", prompt + said + [5], 3))
        correct(second)
        assert second.external == 48  # of 49 tokens with K and V


def test_salts_share_nothing(daemon: Service) -> None:
    prompt = tokens(random.Random(3), 50)
    with engine(daemon) as first:
        run(first, request("a", prompt, salt="alice"), request("private", prompt, salt=None))
    with engine(daemon) as second:
        run(second, request("b", prompt, salt="bob"), request("none", prompt, salt=None), request("c", prompt))
        assert second.external == 0
        run(second, request("d", prompt, salt="alice"))
        assert second.external == 48
        correct(second)


def test_preempted_and_cancelled_requests_cost_nothing_but_time(daemon: Service) -> None:
    draw = random.Random(4)
    shared = tokens(draw, 40)
    for round_ in range(3):
        with engine(daemon, blocks=24, budget=32) as one:
            jobs = [request(f"{round_}.{nth}", shared + tokens(draw, draw.randrange(40)), 24) for nth in range(12)]
            run(one, *jobs, cancel={f"{round_}.{nth}": draw.randrange(20) for nth in range(0, 12, 3)})
            assert one.preempted and len(one.done) == 12
            correct(one)
    clean(daemon)


def test_a_full_pool_only_costs_hits(daemon: Service) -> None:
    draw = random.Random(5)
    with engine(daemon, pool_pages=6) as one:
        jobs = [request(f"{nth}", tokens(draw, 60), 10) for nth in range(8)]
        run(one, *jobs)
        correct(one)
    clean(daemon)


def test_a_reset_hides_what_was_cached_before(daemon: Service) -> None:
    prompt = tokens(random.Random(6), 60)
    with engine(daemon) as one:
        run(one, request("a", prompt))
        one.pool.reset()
        run(one, request("b", prompt))
        assert one.external == 56
        one.pool.reset()
        assert one.half is not None
        one.half.reset()
        run(one, request("c", prompt, salt="another, as the connector's salts are behind a reset"))
        assert one.external == 56
        correct(one)


def test_the_daemon_dies_and_comes_back(tmp_path: Path) -> None:
    draw = random.Random(7)
    shared = tokens(draw, 64)
    with kvcache(tmp_path) as first:
        with engine(first, blocks=96, ttl_s=2) as one:
            assert one.worker is not None
            run(one, request("before", shared))
            for nth in range(16):
                one.add(request(f"{nth}", shared + tokens(draw, 30), 40))
            for _ in range(12):
                one.step()
            first.kill()
            run(one)
            correct(one)
            with kvcache(tmp_path) as second:
                until = time.monotonic() + DEADLINE_S
                while not one.worker.connected:
                    assert time.monotonic() < until
                    one.step()
                nth = 0
                while not one.external:
                    assert time.monotonic() < until
                    # Its own blocks make the new daemon warm, unless it is over before its lookup is answered.
                    run(one, request(f"after-{nth}", shared + tokens(draw, 8), 40))
                    one.pool.reset()
                    run(one, request(f"again-{nth}", shared + tokens(draw, 8)))
                    nth += 1
                correct(one)
                assert one.external >= 64
                clean(second)


def test_a_load_that_may_have_read_other_pages_is_computed_instead(daemon: Service) -> None:
    prompt = tokens(random.Random(8), 60)
    with engine(daemon) as one:
        run(one, request("a", prompt))
        one.pool.reset()
        assert one.worker is not None
        session = one.worker._session
        load, over = one.cache.load, []

        def overtaken(*arguments: object) -> int:
            over.append(load(*arguments))  # type: ignore[arg-type]
            one.cache.rows[list(arguments[3])] = -1  # type: ignore[call-overload]
            return 0

        one.cache.load = overtaken  # type: ignore[method-assign, assignment]
        session.may_write = lambda: not over  # type: ignore[method-assign]
        run(one, request("b", prompt))
        assert over and one.failed == 56
        correct(one)
