"""Memory shared by two processes, as the daemon and an engine share it: written and read by kernels of both.

Blocks enough for every compute unit write and check each buffer, since the dies of one card have caches of their own.
A process opens 1, 40 and 200 handles at a time (from 36 on, one ROCm stack mapped other memory), closes and opens them
again; exports that are freed must give their memory back, and either side may be killed.

``python -m services.doctor.firstlight.sharing peer GPU`` is the other process: it reads a line of JSON for each thing
to do, and answers with one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from services import launch
from services.common.errors import ServiceError
from services.doctor.firstlight import step

COUNTS = (1, 40, 200)
THREADS = 256
#: Seconds within which the memory of a process that was killed is free again.
BACK_S = 20.0
_PRIME = 2654435761
KERNELS = r"""
extern "C" __global__ void fill(unsigned *at, long long words, unsigned seed) {
    long long all = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += all)
        at[i] = (unsigned)i * 2654435761u ^ seed;
}
extern "C" __global__ void differ(const unsigned *at, long long words, unsigned seed, unsigned *wrong) {
    long long all = (long long)gridDim.x * blockDim.x;
    unsigned mine = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += all)
        mine += at[i] != ((unsigned)i * 2654435761u ^ seed);
    if (mine) atomicAdd(wrong, mine);
}
"""


class Refused(Exception):
    """What the other process says it could not do."""


class Writer:
    """Fills device memory with numbers that say whose they are, and counts those that are others."""

    def __init__(self, ordinal: int, blocks: int) -> None:
        import cupy

        self.gpu: Gpu = Runtime.load().gpu(ordinal)
        self.gpu.use()
        self._cupy = cupy
        module = cupy.RawModule(code=KERNELS)
        self._fill, self._differ = module.get_function("fill"), module.get_function("differ")
        self._blocks = blocks or 8 * int(cupy.cuda.runtime.getDeviceProperties(ordinal)["multiProcessorCount"])

    def fill(self, pointer: int, size: int, seed: int) -> None:
        """Write ``size`` bytes."""
        import numpy as np

        words = np.int64(size // 4)
        self._fill((self._blocks,), (THREADS,), (np.intp(pointer), words, np.uint32(seed & 0xFFFFFFFF)))
        self._cupy.cuda.runtime.deviceSynchronize()

    def wrong(self, pointer: int, size: int, seed: int) -> int:
        """How many words are not what `fill` writes."""
        import numpy as np

        count = self._cupy.zeros(1, np.uint32)
        arguments = (np.intp(pointer), np.int64(size // 4), np.uint32(seed & 0xFFFFFFFF), count)
        self._differ((self._blocks,), (THREADS,), arguments)
        return int(count.get()[0])


class Peer:
    """The other process."""

    def __init__(self, asked: step.Asked) -> None:
        words = launch.python("services.doctor.firstlight.sharing", "peer", str(asked.gpu))
        self._blocks = asked.of(0, 0, 2)
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.bus_id = str(self.ask("begin", blocks=self._blocks)["bus_id"])

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Have it do something. Raises Refused."""
        if self._process.stdin is None or self._process.stdout is None:
            raise Refused("the other process has no pipes")
        try:
            self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Refused(f"the other process ended with status {self._process.wait()} when asked to {what}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Let it end by itself, or else kill it."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=30)
        self.kill()


@contextlib.contextmanager
def _peer(asked: step.Asked) -> Iterator[Peer]:
    peer = Peer(asked)
    try:
        yield peer
    finally:
        peer.end()


def body(report: step.Report, asked: step.Asked) -> None:
    """Share."""
    writer = Writer(asked.gpu, asked.of(0, 0, 2))
    report.begin("starting the other process")
    with _peer(asked) as peer:
        here = writer.gpu.id
        right = f"GPU {asked.gpu} is the same one in both processes"
        wrong = (
            f"GPU {asked.gpu} is {here} in one process and {peer.bus_id} in the other: they number GPUs differently, "
            "and a handle names its GPU by its number"
        )
        if not report.check(peer.bus_id == here, right, wrong):
            return
        for count in COUNTS:
            if not _handles(report, asked, writer, peer, count):
                break
    _leak(report, asked, writer)
    _killed_opener(report, asked, writer)
    _killed_owner(report, asked, writer)


