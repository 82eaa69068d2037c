"""One trace from the client through the engine to the daemon, and no harm from a collector that is slow or gone."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from tests.collector import Collector, Received
from tests.generation import collect, request
from tests.polling import until
from tests.processes import ROOT, Service, engine, kvcache
from tests.scraping import scrape

MODEL = ROOT / "models" / "shakespeare"
SERVER, CLIENT, INTERNAL, ERROR = 2, 3, 1, 2
GENERATE = "rocmforge.engine.v1.EngineService/Generate"
KVCACHE = "rocmforge.kvcache.v1.KvCacheService"
ALLOCATE = f"{KVCACHE}/AllocatePages"
REQUEST = "text_completion shakespeare"
#: Spans leave at once, so that no test waits for the SDK's 5 s.
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


#: The traces of which clients said that they are sampled.
SAMPLED: set[str] = set()


def parent(*, sampled: bool = True) -> str:
    """A client's trace context."""
    trace = secrets.token_hex(16)
    if sampled:
        SAMPLED.add(trace)
    return f"00-{trace}-{secrets.token_hex(8)}-0{int(sampled)}"


def trace_of(traceparent: str) -> str:
    return traceparent.split("-")[1]


@dataclass
class Traced:
    """A daemon and an engine that send to one collector."""

    collector: Collector
    daemon: Service
    engine: Service

    @property
    def stub(self) -> Any:
        return engine_pb2_grpc.EngineServiceStub(self.engine.channel)

    def generate(self, traceparent: str = "", **fields: Any) -> pb.Finish:
        metadata = [("traceparent", traceparent)] if traceparent else None
        return collect(self.stub.Generate(request(**fields), metadata=metadata))[2]

    def spans(self, traceparent: str, *names: str) -> list[Received]:
        """The spans of a trace, once those of these names have come."""

        def found(spans: list[Received]) -> list[Received]:
            return [span for span in spans if span.trace_id == trace_of(traceparent)]

        return found(self.collector.until(lambda spans: {*names} <= {span.name for span in found(spans)}))


@contextlib.contextmanager
def traced(*flags: str, **environment: str) -> Iterator[Traced]:
    collector = Collector()
    variables = {"PATH": "/usr/bin:/bin", **AT_ONCE, **environment}
    with tempfile.TemporaryDirectory(prefix="rf-") as name, contextlib.closing(collector):
        given = ("--otlp-endpoint", collector.endpoint, "--metrics", "127.0.0.1:0", *flags)
        with kvcache(Path(name), "--memory", "16MiB", *given, environment=variables) as daemon:
            with engine(Path(name), daemon.address, *given, model=MODEL, environment=variables) as one:
                yield Traced(collector, daemon, one)


@pytest.fixture(scope="module")
def services() -> Iterator[Traced]:
    """Nothing is sampled but what a client says."""
    with traced("--trace-ratio", "0") as both:
        yield both


def only(spans: list[Received], name: str, service: str = "rocmforge-engine") -> Received:
    [span] = [span for span in spans if span.name == name and span.service == service]
    return span


