# mypy: disable-error-code="assignment, return-value"
"""The engine's metrics: each documented one exists, moves, and agrees with GetStats and with the requests made."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import PagesFilling, ServiceError
from services.engine.metrics import PREFIX
from services.engine.pages.source import Demand, Grant
from services.engine.scheduling.loop import EngineLoop
from tests import polling
from tests.engine.fakes import Harness, make_request
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request
from tests.processes import Service, kvcache
from tests.scraping import NOTHING, Scrape, scrape, until

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
LIMITS = ("--max-batch", "2", "--max-queue", "1", "--pool-pages", "10", "--metrics", "127.0.0.1:0")
PROMPT = list(range(1, 41))  # two whole pages, and half a one


def documented() -> set[str]:
    return set(re.findall(rf"^\| `({PREFIX}\w+)` \|", DOCS.read_text(), re.MULTILINE))


class Watched:
    """An engine in this process on a daemon that is another, and its metrics."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.daemons = contextlib.ExitStack()
        self.daemon: Service = self.daemons.enter_context(kvcache(directory))
        self.engine = RunningEngine(directory, *LIMITS, kvcache=self.daemon.address)
        self.stub = self.engine.stub

    def look(self) -> Scrape:
        bound = self.engine.engine.metrics_bound
        assert bound
        return scrape(bound)

    def close(self) -> None:
        self.engine.close()
        self.daemons.close()

    # --- what moves metrics -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.engine.start()

    def generate(self) -> None:
        collect(self.stub.Generate(request(PROMPT, max_tokens=6)))
        self.engine.idle()

    @property
    def loop(self) -> EngineLoop:
        loop = self.engine.engine.loop
        assert loop is not None
        return loop

    def hold(self) -> None:
        """Two run, one waits, and nothing advances until ``let_go``."""
        gate, scheduler = self.engine.steps, self.loop.scheduler
        gate.hold()
        self.held = [self.stub.Generate(request([at] * 20, max_tokens=40)) for at in range(1, 4)]
        assert gate.reached.wait(60)
        self.engine.until_live(3)
        while len(scheduler.running) < 2 or not scheduler.waiting.tokens:
            gate.step()

    def let_go(self) -> None:
        self.engine.steps.release()
        for stream in self.held:
            collect(stream)
        self.engine.idle()

    def crowd(self) -> None:
        """More requests than the queue holds arrive during one step."""
        gate = self.engine.steps
        gate.hold()
        first = self.stub.Generate(request(max_tokens=2))
        assert gate.reached.wait(60)
        batch = self.stub.BatchGenerate(pb.BatchGenerateRequest(requests=[request([7], max_tokens=2)] * 12))
        self.engine.until_live(13)
        gate.release()
        assert sum(item.HasField("error") for item in batch) == 10
        collect(first)
        self.engine.idle()

    def cancel(self) -> None:
        self.engine.steps.hold()
        stream = self.stub.Generate(request(max_tokens=140, request_id="ends"))
        assert self.engine.steps.reached.wait(60)
        self.engine.steps.step()
        next(stream)
        self.stub.CancelGeneration(pb.CancelGenerationRequest(request_id="ends"))
        self.engine.steps.release()
        assert collect(stream)[2].reason == pb.FINISH_REASON_CANCELLED
        self.engine.idle()

    def fail(self) -> None:
        def broken(*given: object) -> None:
            raise ValueError("broken")

        runner = self.engine.steps
        whole, runner._computed = runner._computed, broken
        assert refused(lambda: self.stub.Generate(request())).reason == "FORWARD_FAILED"
        runner._computed = whole
        self.engine.idle()

    def preempt(self) -> None:
        batch = pb.BatchGenerateRequest(requests=[request([at] * 10, max_tokens=100) for at in (11, 12)])
        assert not any(item.HasField("error") for item in self.stub.BatchGenerate(batch))
        self.engine.idle()

    def submit(self) -> None:
        self.stub.SubmitGeneration(pb.SubmitGenerationRequest(request=request(request_id="kept", max_tokens=2)))
        *_, last = self.stub.WatchGeneration(pb.WatchGenerationRequest(request_id="kept"))
        assert last.response.finish.usage.completion_tokens == 2
        self.engine.idle()

    def fill(self) -> None:
        """A long prompt waits for pages that the daemon says it is filling."""
        source = self.loop._source
        exchange = source.exchange

        def filling(demands: list[Demand], removed: list[str]) -> Any:
            source.exchange = exchange
            error = PagesFilling("filling", retry_after_s=0.01)
            return SimpleNamespace(result=lambda: [Grant(demand.sequence_id, error=error) for demand in demands])

        source.exchange = filling
        collect(self.stub.Generate(request([5] * 100, max_tokens=2)))
        self.engine.idle()

    def restart_the_daemon(self) -> None:
        self.daemon.kill()
        self.daemon = self.daemons.enter_context(kvcache(self.directory))
        collect(self.stub.Generate(request(max_tokens=2)))
        self.engine.idle()

    def drain(self) -> None:
        self.engine.steps.hold()
        self.held = [self.stub.Generate(request(max_tokens=100))]
        assert self.engine.steps.reached.wait(60)
        self.stopping = self.engine.begin(self.engine.engine.stop(30))
        self.engine.stopped = True
        polling.until(lambda: self.engine.engine.servicer.draining)


