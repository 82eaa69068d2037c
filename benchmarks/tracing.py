"""What traces cost: CPU time of an engine and its daemon for a request, with tracing and without.

Three pairs of processes serve the same requests in turn: two without an endpoint, and one that samples ``--ratio`` of
them for a collector in this process. The time is that of both processes, all threads, so other load hardly counts; what
the two equal pairs differ by is the noise. Then each part is timed alone: what the parts come to is far less than that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from benchmarks.parts.stand import process
from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common.tracing.otlp import OtlpTracing
from services.common.tracing.span import SpanKind
from services.kvcache.arena.host import default_directory

STREAMS = 4
#: What a request makes: calls of the daemon, and spans in all of both services.
CALLS = 4


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the spans that it is sent."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(self, request: Any, context: Any) -> otlp.ExportTraceServiceResponse:
        """Take them."""
        self.spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return otlp.ExportTraceServiceResponse()


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Sink]]:
    """A collector in this process: its endpoint."""
    server, sink = grpc.server(ThreadPoolExecutor(2)), Sink()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield endpoint, sink
    finally:
        server.stop(0).wait()


class Pair:
    """A daemon and an engine."""

    def __init__(self, stack: contextlib.ExitStack, *flags: str) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rf-", dir=default_directory().parent))
        daemon, engine = (f"unix:{folder}/{name}.sock" for name in ("k", "e"))
        words = ["--listen", daemon, "--arena-dir", f"{folder}/arena", "--memory", "32MiB", *flags]
        log = Path(folder) / "log"
        self.pids = [stack.enter_context(process("services.kvcache", daemon, *words, log=log)).pid]
        words = ["--listen", engine, "--kvcache", daemon, *flags]
        self.pids.append(stack.enter_context(process("services.engine", engine, *words, log=log)).pid)
        channel = stack.enter_context(grpc.insecure_channel(engine))
        self._stub = engine_pb2_grpc.EngineServiceStub(channel)
        self._threads = stack.enter_context(ThreadPoolExecutor(STREAMS))

    def serve(self, prompts: list[list[int]], tokens: int) -> float:
        """Milliseconds of CPU time for one of these requests."""
        began = self._cpu_s()
        list(self._threads.map(lambda prompt: self._generate(prompt, tokens), prompts))
        return (self._cpu_s() - began) / len(prompts) * 1e3

    def _generate(self, prompt: list[int], tokens: int) -> None:
        message = pb.GenerateRequest(
            prompt=pb.Prompt(tokens=pb.TokenIds(ids=prompt)),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=tokens, ignore_eos=True),
        )
        for _ in self._stub.Generate(message):
            pass

    def _cpu_s(self) -> float:
        return sum(
            int(path.read_text().split()[0]) / 1e9
            for pid in self.pids
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        )


def parts(endpoint: str, count: int = 3000) -> dict[str, float]:
    """Microseconds of CPU time of each part, the thread that sends included."""
    tracing = OtlpTracing(endpoint, 0.0, {"service.name": "benchmark"})
    out = f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-00"

    def each(body: Any, times: int) -> float:
        began = time.process_time()
        for _ in range(times):
            body()
        return (time.process_time() - began) / times * 1e6

    def request() -> None:
        context = f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-01"
        call = tracing.serve("service/Method", (("traceparent", context),))
        assert call is not None
        whole = call.child("request", attributes=dict.fromkeys((f"gen_ai.{at}" for at in range(12)), "value"))
        for _ in range(4):
            whole.child("stage").end()
        for _ in range(CALLS):
            made = whole.child("call", SpanKind.CLIENT, attributes={"rpc.method": "a", "rpc.system.name": "grpc"})
            served = tracing.serve("service/Method", (("traceparent", made.traceparent),))
            assert served is not None
            tracing.end(served, "OK")
            made.end()
        whole.end()
        tracing.end(call, "OK")

    found = {
        "a call without a context, not sampled": each(lambda: tracing.serve("service/Method", ()), count),
        "a call that its caller did not sample": each(
            lambda: tracing.serve("service/Method", (("traceparent", out),)), count
        ),
    }
    began = time.process_time()
    for _ in range(count // 30):
        request()
    asyncio.run(tracing.stop(10.0))
    found["a sampled request, both services"] = (time.process_time() - began) / (count // 30) * 1e6
    return found


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.01, help="share of requests that are sampled (default 0.01)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, of all pairs in turn (default 20)")
    parser.add_argument("--requests", type=int, default=64, help="requests of a turn (default 64)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated per request (default 64)")
    flags = parser.parse_args()
    drawn = random.Random(1)
    with contextlib.ExitStack() as stack:
        endpoint, sink = stack.enter_context(collector())
        traced = ("--otlp-endpoint", endpoint, "--trace-ratio", str(flags.ratio))
        pairs = {"off": Pair(stack), "off again": Pair(stack), "on": Pair(stack, *traced)}
        took: dict[str, list[float]] = {name: [] for name in pairs}
        for at in range(flags.rounds + 1):
            prompts = [[drawn.randrange(1, 500) for _ in range(64)] for _ in range(flags.requests)]
            names = list(pairs)
            drawn.shuffle(names)
            for name in names:
                a_request = pairs[name].serve(prompts, flags.tokens)
                if at:  # the first warms up
                    took[name].append(a_request)
        for name, spent in took.items():
            ratios = [one / other for one, other in zip(spent, took["off"], strict=True)]
            middle = sorted(ratios)[len(ratios) // 4 : -(len(ratios) // 4) or None]
            print(
                f"{name:9}  {statistics.median(spent):7.2f} ms of CPU a request   ratio to off: median "
                f"{statistics.median(ratios):.4f}, middle half {middle[0]:.4f} to {middle[-1]:.4f}"
            )
        print(f"{sink.spans} spans sent")
        cost = parts(endpoint)
    for name, microseconds in cost.items():
        print(f"{name:40} {microseconds:7.1f} us")
    plain, out, sampled = cost.values()
    added = plain + CALLS * out + flags.ratio * sampled
    whole = statistics.median(took["off"]) * 1e3
    print(f"together {added:.1f} us of {whole:.0f} us a request: {100 * added / whole:.3f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