def test_one_trace_from_the_client_to_the_daemon(services: Traced) -> None:
    mine = parent()
    began = time.time_ns()
    finish = services.generate(mine, prompt="But soft, what light", max_tokens=40)
    ended = time.time_ns()
    spans = services.spans(mine, GENERATE, REQUEST, "queue", "prefill", "decode", "release", ALLOCATE)
    call, whole = only(spans, GENERATE), only(spans, REQUEST)
    assert (call.parent, call.kind, call.status) == (mine.split("-")[2], SERVER, 0)
    assert call.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "rpc.response.status_code": "OK",
    }
    assert (whole.parent, whole.kind, whole.status) == (call.span_id, INTERNAL, 0)
    # Times are those that the stream told: each within the other, and the stages follow each other without a gap.
    assert began <= call.start <= whole.start <= whole.end <= ended
    assert call.end >= whole.start
    stages = [only(spans, name) for name in ("queue", "prefill", "decode", "release")]
    assert {stage.parent for stage in stages} == {whole.span_id}
    assert stages[0].start == whole.start
    for before, after in itertools.pairwise(stages):
        assert before.end == after.start
    queue, prefill, decode, _ = stages
    usage = finish.usage
    assert queue.seconds == pytest.approx(usage.queue_time.ToNanoseconds() / 1e9, abs=1e-6)
    first = usage.time_to_first_token.ToNanoseconds() / 1e9
    assert queue.seconds + prefill.seconds == pytest.approx(first, abs=1e-6)
    assert sum(stage.seconds for stage in stages[:3]) == pytest.approx(usage.total_time.ToNanoseconds() / 1e9, abs=1e-6)
    assert whole.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(first, abs=1e-6)
    assert whole.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert whole.attributes["gen_ai.usage.output_tokens"] == 40 == decode.attributes["gen_ai.usage.output_tokens"]
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert whole.attributes["gen_ai.operation.name"] == "text_completion"
    # The daemon's calls: from opening the sequence to giving its pages back.
    made = [span for span in spans if span.name == ALLOCATE and span.service == "rocmforge-engine"]
    served = [span for span in spans if span.name == ALLOCATE and span.service == "rocmforge-kvcache"]
    assert len(made) >= 2 and {span.parent for span in made} == {whole.span_id}
    assert {(span.kind, span.status) for span in made} == {(CLIENT, 0)}
    spans = services.collector.until(
        lambda found: len([s for s in found if s.trace_id == trace_of(mine) and s.kind == SERVER]) > len(made)
    )
    served = [span for span in spans if span.name == ALLOCATE and span.service == "rocmforge-kvcache"]
    served = [span for span in served if span.trace_id == trace_of(mine)]
    assert sorted(span.parent for span in served) == sorted(span.span_id for span in made)
    by_id = {span.span_id: span for span in made}
    assert all(by_id[span.parent].seconds >= span.seconds for span in served)
    assert {span.attributes["rpc.response.status_code"] for span in served} == {"OK"}


def test_nothing_of_prompts_tokens_or_secrets_leaves(services: Traced) -> None:
    mine = parent()
    services.generate(mine, prompt="Wherefore art thou, Pyramus", max_tokens=12)
    spans = services.spans(mine, GENERATE, REQUEST, "release", ALLOCATE)
    services.collector.until(lambda found: any(s.trace_id == trace_of(mine) and "session" in str(s) for s in found))
    said = "".join(services.collector.texts)
    assert "Pyramus" not in said and "Wherefore" not in said
    [opened] = services.engine.events("session_opened")
    assert opened["session"] in said, "the short id, which logs have too"
    keys = {key for span in services.collector.spans for key in span.attributes}
    allowed = ("rpc.", "gen_ai.request.", "gen_ai.response.", "gen_ai.usage.", "rocmforge.", "error.type")
    assert {key for key in keys if not key.startswith(allowed)} <= {"gen_ai.operation.name", "gen_ai.provider.name"}
    longest = max(len(str(value)) for span in spans for value in span.attributes.values())
    assert longest <= 128
    assert not {key for key in keys if key.endswith(("prompt", "text", "token_ids", "messages", "session_id"))}