def _handles(report: step.Report, asked: step.Asked, writer: Writer, peer: Peer, count: int) -> bool:
    """Open ``count`` handles at a time, have both sides write and read, close them and open them again."""
    size, rounds = asked.of(8 << 20, 2 << 20, 1 << 12), asked.of(20, 5, 2)
    name = "1 handle" if count == 1 else f"{count} handles open at a time"
    report.begin(name)
    pointers = [writer.gpu.allocate(size) for _ in range(count)]
    bad: list[str] = []
    try:
        handles = [writer.gpu.export(pointer).hex() for pointer in pointers]
        for time_opened in ("", ", opened again after closing"):
            for number, pointer in enumerate(pointers):
                writer.fill(pointer, size, _seed(0, number))
            peer.ask("open", handles=handles)
            for at in range(rounds):
                seen = peer.ask("check", size=size, seed=_seed(at, 0))["wrong"]
                bad += [f"{_seen(one)}{time_opened}" for one in seen]
                peer.ask("fill", size=size, seed=_seed(at + 1, 0) ^ 0xFFFFFFFF)
                for number, pointer in enumerate(pointers):
                    words = writer.wrong(pointer, size, _seed(at + 1, number) ^ 0xFFFFFFFF)
                    if words:
                        bad.append(f"{words} of the words that it wrote to buffer {number} did not arrive{time_opened}")
                    writer.fill(pointer, size, _seed(at + 1, number))
                if bad:
                    break
            peer.ask("close")
    except Refused as refused:
        bad.append(str(refused))
    finally:
        for pointer in pointers:
            writer.gpu.free(pointer)
    more = f", and {len(bad) - 1} more like it" if len(bad) > 1 else ""
    return report.check(
        not bad,
        f"{name}: both processes saw what the other wrote, {rounds} times, and after closing and opening again",
        f"{name}: {bad[0] if bad else ''}{more}",
    )


def _seed(at: int, number: int) -> int:
    """What buffer ``number`` is filled with in round ``at``: bits of it tell both, and the lowest are of the number."""
    return (at << 16) ^ number


def _seen(one: dict[str, int]) -> str:
    """What the other process saw of a buffer in which some words are wrong."""
    shows = f"; it shows buffer {one['shows']}" if one["shows"] >= 0 else ""
    return f"the other process saw {one['words']} wrong words in buffer {one['number']}{shows}"


def _leak(report: step.Report, asked: step.Asked, writer: Writer) -> None:
    """Export and free again and again."""
    size, times = asked.of(256 << 20, 64 << 20, 1 << 20), asked.of(40, 20, 8)
    report.begin("memory that was exported and freed")
    before = writer.gpu.memory()[0]
    with _peer(asked) as peer:
        with_peer = writer.gpu.memory()[0]
        try:
            for _ in range(times):
                pointer = writer.gpu.allocate(size)
                try:
                    peer.ask("open", handles=[writer.gpu.export(pointer).hex()])
                    peer.ask("close")
                finally:
                    writer.gpu.free(pointer)
        except Refused as refused:
            report.failed(f"memory that was exported and freed: {refused}")
            return
        lost = with_peer - writer.gpu.memory()[0]
        report.check(
            lost < size * times // 4,
            f"memory that was exported, opened, closed and freed {times} times is free again",
            f"{times} exports of {size >> 20} MiB were freed, and {lost >> 20} MiB are not free again: exports leak",
        )
    _back(report, writer, before - size, "the process that opened them has ended, and its memory is free")


