"""``python -m services.healthcheck ADDRESS [SERVICE]``: exit 0 when the service says SERVING, for containers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.parser import Parser
from services.launch import typed

_LOOK_S = 0.5
_DIRECT = ("grpc.enable_http_proxy", 0)


Options = list[tuple[str, int]]


def wait_serving(
    address: str,
    *,
    alive: Callable[[], bool],
    timeout_s: float,
    service: str = "",
    connect: Callable[[Options], grpc.Channel] | None = None,
) -> None:
    """Return once the service says SERVING. ``connect`` makes a channel with some options, by default over plaintext.

    ``alive`` is asked about twice a second, so that a process that could not start is noticed at once. Raises
    ChildProcessError when it is false, TimeoutError after ``timeout_s`` seconds, saying what was heard.
    """
    deadline = time.monotonic() + timeout_s
    heard = "nobody answers"
    options = [_DIRECT, ("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
    with connect(options) if connect else grpc.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while (left_s := deadline - time.monotonic()) > 0:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                for answer in stub.Watch(request, wait_for_ready=True, timeout=min(_LOOK_S, left_s)):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    heard = f"it answers {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"
            except grpc.RpcError:
                # Not there yet, or nothing new within the look: both show in what is asked next.
                if not alive():
                    raise ChildProcessError(f"{address}: the process ended before it served") from None
    raise TimeoutError(f"{address}: not serving after {timeout_s:g} s: {heard}")


def knows(address: str, service: str, timeout_s: float) -> bool:
    """Whether a server at the address has the service, whatever state that is in. Over plaintext; nothing is raised."""
    with grpc.insecure_channel(address, options=[_DIRECT]) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=False
            )
        except grpc.RpcError:
            return False  # NOT_FOUND from a server that has others
    return True


def main(arguments: list[str] | None = None) -> int:
    """Ask once, over plaintext. Returns the exit status: 0 serving, 1 not."""
    parser = Parser(prog=typed("services.healthcheck"), description="Ask a service once whether it serves.")
    parser.add_argument("address", help="unix:/path or host:port")
    parser.add_argument("service", nargs="?", default="", help="full service name; the whole server when left out")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds (default 3)")
    flags = parser.parse_args(arguments)
    with grpc.insecure_channel(flags.address, options=[_DIRECT]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=flags.service), timeout=flags.timeout)
        except grpc.RpcError as error:
            print(f"{flags.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
