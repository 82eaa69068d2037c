"""``python -m services.healthcheck ADDRESS [SERVICE]``: exit 0 when the service says SERVING, for containers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rocmforge.client.transport.tls import ClientTls, client_tls
from services.common.errors import InvalidConfiguration
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

    ``alive`` is called twice a second, so that a process that could not start is noticed at once. Raises
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
                # Not there yet, or nothing new in time: both show in the next check.
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
    """Ask once. Returns the exit status: 0 serving, 1 not, 2 for flags or files that cannot be used."""
    parser = Parser(prog=typed("services.healthcheck"), description="Ask a service once whether it serves.")
    parser.add_argument("address", help="unix:/path or host:port")
    parser.add_argument(
        "service",
        nargs="?",
        default="",
        help="full service name, or `liveness`: whether the process should go on; the whole server when left out",
    )
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="seconds (default 3)")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="PEM CA certificate of the service: TLS")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="PEM certificate to show to it")
    parser.add_argument("--key", type=Path, metavar="FILE", help="PEM private key of --cert")
    parser.add_argument(
        "--name", default="", metavar="NAME", help="name that its certificate must have (default: the host in address)"
    )
    flags = parser.parse_args(arguments)
    try:
        tls = client_tls(flags.ca, flags.cert, flags.key, flags.name, flags=("--ca", "--cert", "--key"))
        if tls is None and flags.name:
            raise InvalidConfiguration("--name needs --ca", field="--name")
        if tls is not None and flags.address.startswith("unix:"):
            raise InvalidConfiguration(f"--ca: {flags.address} is not a TCP address", field="--ca")
    except InvalidConfiguration as error:
        print(f"{parser.prog}: {error.message}", file=sys.stderr)
        return 2
    with _channel(flags.address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=flags.service), timeout=flags.timeout)
        except grpc.RpcError as error:
            print(f"{flags.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=[_DIRECT])
    return grpc.secure_channel(address, tls.credentials(), options=[_DIRECT, *tls.options])


if __name__ == "__main__":
    sys.exit(main())