def _killed_opener(report: step.Report, asked: step.Asked, writer: Writer) -> None:
    """kill -9 of a process that has a handle open."""
    size = asked.of(64 << 20, 16 << 20, 1 << 20)
    report.begin("kill -9 of the process that opened a handle")
    before = writer.gpu.memory()[0]
    pointer = writer.gpu.allocate(size)
    peer = Peer(asked)
    try:
        writer.fill(pointer, size, 7)
        peer.ask("open", handles=[writer.gpu.export(pointer).hex()])
        peer.kill()
        words = writer.wrong(pointer, size, 7)
        report.check(
            not words,
            "the memory of the owner is as it was after kill -9 of the process that had opened it",
            f"{words} words of the owner's memory changed with kill -9 of the process that had opened it",
        )
    except Refused as refused:
        report.failed(f"before kill -9 of the opener: {refused}")
    finally:
        peer.kill()
        writer.gpu.free(pointer)
    _back(report, writer, before - size // 2, "and it is free once the owner has freed it")


def _killed_owner(report: step.Report, asked: step.Asked, writer: Writer) -> None:
    """kill -9 of a process whose memory this one has opened."""
    size = asked.of(64 << 20, 16 << 20, 1 << 20)
    report.begin("kill -9 of the process that owns the memory")
    before = writer.gpu.memory()[0]
    owner = Peer(asked)
    try:
        pointer = writer.gpu.open(bytes.fromhex(owner.ask("own", size=size, seed=9)["handle"]))
        owner.kill()
        words = writer.wrong(pointer, size, 9)
        writer.gpu.close(pointer)
        report.passed(
            "kill -9 of the owner: the memory can be closed, and what it held "
            + (f"is lost: {words} words of it" if words else "could still be read")
        )
    except (Refused, ServiceError) as error:
        report.failed(f"kill -9 of the process that owns the memory: {error}")
    finally:
        owner.kill()
    _back(report, writer, before - size // 2, "and its memory is free")


def _back(report: step.Report, writer: Writer, least: int, right: str) -> None:
    """Wait until ``least`` bytes are free: a driver takes a while to clean up after a process."""
    deadline = time.monotonic() + BACK_S
    while (free := writer.gpu.memory()[0]) < least and time.monotonic() < deadline:
        time.sleep(0.1)
    report.check(free >= least, right, f"{(least - free) >> 20} MiB are not free {BACK_S:g} s later: they leaked")


# --- the other process ------------------------------------------------------------------------------------------------


def peer(ordinal: int) -> None:
    """Do what the lines say until they end."""
    writer: Writer | None = None
    opened: list[int] = []
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if asked["do"] == "begin":
                writer = Writer(ordinal, asked["blocks"])
                answer["bus_id"] = "another GPU" if step.injected("wrong-ordinal") else writer.gpu.id
            elif writer is None:
                answer["error"] = "asked for something before the beginning"
            elif asked["do"] == "open":
                if step.injected("hang"):
                    step.hang()
                handles = [bytes.fromhex(handle) for handle in asked["handles"]]
                if step.injected("refused-handle"):
                    handles[-1] = bytes(len(handles[-1]))
                for handle in handles:
                    opened.append(writer.gpu.open(handle))
            elif asked["do"] == "check":
                answer["wrong"] = list(_looked(writer, opened, asked["size"], asked["seed"]))
            elif asked["do"] == "fill":
                for number, pointer in enumerate(opened):
                    writer.fill(pointer, asked["size"], asked["seed"] ^ number)
            elif asked["do"] == "close":
                while opened:
                    writer.gpu.close(opened.pop())
            elif asked["do"] == "own":
                pointer = writer.gpu.allocate(asked["size"])
                writer.fill(pointer, asked["size"], asked["seed"])
                answer["handle"] = writer.gpu.export(pointer).hex()
        except ServiceError as error:
            answer = {"error": error.message}
        print(json.dumps(answer), flush=True)


def _looked(writer: Writer, opened: list[int], size: int, seed: int) -> Iterator[dict[str, int]]:
    """Each buffer that does not hold what it should, and which it shows, if any."""
    if step.injected("wrong-bytes"):
        writer.fill(opened[-1], 4, ~seed)
    for number, pointer in enumerate(opened):
        words = writer.wrong(pointer, size, seed ^ number)
        if words:
            # The first word of a buffer is its seed.
            other = int.from_bytes(writer.gpu.read(pointer, 4), "little") ^ seed
            yield {"number": number, "words": words, "shows": other if other < len(opened) else -1}


if __name__ == "__main__":
    if sys.argv[1] == "peer":
        peer(int(sys.argv[2]))
    else:
        sys.exit(step.run(body))