def test_names_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
    from opentelemetry.semconv.attributes import error_attributes

    known = {
        value
        for module in (gen_ai_attributes, rpc_attributes, error_attributes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    used = set[str]()
    for path in (ROOT / "services").rglob("*.py"):
        words = path.read_text().split('"')[1::2]
        used |= {word for word in words if word.startswith(("gen_ai.", "rpc.")) or word == "error.type"}
    assert len(used) > 10 and used <= known, used - known


def test_what_the_client_does_not_sample_is_not_sent(services: Traced) -> None:
    """Not by the engine, nor by the daemon on its behalf; and without a word from the client the ratio of 0 counts."""
    out = parent(sampled=False)
    services.generate(out, max_tokens=30)
    services.generate(max_tokens=30)
    mine = parent()
    services.generate(mine)  # what a service sends comes in order
    sent = {(trace_of(mine), "rocmforge-engine", "release"), (trace_of(mine), "rocmforge-kvcache", ALLOCATE)}
    services.collector.until(lambda found: sent <= {(span.trace_id, span.service, span.name) for span in found})
    assert {span.trace_id for span in services.collector.spans} <= SAMPLED


def test_everything_is_sampled_at_a_ratio_of_one_and_by_the_parent_first() -> None:
    with traced("--trace-ratio", "1") as services:
        services.generate(max_tokens=4)
        whole = only(services.collector.until(lambda found: any(span.name == REQUEST for span in found)), REQUEST)
        out = parent(sampled=False)
        services.generate(out, max_tokens=40)
        services.generate(max_tokens=5)
        spans = services.collector.until(lambda found: len([s for s in found if s.name == REQUEST]) == 2)
        [other] = {span.trace_id for span in spans if span.name == REQUEST} - {whole.trace_id}

        def served(spans: list[Received]) -> set[str]:
            """The traces of calls that the daemon says it served."""
            return {s.trace_id for s in spans if s.name == ALLOCATE and s.service == "rocmforge-kvcache"}

        # The engine's calls for a request that is not sampled are not the daemon's to sample.
        spans = services.collector.until(lambda found: served(found) >= {whole.trace_id, other})
        assert served(spans) == {whole.trace_id, other}
        # Calls that are for no request are traces of their own: the daemon's ratio decides.
        assert any(span.name == f"{KVCACHE}/OpenSession" and not span.parent for span in spans)


def test_sampled_requests_of_one_batch_share_a_call(services: Traced) -> None:
    """The call has one parent. The other's trace has a span that links to it."""
    deadline = time.monotonic() + 120
    while True:  # until two meet in a call
        parents = [parent(), parent()]
        streams = [
            services.stub.Generate(request([at + 1] * 40, max_tokens=600), metadata=[("traceparent", one)])
            for at, one in enumerate(parents)
        ]
        for stream in streams:
            collect(stream)
        found = [services.spans(one, REQUEST, "release") for one in parents]
        if linked := [span for spans in found for span in spans if span.name == ALLOCATE and span.links]:
            break
        assert time.monotonic() < deadline, "two requests of one batch never met in a call"
    calls = {span.span_id: span for spans in found for span in spans if span.kind == CLIENT}
    for span in linked:
        [(trace, target)] = span.links
        call = calls[target]
        assert call.trace_id == trace != span.trace_id
        # Each trace reads the wall clock by itself, so times of two traces do not compare.
        assert (span.kind, span.attributes["rocmforge.demands"]) == (INTERNAL, call.attributes["rocmforge.demands"])


def test_several_samples_have_a_decode_each(services: Traced) -> None:
    mine = parent()
    sampling = {"temperature": 0.8, "seed": 7}
    stream = services.stub.Generate(request(max_tokens=6, n=3, sampling=sampling), metadata=[("traceparent", mine)])
    assert sum(one.HasField("finish") for one in stream) == 3
    spans = services.spans(mine, REQUEST)
    whole = only(spans, REQUEST)
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert whole.attributes["gen_ai.usage.output_tokens"] == 18
    assert len([span for span in spans if span.name == "decode"]) == 3
    assert len([span for span in spans if span.name in ("queue", "prefill")]) == 2


def test_a_cancelled_request_says_so(services: Traced) -> None:
    mine = parent()
    stream = services.stub.Generate(request(max_tokens=900), metadata=[("traceparent", mine)])
    next(stream)
    stream.cancel()
    spans = services.spans(mine, GENERATE, REQUEST)
    assert only(spans, REQUEST).attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    call = only(spans, GENERATE)
    assert (call.attributes["rpc.response.status_code"], call.status) == ("CANCELLED", 0)


def test_a_refused_call_says_why(services: Traced) -> None:
    mine = parent()
    with pytest.raises(grpc.RpcError):
        services.generate(mine, sampling={"top_p": 2.0})
    call = only(services.spans(mine, GENERATE), GENERATE)
    assert (call.attributes["rpc.response.status_code"], call.status) == ("INVALID_ARGUMENT", 0)


def test_a_request_that_fails_says_why(services: Traced) -> None:
    for timeout_ms in (100, 400, 1600, 6400, 25600):  # before which a busy machine may decode nothing
        mine = parent()
        submitted = pb.SubmitGenerationRequest(request=request(max_tokens=900))
        submitted.timeout.FromMilliseconds(timeout_ms)
        services.stub.SubmitGeneration(submitted, metadata=[("traceparent", mine)])
        spans = services.spans(mine, REQUEST)  # its stages were sent before it
        if "decode" in {span.name for span in spans}:
            break
    whole, decode = only(spans, REQUEST), only(spans, "decode")
    assert whole.status == decode.status == ERROR
    assert whole.attributes["error.type"] == decode.attributes["error.type"] == "DEADLINE_EXCEEDED"
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_submitted_generation_outlives_its_call_in_the_trace(services: Traced) -> None:
    mine = parent()
    submitted = pb.SubmitGenerationRequest(request=request(max_tokens=20, request_id="traced"))
    services.stub.SubmitGeneration(submitted, metadata=[("traceparent", mine)])
    spans = services.spans(mine, REQUEST, "rocmforge.engine.v1.EngineService/SubmitGeneration")
    call, whole = only(spans, "rocmforge.engine.v1.EngineService/SubmitGeneration"), only(spans, REQUEST)
    assert whole.parent == call.span_id and whole.attributes["gen_ai.response.id"] == "traced"


def test_a_malformed_context_begins_a_trace_of_its_own(services: Traced) -> None:
    for wrong in ("nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-1-2-3"):
        assert services.generate(wrong, max_tokens=2).usage.completion_tokens == 2


# --- a collector that is slow, gone or wrong -------------------------------------------------------------------------


def counted(service: Service, name: str, result: str) -> float:
    return scrape(service.started()["metrics"]).value(f"{name}_trace_spans_total", result=result)


def until_counted(service: Service, name: str, result: str, least: float) -> float:
    until(lambda: counted(service, name, result) >= least, f"fewer than {least} {result}")
    return counted(service, name, result)


def until_dropped(service: Service) -> list[dict[str, Any]]:
    """The events of spans that were dropped, once there is one: it is logged after they are counted."""
    deadline = time.monotonic() + 60
    while not (found := service.events("spans_dropped")):
        assert time.monotonic() < deadline, service.log()
    return found


def test_a_collector_that_hangs_delays_no_stream_and_loses_what_the_queue_does_not_hold() -> None:
    room = {"OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8", "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
    with traced("--trace-ratio", "1", **room) as services:
        services.generate(max_tokens=4)
        until_counted(services.engine, "rocmforge_engine", "sent", 5)
        services.collector.open.clear()
        services.collector.reached.clear()
        for _ in range(20):
            took = services.generate(max_tokens=4).usage.total_time.ToNanoseconds() / 1e9
            assert took < 50  # less than what the exporter waits for
        assert services.collector.reached.wait(60)
        assert until_counted(services.engine, "rocmforge_engine", "dropped", 20) < 20 * 12
        services.collector.open.set()
        before = counted(services.engine, "rocmforge_engine", "sent")
        services.generate(max_tokens=4)
        until_counted(services.engine, "rocmforge_engine", "sent", before + 5)


def test_a_collector_that_is_killed_hurts_no_stream() -> None:
    quickly = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with traced("--trace-ratio", "1", **quickly) as services:
        stream = services.stub.Generate(request(max_tokens=300))
        head = list(next(stream).token_ids)
        services.collector.close()
        _, tokens, finish = collect(stream)
        assert len(head + tokens) == 300 and finish.reason == pb.FINISH_REASON_LENGTH
        assert services.generate(max_tokens=4).usage.completion_tokens == 4
        until_counted(services.engine, "rocmforge_engine", "dropped", 5)
        until_counted(services.daemon, "rocmforge_kvcache", "dropped", 1)
        assert {event["level"] for event in until_dropped(services.engine)} == {"warning"}
        # OpenTelemetry's own lines are no events. What gRPC's core may write on a busy machine is none of them.
        others = [line for line in services.engine.log().splitlines() if not line.startswith("{")]
        assert not [line for line in others if "export" in line.lower() or "opentelemetry" in line.lower()]
        assert services.engine.stop() == 0 and services.daemon.stop() == 0


def test_what_answers_but_is_no_collector_hurts_no_stream() -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    endpoint = f"http://127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    with traced("--trace-ratio", "1", "--otlp-endpoint", endpoint) as services:
        assert services.generate(max_tokens=4).usage.completion_tokens == 4
        until_counted(services.engine, "rocmforge_engine", "dropped", 5)
        assert counted(services.engine, "rocmforge_engine", "sent") == 0
        assert "UNIMPLEMENTED" in until_dropped(services.engine)[0]["detail"]
    other.stop(0).wait()


def test_a_daemon_that_is_killed_is_seen_in_the_trace_of_who_waited() -> None:
    with traced("--trace-ratio", "0") as services:
        mine = parent()
        stream = services.stub.Generate(request(max_tokens=300), metadata=[("traceparent", mine)])
        next(stream)
        services.daemon.kill()
        made = services.spans(mine, ALLOCATE)
        services.collector.until(lambda found: any(span.status == ERROR and span.kind == CLIENT for span in found))
        stream.cancel()
        made = [span for span in services.spans(mine, REQUEST) if span.status == ERROR and span.kind == CLIENT]
        assert {span.attributes["error.type"] for span in made} <= {"UNAVAILABLE", "CANCELLED", "FAILED_PRECONDITION"}


def test_what_is_pending_at_sigterm_is_sent() -> None:
    with traced("--trace-ratio", "1", OTEL_BSP_SCHEDULE_DELAY="3600000") as services:
        services.generate(max_tokens=4)
        assert not services.collector.spans
        assert services.engine.stop() == 0 and services.daemon.stop() == 0
        names = {(span.service, span.name) for span in services.collector.spans}
        assert {("rocmforge-engine", "decode"), ("rocmforge-kvcache", ALLOCATE)} <= names
        assert not services.engine.events("spans_dropped")


def test_a_collector_that_hangs_does_not_hold_up_the_end() -> None:
    patient = {"OTEL_BSP_SCHEDULE_DELAY": "3600000", "OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
    with traced("--trace-ratio", "1", **patient) as services:
        services.generate(max_tokens=4)
        services.collector.open.clear()
        assert services.engine.stop() == 0  # in less than a minute: the exporter alone would wait for an hour
        [dropped] = services.engine.events("spans_dropped")
        assert dropped["spans"] >= 5


# --- off -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["services.engine.server", "services.kvcache.server", "services.engine.__main__"])
def test_without_an_endpoint_nothing_of_opentelemetry_is_imported(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    path = {"PYTHONPATH": ":".join(str(ROOT / name) for name in (".", "protos", "clients/python"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PATH": "/usr/bin:/bin", **path})
    assert done.returncode == 0


@pytest.mark.parametrize("endpoint", [False, True])
def test_a_pair_imports_opentelemetry_with_an_endpoint_alone(endpoint: bool) -> None:
    """Not even for a request that its client samples."""
    flags = ("--otlp-endpoint", "http://127.0.0.1:1") if endpoint else ()
    told = {"PATH": "/usr/bin:/bin", "PYTHONPROFILEIMPORTTIME": "1"}
    with tempfile.TemporaryDirectory(prefix="rf-") as name, kvcache(Path(name), *flags, environment=told) as daemon:
        with engine(Path(name), daemon.address, *flags, model=MODEL, environment=told) as one:
            stub = engine_pb2_grpc.EngineServiceStub(one.channel)
            collect(stub.Generate(request(), metadata=[("traceparent", parent())]))
            for service in (daemon, one):
                assert "structlog" in service.log()
                assert ("opentelemetry" in service.log()) == endpoint


@pytest.mark.parametrize("module", ["services.engine", "services.kvcache"])
def test_without_the_packages_it_says_what_to_install(module: str) -> None:
    code = f"import sys; sys.modules['opentelemetry'] = None; from {module}.__main__ import main; sys.exit(main())"
    path = {"PYTHONPATH": ":".join(str(ROOT / name) for name in (".", "protos", "clients/python"))}
    command = [sys.executable, "-c", code, "--otlp-endpoint", "http://127.0.0.1:4317"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **path}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "opentelemetry is missing; `pip install 'rocmforge[otel]'`" in done.stderr
