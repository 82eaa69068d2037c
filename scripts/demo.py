"""Implements ``make run``, ``make up`` and ``make down``, installed ``rocmforge demo``, ``up`` and ``down``: both
services in their own processes.

``run`` keeps everything in a private temporary directory and leaves nothing behind. ``up`` uses the services' default
addresses and keeps pid files and logs in ``.run/`` of the checkout, or, installed, of the user's runtime directory.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services import launch
from services.common import rpc
from services.common.edge.paths import make_directory
from services.common.listening import runtime_dir
from services.healthcheck import wait_serving

#: The checkout, or, installed, the runtime directory of this user.
HOME = runtime_dir() if launch.INSTALLED else Path(__file__).resolve().parents[1]
MODEL = launch.APP / "models" / "shakespeare"
STATE = HOME / ".run"
DEFAULT_PROMPT = (
    "ROMEO:\nBut soft, what light through yonder window breaks?\n"
    "It is the east, and Juliet is the sun.\nArise, fair sun, and"
)
ENGINE_TCP = "127.0.0.1:50051"
START_S = 120.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: How long after a finalizer an interrupt is raised again.
AGAIN_S = 0.01


class CannotStart(Exception):
    """A service did not start; the message includes the end of its log."""


class Interrupts:
    """Requests to end this script: Ctrl-C and its like. Raised in blocks that allow it, and nowhere else.

    So no interrupt comes between a process and the list that will stop it, or between the end of a block and its
    cleanup. It is raised once: whoever is impatient meanwhile has ``again`` called. If it is raised in a finalizer, as
    gRPC's objects have them, Python drops it there; it is raised again when the finalizer is over.
    """

    def __init__(self) -> None:
        self.asked = False
        self.again: Callable[[], None] = lambda: None
        self._allowed = False

    def handle(self, number: int, frame: object) -> None:
        """Handler of every signal that asks this script to end."""
        self.asked = True
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt
        if number != signal.SIGALRM:
            self.again()

    def dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python's hook for what was raised in a finalizer."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        self._allowed = True  # the block goes on; its end takes this back
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raises KeyboardInterrupt in the block, or before it if one was asked for."""
        self._allowed = True
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False


interrupts = Interrupts()


def start(module: str, flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a service in its own process group, so that Ctrl-C reaches it only through this script."""
    with log.open("wb") as output:
        return subprocess.Popen(
            launch.python(module, *flags),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def await_serving(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Raises CannotStart."""
    try:
        with interrupts.allowed():
            wait_serving(address, alive=lambda: process.poll() is None, timeout_s=START_S)
    except (ChildProcessError, TimeoutError) as error:
        tail = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise CannotStart("\n".join([str(error), *tail])) from error


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Stop the engine first, so that it can return its pages. An interrupt meanwhile kills both: neither survives."""

    def kill() -> None:
        for process in processes:
            process.kill()

    interrupts.again = kill
    for process in reversed(processes):
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def both(sockets: Path, logs: Path, tcp: bool) -> list[tuple[str, str, list[str], Path]]:
    """(module, address, flags, log) of daemon and engine, in the order to start them."""
    kvcache, engine = f"unix:{sockets}/kvcache.sock", f"unix:{sockets}/engine.sock"
    kvcache_flags = ["--listen", kvcache] + ([] if tcp else ["--arena-dir", f"{sockets}/arena"])
    engine_flags = ["--listen", engine] + (["--listen", ENGINE_TCP] if tcp else [])
    engine_flags += ["--kvcache", kvcache, "--model", str(MODEL)]
    return [
        ("services.kvcache", kvcache, kvcache_flags, logs / "kvcache.log"),
        ("services.engine", engine, engine_flags, logs / "engine.log"),
    ]


@contextlib.contextmanager
def running(directory: Path) -> Iterator[tuple[str, str]]:
    """Run both services for the duration of the block; yields (daemon's address, engine's address)."""
    processes: list[subprocess.Popen[bytes]] = []
    services = both(directory, directory, tcp=False)
    try:
        for module, address, flags, log in services:
            began = time.monotonic()
            processes.append(start(module, flags, log))
            await_serving(processes[-1], address, log)
            print(f"  {module:16} pid {processes[-1].pid:<7} serving after {time.monotonic() - began:.1f} s")
        yield services[0][1], services[1][1]
    finally:
        stop(processes)


def generate(stub: engine_pb2_grpc.EngineServiceStub, prompt: str, *, echo: bool) -> engine_pb2.Finish:
    """Stream one completion; with ``echo``, print its text as it arrives."""
    request = engine_pb2.GenerateRequest(
        prompt=engine_pb2.Prompt(text=prompt),
        sampling=engine_pb2.Sampling(temperature=0.8, top_k=50, seed=7),
        stopping=engine_pb2.Stopping(max_tokens=160),
    )
    finish = engine_pb2.Finish()
    for response in stub.Generate(request):
        if echo:
            print(response.text, end="", flush=True)
        if response.HasField("finish"):
            finish = response.finish
    return finish


def milliseconds(usage: engine_pb2.Usage) -> float:
    """Time to first token, in milliseconds."""
    return usage.time_to_first_token.ToNanoseconds() / 1e6


def prompt_given() -> str:
    """PROMPT from the environment, or a default. Raises CannotStart if it is not UTF-8."""
    try:
        return os.environb.get(b"PROMPT", b"").decode() or DEFAULT_PROMPT
    except UnicodeDecodeError as error:
        raise CannotStart(f"PROMPT is not UTF-8: {error.reason} at byte {error.start}") from error


def run(prompt: str) -> None:
    """Run one completion, then the same prompt again, then print the daemon's page counts."""
    directory = Path(tempfile.mkdtemp(prefix="rocmforge-"))
    try:
        print("Starting the KV-cache daemon and the engine")
        with running(directory) as (kvcache, engine), interrupts.allowed():
            with grpc.insecure_channel(engine) as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                model = stub.GetModel(engine_pb2.GetModelRequest())
                print(f"  model            {model.architecture}, {model.parameters / 1e6:.1f} M parameters\n")
                print(prompt, end="", flush=True)
                began = time.monotonic()
                cold = generate(stub, prompt, echo=True).usage
                took = time.monotonic() - began
                warm = generate(stub, prompt, echo=False).usage
            print(f"\n\n{cold.completion_tokens} tokens in {took:.2f} s, {cold.completion_tokens / took:.0f} tokens/s")
            print("Time to first token, and prompt tokens found in the prefix cache:")
            for name, usage in (("first time", cold), ("same again", warm)):
                print(
                    f"  {name}  {milliseconds(usage):6.1f} ms   {usage.cached_tokens} of {usage.prompt_tokens} tokens"
                )
            with grpc.insecure_channel(kvcache) as channel:
                [pool] = kvcache_pb2_grpc.KvCacheServiceStub(channel).GetStats(kvcache_pb2.GetStatsRequest()).pools
            print(
                f"The daemon's {pool.total_pages} pages of {pool.page_bytes // 1024} KiB: {pool.held_pages} held, "
                f"{pool.cached_pages} cached, {pool.free_pages} free, {pool.quarantined_pages} quarantined"
            )
        print("Both stopped.")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold a lock, so that one ``up`` or ``down`` of this checkout or user runs at a time; others wait."""
    if launch.INSTALLED:
        make_directory(HOME, "the runtime directory")
    home = os.open(HOME, os.O_RDONLY)
    try:
        with interrupts.allowed():
            fcntl.flock(home, fcntl.LOCK_EX)
        yield
    finally:
        os.close(home)


def recorded(name: str) -> int | None:
    """The pid that ``up`` recorded for a service, if that process is still running it."""
    try:
        pid = int((STATE / f"{name}.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if f"services.{name}".encode() in command else None


def answers(address: str) -> bool:
    """Whether a server is listening on a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address.removeprefix("unix:")) == 0


