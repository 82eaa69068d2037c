"""What is killed in the middle of a full batch, and what its clients see of that: nothing, but for a pause."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from tests.e2e.conftest import MODEL
from tests.gated import gated, until_live
from tests.generation import collect, request
from tests.polling import until
from tests.processes import Service, engine, kvcache

REQUESTS = 32
TOKENS = 90


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


def asked(at: int, salt: str) -> engine_pb2.GenerateRequest:
    """One of the requests, all different: greedy and drawn, short prompts and long, of one beginning and of others."""
    prompt = (
        "KING HENRY:\nOnce more unto the breach! " if at % 2 else "ROMEO:\n"
    ) + f"Act {at}, scene {at * 7 % 5}. " * (at % 9)
    sampling = {"temperature": 0.9 if at % 3 else 0.0, "seed": at}
    return request(prompt, TOKENS, sampling=sampling, cache_salt=salt, priority=at % 5 - 2)


def request_of_samples(at: int, samples: int) -> engine_pb2.GenerateRequest:
    """The same, drawn so that no two samples are alike."""
    message = asked(at, "")
    message.n, message.sampling.temperature, message.sampling.seed = samples, 0.9, at * 100
    return message


def watch(stub: Any, name: str, from_tokens: Sequence[int] = ()) -> Any:
    return stub.WatchGeneration(engine_pb2.WatchGenerationRequest(request_id=name, from_tokens=from_tokens))


def undisturbed(stub: Any) -> list[list[int]]:
    """What the requests generate when nothing happens."""
    batch = engine_pb2.BatchGenerateRequest(requests=[asked(at, "alone") for at in range(REQUESTS)])
    tokens: list[list[int]] = [[] for _ in range(REQUESTS)]
    for item in stub.BatchGenerate(batch):
        assert not item.HasField("error"), item.error
        tokens[item.index] += item.response.token_ids
    assert {len(one) for one in tokens} == {TOKENS}
    return tokens


def stub_of(service: Service) -> Any:
    return engine_pb2_grpc.EngineServiceStub(service.channel)


def stats(stub: Any) -> engine_pb2.GetStatsResponse:
    return stub.GetStats(engine_pb2.GetStatsRequest())


def assert_recovered(stub: Any) -> None:
    """One session was opened again: requests that have all their tokens may end before it is."""
    deadline = time.monotonic() + 60
    while not (found := stats(stub).recoveries):
        assert time.monotonic() < deadline, "the session was not opened again"
    assert found == 1


def assert_clean(stub: Any, daemon: Service) -> None:
    now = stats(stub)
    assert (now.running_requests, now.queued_requests, now.held_pages, now.failed_requests) == (0, 0, 0, 0)
    cache = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not cache.Fsck(kvcache_pb2.FsckRequest()).violations
    [pool] = cache.GetStats(kvcache_pb2.GetStatsRequest()).pools
    assert (pool.active_sequences, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)


def test_a_daemon_killed_under_a_full_batch_changes_no_token_of_any(directory: Path) -> None:
    with kvcache(directory) as first, gated(directory, first.address, model=MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        expected = undisturbed(stub)
        steps.hold()
        streams = [stub.Generate(asked(at, "")) for at in range(REQUESTS)]
        until_live(one, REQUESTS)
        steps.let(TOKENS // 3)  # prompts, too: each has begun by then, and none is done
        begun = [list(next(stream).token_ids) for stream in streams]
        during = stats(stub)
        assert during.running_requests == REQUESTS and during.recoveries == 0
        steps.let(TOKENS // 2)  # it is killed while they are computed, or behind them
        first.kill()
        steps.close()
        with kvcache(directory) as second:
            tokens = [head + collect(stream)[1] for head, stream in zip(begun, streams, strict=True)]
            assert tokens == expected
            assert_recovered(stub)
            assert_clean(stub, second)


def test_a_daemon_killed_under_submitted_samples_changes_nothing_that_watchers_are_told(directory: Path) -> None:
    samples, requests = 4, REQUESTS // 4
    with kvcache(directory) as first, gated(directory, first.address, model=MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        wanted = [request_of_samples(at, samples) for at in range(requests)]
        expected = dict[tuple[int, int], list[int]]()
        for item in stub.BatchGenerate(engine_pb2.BatchGenerateRequest(requests=wanted)):
            assert not item.HasField("error"), item.error
            expected.setdefault((item.index, item.response.sample), []).extend(item.response.token_ids)
        assert len(expected) == REQUESTS and {len(tokens) for tokens in expected.values()} == {TOKENS}
        steps.hold()
        submitted = []
        for at, message in enumerate(wanted):
            message.cache_salt = f"submitted {at}"  # nothing of what ran before is there for it
            submitted.append(stub.SubmitGeneration.future(engine_pb2.SubmitGenerationRequest(request=message)))
        until_live(one, REQUESTS)
        steps.let(TOKENS // 3)  # prompts, too: each sample has begun by then, and none is done
        names = [future.result(60).generation.request_id for future in submitted]
        told = {key: list[int]() for key in expected}
        streams = [watch(stub, name) for name in names]
        for at, stream in enumerate(streams):
            while not all(told[at, sample] for sample in range(samples)):
                response = next(stream).response
                told[at, response.sample] += response.token_ids
        during = stats(stub)
        assert during.running_requests + during.queued_requests == REQUESTS and during.recoveries == 0
        steps.let(TOKENS // 2)  # it is killed while they are computed, or behind them
        first.kill()
        steps.close()
        for at in range(0, requests, 2):  # half of them lose their connection as well
            streams[at].cancel()
            streams[at] = watch(stub, names[at], [len(told[at, sample]) for sample in range(samples)])
        with kvcache(directory) as second:
            for at, stream in enumerate(streams):
                for answer in stream:
                    assert not answer.HasField("error"), answer.error
                    told[at, answer.response.sample] += answer.response.token_ids
            assert told == expected
            assert_recovered(stub)
            for at, name in enumerate(names):
                kept = stub.GetGeneration(engine_pb2.GetGenerationRequest(request_id=name)).generation
                assert [list(one.token_ids) for one in kept.samples] == [expected[at, of] for of in range(samples)]
            assert_clean(stub, second)


def test_an_engine_killed_under_a_full_batch_comes_back_to_a_warm_cache(directory: Path) -> None:
    prompt = "KING RICHARD III:\n" + "A horse! a horse! my kingdom for a horse! " * 6
    with kvcache(directory) as daemon:
        with engine(directory, daemon.address, model=MODEL) as one:
            cold = collect(stub_of(one).Generate(request(prompt)))
            assert cold[2].usage.cached_tokens == 0
            streams = [stub_of(one).Generate(asked(at, "dies")) for at in range(REQUESTS)]
            for stream in streams:
                next(stream)
            one.kill()
        with engine(directory, daemon.address, model=MODEL, name="again") as other:
            warm = collect(stub_of(other).Generate(request(prompt)))
            assert warm[:2] == cold[:2]
            assert warm[2].usage.cached_tokens == (warm[2].usage.prompt_tokens - 1) // 16 * 16 > 0
            cache = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
            # Until the daemon saw that the process is gone; the 32 have left complete pages alone.
            until(lambda: not cache.GetStats(kvcache_pb2.GetStatsRequest()).pools[0].held_pages)
            until(lambda: not cache.GetStats(kvcache_pb2.GetStatsRequest()).pools[0].quarantined_pages)
            assert_clean(stub_of(other), daemon)
