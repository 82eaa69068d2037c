"""What all commands share: the flags for the engine's address and readiness, connecting, and one-line errors."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from rocmforge.client.transport import keepalive
from rocmforge.client.transport.paths import check_socket
from rocmforge.client.transport.tls import ClientTls, client_tls
from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from services import healthcheck
from services.common import rpc
from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration, ServiceError
from services.common.listening import runtime_dir
from services.common.parser import Parser
from services.common.serving import MAX_MESSAGE_BYTES
from services.engine.cli.bearer import AsyncBearer, Bearer
from services.launch import typed

#: The environment variable of the token.
TOKEN_VARIABLE = "ROCMFORGE_TOKEN"

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name


def parser(command: str, description: str, *, waits: bool = True) -> argparse.ArgumentParser:
    """A parser with the flags common to all commands; with ``waits`` also --wait, for the engine to be serving."""
    prog = f"{typed('services.engine')} {command}"
    made = Parser(prog=prog, description=description)
    made.add_argument(
        "--target",
        default=_default(),
        metavar="ADDR",
        help="address of the engine: unix:/path or host:port (default %(default)s)",
    )
    for flag, what in (
        ("--ca", "PEM CA certificate that must have signed the engine's: TLS"),
        ("--cert", "PEM certificate to show to the engine"),
        ("--key", "PEM private key of --cert"),
    ):
        made.add_argument(flag, type=Path, default=None, metavar="FILE", help=what)
    made.add_argument(
        "--name",
        default="",
        metavar="NAME",
        help="name that the engine's certificate must have (default: the host in --target)",
    )
    made.add_argument(
        "--token-file",
        type=Path,
        default=None,
        metavar="FILE",
        help=f"file with the token to show to the engine (default: the token in {TOKEN_VARIABLE}, if any)",
    )
    if waits:
        made.add_argument(
            "--wait",
            type=seconds,
            default=0.0,
            metavar="S",
            help="wait up to S seconds for the engine to be serving (default %(default)g)",
        )
    return made


def _default() -> str:
    return f"unix:{runtime_dir() / 'engine.sock'}"


def seconds(text: str) -> float:
    """A flag's value in seconds. Raises ArgumentTypeError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected seconds, 0 or more")
    return found


def say(command: str, sentence: str) -> None:
    """Print one line to standard error."""
    print(f"rocmforge {command}: {sentence}", file=sys.stderr)


def describe(error: ServiceError) -> str:
    """An error as one line."""
    return f"{error.reason}: {error.message}"


def failure(error: grpc.RpcError, target: Target) -> ServiceError:
    """The error of a failed call. If no engine could be reached, the message says so."""
    found = rpc.error_from(error)
    if found.reason == "UNKNOWN":
        name = error.code().name
        found = type("Lost", (ServiceError,), {"code": name, "reason": name})(found.message)
        if name == "UNAVAILABLE":
            found.message = f"no engine at {target}: {found.message}; is it running? --target sets its address"
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """An engine: its address, the files with which it and this client show who they are, None without TLS, and the
    client's token, None without one.
    """

    address: str
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.address


def reached(flags: argparse.Namespace, address: str = "") -> Target:
    """The engine that the flags name, or the one at ``address`` with the other flags. Raises InvalidConfiguration."""
    tls = client_tls(flags.ca, flags.cert, flags.key, flags.name, flags=("--ca", "--cert", "--key"))
    address = address or flags.target
    if tls is not None and address.startswith("unix:"):
        raise InvalidConfiguration(f"--ca: --target {address} is not a TCP address", field="--ca")
    token = _token(flags.token_file)
    if token is not None and tls is None and not _local(address):
        raise InvalidConfiguration(f"--target {address}: no token is sent there without TLS; give --ca", field="--ca")
    return Target(address, tls, token)