@pytest.fixture
def watched() -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        with contextlib.closing(Watched(Path(name))) as one:
            yield one


FINISHED = {
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "rpc_handled_total", "rpc_handling_seconds"),
}
STEPPED = {
    *("step_seconds", "step_requests", "iteration_tokens_total", "page_calls_total", "page_wait_seconds"),
    *("kvcache_rpc_handled_total", "kvcache_rpc_handling_seconds", "generation_tokens_total"),
    *(
        "prompt_tokens_total",
        "prefix_cache_queries_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
    ),
}
#: What is done, and the families that it has to move; in this order.
ACTIONS: list[tuple[Callable[[Watched], None], set[str]]] = [
    (Watched.generate, FINISHED | STEPPED | {"request_success_total"}),
    (Watched.generate, {"prefix_cache_hits_total"}),
    (
        Watched.hold,
        {"num_requests_running", "num_requests_waiting", "num_tokens_waiting", "kv_pages_held", "kv_cache_usage_perc"}
        | {"stalled_seconds"},
    ),
    (Watched.let_go, {"num_requests_running", "num_requests_waiting", "num_tokens_waiting", "kv_pages_held"}),
    (Watched.crowd, {"requests_refused_total"}),
    (Watched.cancel, {"request_success_total"}),
    (Watched.fail, {"request_errors_total"}),
    (Watched.preempt, {"num_preemptions_total"}),
    (Watched.submit, {"generations_retained", "generation_bytes"}),
    (Watched.fill, {"fill_wait_seconds", "prefill_tokens_per_second"}),
    (Watched.restart_the_daemon, {"session_recoveries_total", "lease_info"}),
    (Watched.drain, {"draining"}),
]
#: Known as soon as a model is served.
CONSTANT = {"build_info", "model_info", "matrix_units_info", "queue_limit_requests", "queue_limit_tokens"}


def test_every_documented_metric_is_scraped_and_fed(watched: Watched) -> None:
    watched.start()
    before = watched.look()
    moved = before.moved_since(NOTHING) & {PREFIX + name for name in CONSTANT}
    for action, names in ACTIONS:
        action(watched)
        after = watched.look()
        changed = after.moved_since(before)
        assert {PREFIX + name for name in names} <= changed, action.__name__
        moved |= changed
        before = after
        if action not in (Watched.hold, Watched.drain):
            check_against(after, watched.stub.GetStats(pb.GetStatsRequest()))
    assert after.own() == documented()
    assert documented() - moved == set()
    [model] = after.labels(f"{PREFIX}model_info")
    assert model == {"model": "shakespeare", "backend": "numpy"}
    assert after.labels(f"{PREFIX}matrix_units_info") == [{"state": "none"}]
    assert after.value(f"{PREFIX}queue_limit_requests") == 1
    assert after.value(f"{PREFIX}draining") == 1
    assert after.value("process_cpu_seconds_total") > 0
    watched.engine.steps.release()
    watched.stopping.result(60)


