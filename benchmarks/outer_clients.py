"""SET and GET of pages through each client library for Valkey, on a redis-server that this starts.

    python -m benchmarks.outer_clients [--json] [--rounds 9]

Each library writes and reads the same values one at a time, then in batches of one round trip, in turn with the others.
Bytes a second are medians over the rounds; ``cpu`` is processor time of this process per byte moved, beside the plain
socket's: the least that any client can take. A library that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

KIB = 1 << 10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 2048 * KIB)
#: Bytes that each figure of a round moves, and values of a batch.
MOVED = 32 << 20
BATCH = 8


class Client(Protocol):
    """What the outer tier needs of a library."""

    def set(self, key: bytes, value: memoryview) -> None:
        """Write a value."""

    def get(self, key: bytes, into: memoryview) -> None:
        """Read a value into memory of the caller."""

    def set_many(self, keys: list[bytes], value: memoryview) -> None:
        """Write values in one round trip."""

    def get_many(self, keys: list[bytes], into: memoryview) -> None:
        """Read values in one round trip, each into the same memory."""


class Plain:
    """The protocol by hand: commands written with one call, values received where they belong."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _write(self, *parts: bytes | memoryview) -> None:
        head = b"*%d\r\n" % len(parts)
        for part in parts:
            head += b"$%d\r\n" % len(part)
            if len(part) > KIB:
                self._socket.sendall(head)
                self._socket.sendall(part)
                head = b"\r\n"
            else:
                head += bytes(part) + b"\r\n"
        self._socket.sendall(head)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return line

    def _value(self, into: memoryview) -> None:
        size = int(self._line()[1:])
        at = 0
        while at < size:
            at += self._socket.recv_into(into[at:size])
        self._line()

    def set(self, key: bytes, value: memoryview) -> None:
        self._write(b"SET", key, value)
        self._line()

    def get(self, key: bytes, into: memoryview) -> None:
        self._write(b"GET", key)
        self._value(into)

    def set_many(self, keys: list[bytes], value: memoryview) -> None:
        for key in keys:
            self._write(b"SET", key, value)
        for _ in keys:
            self._line()

    def get_many(self, keys: list[bytes], into: memoryview) -> None:
        for key in keys:
            self._write(b"GET", key)
        for _ in keys:
            self._value(into)


class ValkeyPy:
    """`valkey`, with the parser of Python or that of libvalkey."""

    def __init__(self, port: int, native: bool) -> None:
        valkey = importlib.import_module("valkey")
        parsers = importlib.import_module("valkey._parsers")
        if native and not importlib.util.find_spec("libvalkey"):
            raise ModuleNotFoundError("libvalkey")
        parser = parsers._LibvalkeyParser if native else parsers._RESP2Parser
        pool = valkey.ConnectionPool(host="127.0.0.1", port=port, parser_class=parser)
        self._client: Any = valkey.Valkey(connection_pool=pool)

    def set(self, key: bytes, value: memoryview) -> None:
        self._client.set(key, value)

    def get(self, key: bytes, into: memoryview) -> None:
        into[:] = self._client.get(key)

    def set_many(self, keys: list[bytes], value: memoryview) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.set(key, value)
            pipeline.execute()

    def get_many(self, keys: list[bytes], into: memoryview) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.get(key)
            for value in pipeline.execute():
                into[:] = value


class Glide:
    """GLIDE's synchronous client: values go out of the caller's memory and, one at a time, back into it."""

    def __init__(self, port: int) -> None:
        self._glide: Any = importlib.import_module("glide_sync")
        address = self._glide.NodeAddress("127.0.0.1", port)
        self._client = self._glide.GlideClient.create(
            self._glide.GlideClientConfiguration([address], request_timeout=10_000)
        )

    def set(self, key: bytes, value: memoryview) -> None:
        self._client.set(key, value)

    def get(self, key: bytes, into: memoryview) -> None:
        self._client.get(key, buffer=into)

    def set_many(self, keys: list[bytes], value: memoryview) -> None:
        batch = self._glide.Batch(is_atomic=False)
        for key in keys:
            batch.set(key, value)
        self._client.exec(batch, raise_on_error=True)

    def get_many(self, keys: list[bytes], into: memoryview) -> None:
        batch = self._glide.Batch(is_atomic=False)
        for key in keys:
            batch.get(key)
        for value in self._client.exec(batch, raise_on_error=True):
            into[:] = value