def up() -> None:
    """Start both services on their default addresses and leave them running."""
    STATE.mkdir(exist_ok=True)
    sockets = runtime_dir()
    started: list[subprocess.Popen[bytes]] = []
    try:
        for module, address, flags, log in both(sockets, STATE, tcp=True):
            name = module.removeprefix("services.")
            pid = recorded(name)
            if pid is None:
                if answers(address):
                    raise CannotStart(f"{address}: somebody else's {name} is serving there; stop it first")
                started.append(start(module, flags, log))
                await_serving(started[-1], address, log)
                pid = started[-1].pid
                (STATE / f"{name}.pid").write_text(f"{pid}\n")
            print(f"{name:8} pid {pid:<7} {address}, log in {log if launch.INSTALLED else log.relative_to(HOME)}")
    except BaseException:
        stop(started)
        raise
    body = '{"prompt": {"text": "ROMEO:"}, "stopping": {"maxTokens": 24}}'
    print(
        "\nTry:\n"
        f"  grpcurl -plaintext {ENGINE_TCP} list\n"
        f"  grpcurl -plaintext -d '{body}' {ENGINE_TCP} rocmforge.engine.v1.EngineService/Generate\n"
        f"  export KVCACHE=unix:{sockets}/kvcache.sock\n"
        f"  grpcurl -plaintext -unix $KVCACHE rocmforge.kvcache.v1.KvCacheService/GetStats\n"
        f"\n`{'rocmforge' if launch.INSTALLED else 'make'} down` stops both."
    )


def down() -> None:
    """Stop what ``up`` started, if anything is running."""
    for name in ("engine", "kvcache"):
        pid = recorded(name)
        if pid is None:
            print(f"{name:8} not running")
        else:
            # A pidfd identifies this process even after it exits and its pid is reused.
            pidfd = os.pidfd_open(pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            with interrupts.allowed():
                wait_for_exit(pidfd)
            print(f"{name:8} stopped")
        (STATE / f"{name}.pid").unlink(missing_ok=True)


def wait_for_exit(pidfd: int) -> None:
    """A pidfd becomes readable when its process ends."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(60_000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll.poll()
    os.close(pidfd)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "up", "down"])
    command = parser.parse_args(arguments).command
    for number in (*INTERRUPTS, signal.SIGALRM):
        signal.signal(number, interrupts.handle)
    sys.unraisablehook = interrupts.dropped
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print ? for characters that the encoding lacks
    try:
        if command == "run":
            run(prompt_given())
        elif command == "up":
            with alone():
                up()
        else:
            with alone():
                down()
    except CannotStart as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        if not interrupts.asked:  # what comes after an interrupt that a finalizer swallowed is no error
            problem = rpc.error_from(error)
            print(f"\n{problem.code} {problem.reason}: {problem}", file=sys.stderr)
            return 1
    except BrokenPipeError:  # the reader has gone, as with `make run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass  # asked for, as below
    if interrupts.asked:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