def check_against(seen: Scrape, stats: pb.GetStatsResponse) -> None:
    """A quiet engine's, or one that is held."""

    def value(name: str, **labels: str) -> float:
        return seen.value(PREFIX + name, **labels)

    ended = {reason: value("request_success_total", finished_reason=reason) for reason in ("eos", "stop", "length")}
    assert sum(ended.values()) == stats.finished_requests
    assert value("request_success_total", finished_reason="cancelled") == stats.cancelled_requests
    failed = seen.labels(f"{PREFIX}request_errors_total")
    assert sum(value("request_errors_total", **labels) for labels in failed) == stats.failed_requests
    over = stats.finished_requests + stats.cancelled_requests + stats.failed_requests
    assert value("e2e_request_latency_seconds_count") == value("request_prompt_tokens_count") == over
    assert value("num_requests_running") == stats.running_requests
    assert value("num_requests_waiting") == stats.queued_requests
    assert value("num_tokens_waiting") == stats.queued_tokens
    assert value("prompt_tokens_total") == stats.prompt_tokens
    assert value("generation_tokens_total") == stats.generated_tokens
    tokens = value("time_to_first_token_seconds_count") + value("inter_token_latency_seconds_count")
    assert tokens == stats.generated_tokens
    assert value("prefix_cache_hits_total") == stats.cached_tokens
    assert value("num_preemptions_total") == stats.preemptions
    for phase in ("schedule", "compute", "page_wait"):
        assert value("step_seconds_count", phase=phase) == stats.steps
    assert value("step_requests_count") == value("iteration_tokens_total_count") == stats.steps
    assert value("page_calls_total") == stats.page_calls
    assert value("page_wait_seconds_sum") == pytest.approx(stats.page_wait.ToNanoseconds() / 1e9, abs=1e-6)
    assert value("kv_pages_held") == stats.held_pages
    assert value("session_recoveries_total") == stats.recoveries
    assert value("generations_retained") == stats.retained_generations
    assert value("generation_bytes") == stats.generation_bytes
    assert value("draining") == stats.draining
    assert seen.labels(f"{PREFIX}lease_info") == [{"epoch": f"{stats.kvcache_epoch:016x}"}]


def test_it_counts_what_was_asked(watched: Watched) -> None:
    watched.start()
    before = watched.look()
    for _ in range(2):
        watched.generate()
    after = watched.look()

    def grew(name: str, **labels: str) -> float:
        return after.value(PREFIX + name, **labels) - before.value(PREFIX + name, **labels)

    assert grew("prompt_tokens_total") == grew("request_prompt_tokens_sum") == 80
    assert grew("generation_tokens_total") == grew("request_generation_tokens_sum") == 12
    assert grew("prefix_cache_queries_total") == 80 and grew("prefix_cache_hits_total") == 32
    assert grew("iteration_tokens_total_sum") == 40 + 5 + 8 + 5  # all but each last token is computed, and no hit
    assert grew("step_requests_sum") == 12
    assert grew("request_success_total", finished_reason="length") == 2
    assert grew("time_to_first_token_seconds_count") == 2 and grew("inter_token_latency_seconds_count") == 10
    assert grew("rpc_handled_total", method="Generate", code="OK") == 2
    assert grew("kvcache_rpc_handled_total", method="AllocatePages", code="OK") == grew("page_calls_total")
    assert after.value(f"{PREFIX}kvcache_rpc_handled_total", method="OpenSession", code="OK") == 1
    longest = grew("e2e_request_latency_seconds_sum")
    assert longest > grew("time_to_first_token_seconds_sum") > grew("request_queue_time_seconds_sum") > 0
    spent = sum(grew("step_seconds_sum", phase=phase) for phase in ("schedule", "compute", "page_wait"))
    assert 0 < grew("step_seconds_sum", phase="compute") < spent