def _token(path: Path | None) -> str | None:
    """The token in a file, or in the environment. Raises InvalidConfiguration."""
    if path is None:
        given, where = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    else:
        where = f"--token-file {path}"
        try:
            given = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InvalidConfiguration(f"{where}: cannot be read: {error}", field="--token-file") from error
    if path is None and not given:
        return None
    if not given.isascii() or not given.isprintable() or " " in given or not given:
        raise InvalidConfiguration(f"{where}: expected a token, one word of ASCII", field="--token-file")
    return given


def _local(address: str) -> bool:
    try:
        return Listener.parse(address).local_only
    except InvalidConfiguration:
        return False


def options() -> list[tuple[str, int]]:
    """Channel options: ignore proxies set in the environment, accept the largest message an engine may send, and notice
    an engine that is gone without a word.
    """
    own = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    return [*own, *keepalive.CLIENT]


def connect(target: Target, more: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """A channel to an engine, with ``more`` options. Raises InvalidConfiguration for the default socket if others could
    have put it there.
    """
    if target.address == _default():
        check_socket(Path(target.address.removeprefix("unix:")), "--target")
    if target.tls is None:
        channel = grpc.insecure_channel(target.address, options=[*options(), *more])
    else:
        channel = grpc.secure_channel(
            target.address, target.tls.credentials(), options=[*options(), *more, *target.tls.options]
        )
    return channel if target.token is None else grpc.intercept_channel(channel, Bearer(target.token))


def connect_async(target: Target) -> grpc.aio.Channel:
    """The same for asyncio."""
    shown = [] if target.token is None else [AsyncBearer(target.token)]
    if target.tls is None:
        return grpc.aio.insecure_channel(target.address, options=options(), interceptors=shown)
    return grpc.aio.secure_channel(
        target.address, target.tls.credentials(), options=[*options(), *target.tls.options], interceptors=shown
    )


def await_serving(command: str, target: Target, wait_s: float) -> bool:
    """Wait up to ``wait_s`` seconds for the engine to report SERVING; 0 does not wait.

    Returns True if it is serving, or without waiting. Otherwise prints the reason to standard error and returns False.
    On a terminal it also prints that it is waiting.
    """
    if not wait_s:
        return True
    announced = not sys.stderr.isatty()

    def still() -> bool:
        nonlocal announced
        if not announced:
            say(command, f"waiting for the engine at {target}, at most {wait_s:g} s")
            announced = True
        return True

    try:
        healthcheck.wait_serving(
            target.address,
            alive=still,
            timeout_s=wait_s,
            service=SERVICE,
            connect=lambda more: connect(target, more),
        )
    except TimeoutError as error:
        say(command, f"NOT_READY: {error}")
        return False
    return True


def run(command: str, target: Target, body: Callable[[Any], int], wait_s: float = 0.0) -> int:
    """Call ``body`` with a stub. Returns its exit status, or that of its failure.

    Waits up to ``wait_s`` seconds for the engine to be serving first. An interrupt, or a closed standard output,
    cancels the calls in flight.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print ? for characters that the encoding lacks
    with connect(target) as channel:
        try:
            if not await_serving(command, target, wait_s):
                return 1
            status = body(engine_pb2_grpc.EngineServiceStub(channel))
            sys.stdout.flush()  # here, where a BrokenPipeError is handled
            return status
        except grpc.RpcError as error:
            say(command, describe(failure(error, target)))
            return 1
        except BrokenPipeError:
            drop_output()
            return 1
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 130


def each_id(command: str, flags: argparse.Namespace, method: str, message: Callable[..., Any]) -> int:
    """Call ``method`` with a ``message`` for each id in ``flags.id``. Returns the exit status, 1 if any call failed."""
    try:
        messages = [message(request_id=name) for name in flags.id]
    except UnicodeError:
        say(command, "ID must be UTF-8")
        return 2

    target = reached(flags)

    def body(stub: Any) -> int:
        status = 0
        for one in messages:
            try:
                getattr(stub, method)(one)
            except grpc.RpcError as error:
                say(command, describe(failure(error, target)))
                status = 1
        return status

    return run(command, target, body, flags.wait)


def drop_output() -> None:
    """Redirect standard output to /dev/null, so that the flush at interpreter exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
