"""Every way a request can end gives its pages back: afterwards nothing is held and no map knows it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2
from services.common import rpc
from tests.e2e.conftest import Pair
from tests.generation import collect, request
from tests.polling import until

PROMPT = "KING RICHARD III:\n" + "A horse! a horse! my kingdom for a horse! " * 12


def stats(pair: Pair) -> engine_pb2.GetStatsResponse:
    return pair.stub.GetStats(engine_pb2.GetStatsRequest())


def idle(pair: Pair) -> bool:
    now = stats(pair)
    return now.running_requests == now.queued_requests == now.held_pages == 0


def test_finished_by_length(pair: Pair) -> None:
    _, tokens, finish = collect(pair.stub.Generate(request(PROMPT, 5)))
    assert finish.reason == engine_pb2.FINISH_REASON_LENGTH and len(tokens) == 5
    pair.assert_clean()  # at once: the finish comes after the pages were given back


def test_stopped_by_a_token_a_string_and_eos(pair: Pair) -> None:
    _, tokens, _ = collect(pair.stub.Generate(request(PROMPT, 12)))
    text = pair.stub.Detokenize(engine_pb2.DetokenizeRequest(token_ids=tokens)).text
    _, stopped, finish = collect(pair.stub.Generate(request(PROMPT, 12, stopping={"stop_token_ids": [tokens[3]]})))
    assert finish.reason == engine_pb2.FINISH_REASON_STOP and finish.stop_token_id == tokens[3]
    assert stopped == tokens[: tokens.index(tokens[3]) + 1]
    pair.assert_clean()
    stop = text[4:8]
    shown, _, finish = collect(pair.stub.Generate(request(PROMPT, 12, stopping={"stop": [stop]})))
    assert finish.reason == engine_pb2.FINISH_REASON_STOP and finish.stop_text == stop
    assert shown == text[: text.index(stop)]
    pair.assert_clean()


def test_cancelled_by_dropping_the_call(pair: Pair) -> None:
    before = stats(pair).cancelled_requests

    def dropped() -> bool:
        """Whether it was before its end: then it is counted."""
        stream = pair.stub.Generate(request(PROMPT, 500))
        next(stream)
        stream.cancel()
        until(lambda: idle(pair))
        return stats(pair).cancelled_requests == before + 1

    until(dropped)
    pair.assert_clean()


def test_cancelled_by_another_call_while_it_decodes(pair: Pair) -> None:
    def cancelled() -> bool:
        """Whether it was before its end."""
        stream = pair.stub.Generate(request(PROMPT, 500, request_id="long"))
        next(stream)
        pair.stub.CancelGeneration(engine_pb2.CancelGenerationRequest(request_id="long"))
        _, tokens, finish = collect(stream)
        assert finish.reason == engine_pb2.FINISH_REASON_CANCELLED or len(tokens) == 500
        return finish.reason == engine_pb2.FINISH_REASON_CANCELLED

    until(cancelled)
    pair.assert_clean()
    pair.stub.CancelGeneration(engine_pb2.CancelGenerationRequest(request_id="long"))


def test_deadline(pair: Pair) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        collect(pair.stub.Generate(request(PROMPT, 700), timeout=0.15))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: idle(pair))
    pair.assert_clean()


def test_many_at_once_dropped_in_every_state(pair: Pair) -> None:
    """More than the batch holds, so that some are queued, some in prefill and some decoding when they are dropped."""
    streams = [pair.stub.Generate(request(f"{at}: {PROMPT}", 300)) for at in range(80)]
    next(streams[0])
    for stream in streams:
        stream.cancel()
    until(lambda: idle(pair))
    pair.assert_clean()


def test_a_client_process_that_dies(pair: Pair) -> None:
    """A channel closed under its calls, as when the client's process is killed."""
    channel = grpc.insecure_channel(pair.engine.address, options=[("grpc.use_local_subchannel_pool", 1)])
    from rocmforge.engine.v1 import engine_pb2_grpc

    stream = engine_pb2_grpc.EngineServiceStub(channel).Generate(request(PROMPT, 700))
    next(stream)
    channel.close()
    until(lambda: idle(pair))
    pair.assert_clean()


def test_the_same_tokens_alone_and_in_company(pair: Pair) -> None:
    def sampled(at: int) -> Any:
        return request(f"Scene {at}: {PROMPT[: 20 * at + 10]}", 24, sampling={"temperature": 0.9, "seed": at})

    alone = [collect(pair.stub.Generate(sampled(at)))[1] for at in range(8)]
    together: dict[int, list[int]] = {}

    def run(at: int) -> None:
        together[at] = collect(pair.stub.Generate(sampled(at)))[1]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[at] for at in range(8)] == alone
    pair.assert_clean()


def resident_kib(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def test_a_thousand_requests_leave_everything_flat(pair: Pair) -> None:
    def run(count: int) -> None:
        for _ in range(count):
            collect(pair.stub.Generate(request([1, 2, 3], 2)))

    run(200)
    calls, rounds = stats(pair).page_calls, [[resident_kib(service.pid) for service in (pair.daemon, pair.engine)]]
    for _ in range(4):
        run(200)
        rounds.append([resident_kib(service.pid) for service in (pair.daemon, pair.engine)])
    pair.assert_clean()
    pool = pair.pool()
    # 3 + 2 tokens never complete a page: all pages but those of earlier tests are free again.
    assert pool.free_pages + pool.cached_pages == pool.total_pages
    # What leaks does so in every round; a thread that a busy machine made start late does not.
    for seen in zip(*rounds, strict=True):
        growth = sorted(later - earlier for earlier, later in itertools.pairwise(seen))
        assert growth[1] < 410, f"resident memory was {seen} KiB, 200 requests apart"
    assert stats(pair).page_calls - calls <= 3 * 800


def test_the_deadline_of_a_queued_request(pair: Pair) -> None:
    streams = [pair.stub.Generate(request(f"{at}: {PROMPT}", 700)) for at in range(70)]
    next(streams[0])
    with pytest.raises(grpc.RpcError) as caught:
        collect(pair.stub.Generate(request("late", 5), timeout=0.2))
    assert rpc.error_from(caught.value).code == "DEADLINE_EXCEEDED"
    for stream in streams:
        stream.cancel()
    until(lambda: idle(pair))
    pair.assert_clean()