CLIENTS: dict[str, Callable[[int], Client]] = {
    "plain socket": Plain,
    "valkey": lambda port: ValkeyPy(port, native=False),
    "valkey + libvalkey": lambda port: ValkeyPy(port, native=True),
    "valkey-glide-sync": Glide,
}


@contextlib.contextmanager
def server() -> Iterator[int]:
    """A redis-server that keeps nothing on disk; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 10
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise
                    time.sleep(0.01)
            yield port
        finally:
            process.kill()
            process.wait()


def timed(work: Callable[[], None], moved: int) -> tuple[float, float]:
    """Bytes a second, and seconds of processor time of this process per GB."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return moved / (time.perf_counter() - begun), (time.process_time() - used) / moved * 1e9


def one_round(client: Client, size: int) -> dict[str, tuple[float, float]]:
    """Each figure once, over ``MOVED`` bytes."""
    value, into = memoryview(os.urandom(size)), memoryview(bytearray(size))
    keys = [b"page:%d" % at for at in range(BATCH)]
    batches = MOVED // size // BATCH

    def one_by_one(call: Callable[[bytes, memoryview], None], memory: memoryview) -> Callable[[], None]:
        def work() -> None:
            for _ in range(batches):
                for key in keys:
                    call(key, memory)

        return work

    def at_once(call: Callable[[list[bytes], memoryview], None], memory: memoryview) -> Callable[[], None]:
        def work() -> None:
            for _ in range(batches):
                call(keys, memory)

        return work

    found = {
        "set": timed(one_by_one(client.set, value), MOVED),
        "get": timed(one_by_one(client.get, into), MOVED),
    }
    if into != value:
        raise RuntimeError("a value came back with other bytes")
    found["set_many"] = timed(at_once(client.set_many, value), MOVED)
    found["get_many"] = timed(at_once(client.get_many, into), MOVED)
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Library -> size -> figure -> medians of bytes a second and of processor seconds per GB."""
    with server() as port:
        clients, absent = {}, []
        for name, make in CLIENTS.items():
            try:
                clients[name] = make(port)
            except ModuleNotFoundError:
                absent.append(name)
        rows: dict[str, dict[int, dict[str, list[tuple[float, float]]]]] = {
            name: {size: {} for size in SIZES} for name in clients
        }
        for turn in range(rounds + 1):
            for size in SIZES:
                for name, client in clients.items():
                    for figure, pair in one_round(client, size).items():
                        if turn:  # the first round warms up
                            rows[name][size].setdefault(figure, []).append(pair)
    medians = {
        name: {
            size: {
                figure: {
                    "bytes_per_s": statistics.median(speed for speed, _ in pairs),
                    "cpu_s_per_gb": statistics.median(cpu for _, cpu in pairs),
                }
                for figure, pairs in figures.items()
            }
            for size, figures in sizes.items()
        }
        for name, sizes in rows.items()
    }
    return {"rounds": rounds, "absent": absent, "clients": medians}


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    found = measure(arguments.rounds)
    if arguments.json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return
    for name in found["absent"]:
        print(f"{name}: not installed")
    print(f"{'MB/s (processor seconds per GB)':34}" + "".join(f"{size // KIB:>13} KiB" for size in SIZES))
    for name, sizes in found["clients"].items():
        for figure in ("set", "get", "set_many", "get_many"):
            cells = (
                f"{sizes[size][figure]['bytes_per_s'] / 1e6:9.0f} ({sizes[size][figure]['cpu_s_per_gb']:.2f})"
                for size in SIZES
            )
            print(f"{name + ' ' + figure:34}" + "".join(f"{cell:>17}" for cell in cells))


if __name__ == "__main__":
    main()
