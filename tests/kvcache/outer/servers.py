"""A real redis-server of the test's own, and a proxy before it that cuts connections in the middle of a value."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.kvcache.outer.settings import OuterTier
from tests.tools import path_of

WAIT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(done: Callable[[], bool], otherwise: str) -> None:
    """Ask again and again, with a deadline: nobody tells the test when another process has got so far."""
    deadline, between = time.monotonic() + WAIT_S, threading.Event()
    while not done():
        assert time.monotonic() < deadline, otherwise
        between.wait(0.02)


class RedisServer:
    """One server on a port of its own, which keeps its port when it is started again."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.folder = folder
        self._program = path_of("redis")
        self.start(*arguments)

    def start(self, *arguments: str) -> None:
        """Start it, with nothing in it."""
        self.folder.mkdir(exist_ok=True)
        plain = [] if "--tls-port" in arguments else ["--port", str(self.port)]
        self.process = subprocess.Popen(
            [self._program, *plain, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *arguments],
            cwd=self.folder,
            stdout=(self.folder.parent / f"redis-{self.port}.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        until(self._listens, "redis-server does not start")

    def _listens(self) -> bool:
        assert self.process.poll() is None, "redis-server has ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def command(self, *words: str | bytes) -> bytes:
        """Send a command; the first line of the answer, and the value after it if there is one."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
            head = b"*%d\r\n" % len(parts)
            connection.sendall(head + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
            with connection.makefile("rb") as answer:
                line = answer.readline().rstrip()
                if not line.startswith(b"$") or line == b"$-1":
                    return line
                return answer.read(int(line[1:]))

    def stop(self) -> None:
        """SIGSTOP: connections are accepted and nothing is answered."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Idempotent."""
        self.process.kill()
        self.process.wait()


class Cutting:
    """Passes bytes to a server and back, until so many have come back: then both connections are reset.

    With ``delay_s``, every 4 KiB that come back take so long.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_after: int | None = None
        self.delay_s = 0.0
        self._closed = threading.Event()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if back and self.cut_after is not None:
                    data, self.cut_after = data[: self.cut_after], self.cut_after - len(data)
                    if self.cut_after <= 0:
                        target.sendall(data)
                        for end in (source, target):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        break
                if back and self.delay_s:
                    self._closed.wait(self.delay_s)  # what a slow line does to each packet
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._closed.set()
        self._listener.close()


def settings(port: int, **changes: Any) -> OuterTier:
    """Those of a test: limits that a loaded machine keeps."""
    return OuterTier(**{"addresses": (("127.0.0.1", port),), "ttl_seconds": 100, "operation_seconds": 2.0, **changes})