def test_samples_count_as_requests_whose_prompt_was_found(watched: Watched) -> None:
    watched.start()
    before = watched.look()
    found = list(watched.stub.Generate(request(PROMPT, max_tokens=6, n=3)))
    watched.engine.idle()
    after = watched.look()

    def grew(name: str, **labels: str) -> float:
        return after.value(PREFIX + name, **labels) - before.value(PREFIX + name, **labels)

    assert grew("prompt_tokens_total") == grew("request_prompt_tokens_sum") == 3 * 40
    assert grew("prefix_cache_queries_total") == 3 * 40 and grew("prefix_cache_hits_total") == 2 * 40
    assert grew("generation_tokens_total") == sum(len(one.token_ids) for one in found) == 3 * 6
    assert grew("time_to_first_token_seconds_count") == grew("request_queue_time_seconds_count") == 3
    assert grew("inter_token_latency_seconds_count") == 3 * 5
    assert grew("request_success_total", finished_reason="length") == 3
    assert grew("e2e_request_latency_seconds_count") == 3
    assert grew("rpc_handled_total", method="Generate", code="OK") == 1
    refusal = refused(lambda: watched.stub.Generate(request(PROMPT, n=4)))
    assert (refusal.reason, refusal.field) == ("FIELD_INVALID", "n")
    assert watched.look().value(f"{PREFIX}requests_refused_total", reason="FIELD_INVALID") == 1


def test_refused_and_failed_calls_are_told_by_code_and_reason(watched: Watched) -> None:
    watched.start()

    def reason(message: pb.GenerateRequest) -> ServiceError:
        return refused(lambda: watched.stub.Generate(message))

    assert reason(request(max_tokens=900)).reason == "EXCEEDS_POOL"
    assert reason(request(priority=101)).reason == "FIELD_INVALID"
    seen = watched.look()
    assert seen.value(f"{PREFIX}requests_refused_total", reason="EXCEEDS_POOL") == 1
    for code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT"):
        until(watched.look, f"{PREFIX}rpc_handled_total", 1, method="Generate", code=code)


def test_before_there_is_a_model_there_are_few_metrics(watched: Watched) -> None:
    names = {metric.name for metric in watched.engine.engine.metrics.collect()}
    assert f"{PREFIX}draining" in names and f"{PREFIX}num_requests_running" not in names


# --- the data, by a clock that only tests move ------------------------------------------------------------------------


def test_latencies_are_measured_from_where_they_say() -> None:
    harness = Harness(page_size=4)
    loop, run = harness.loop, harness.memory.run

    def slow(step: Any) -> list[int | ServiceError | None]:
        harness.clock.now += 0.5
        return run(step)

    harness.memory.run = slow
    asked = make_request("a", [1, 2, 3], max_tokens=3)
    harness.submit(dataclasses.replace(asked, submitted_at=harness.clock.now - 2.0))
    harness.until_idle()
    seen = loop.stats
    assert (seen.first_token.count, seen.between_tokens.count, seen.request.count) == (1, 2, 1)
    assert seen.queue.sum == pytest.approx(2.0)
    assert seen.first_token.sum == pytest.approx(2.5, abs=0.05)
    assert seen.between_tokens.sum == pytest.approx(1.0, abs=0.05)
    assert seen.compute.sum == pytest.approx(1.5) and seen.schedule.sum == seen.page_wait.sum == 0
    assert (seen.step_tokens.sum, seen.step_requests.sum, seen.step_tokens.count) == (5, 3, 3)
