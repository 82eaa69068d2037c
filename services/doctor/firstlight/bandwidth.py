"""The bandwidth of a copy and of a read, in memory of this process's own and in memory that another process owns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rocmforge.client.arena.gpu_ipc import Runtime
from services import launch
from services.doctor.firstlight import figures, step

THREADS = 256
#: Mapped memory that is read slower than this share of one's own has something wrong with it.
MAPPED = 0.8
#: A thread moves this many packs of 16 bytes.
PACKS = 4
KERNELS = r"""
extern "C" __global__ void copy(const uint4 *source, uint4 *target) {
    long long at = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    uint4 held[4];
    for (int i = 0; i < 4; i++) held[i] = source[at + i * blockDim.x];
    for (int i = 0; i < 4; i++) target[at + i * blockDim.x] = held[i];
}
extern "C" __global__ void read(const uint4 *source, uint4 *target) {
    long long at = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    unsigned all = 0;
    for (int i = 0; i < 4; i++) {
        uint4 held = source[at + i * blockDim.x];
        all |= held.x | held.y | held.z | held.w;
    }
    if (all) target[0].x = all;  // never: what is read is 0
}
"""


def seconds(launch: Callable[[int], Any], launches: int, repeats: int) -> float:
    """The median device time of one of ``launch(0)`` to ``launch(launches - 1)``, queued together ``repeats`` times."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    took = []
    for repeat in range(repeats + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        for number in range(launches):
            launch(number)
        end.record(stream)
        end.synchronize()
        if repeat:  # the first warms up
            took.append(float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / launches)
    # The stand-in for a GPU has no clock: a time of nothing would be divided by.
    return max(statistics.median(took), 1e-9)


class Reads:
    """Timed launches over ``size`` bytes at a device address."""

    def __init__(self, asked: step.Asked, pointer: int, target: int) -> None:
        import cupy
        import numpy as np

        module = cupy.RawModule(code=KERNELS)
        self.size = size_of(asked)
        self._repeats = asked.of(20, 8, 1)
        self._kernels = {name: module.get_function(name) for name in ("copy", "read")}
        self._arguments = np.intp(pointer), np.intp(target)
        self._blocks = self.size // (16 * PACKS * THREADS)

    def rate(self, name: str) -> float:
        """Bytes a second that kernel ``name`` moves."""
        kernel = self._kernels[name]
        took = seconds(lambda _: kernel((self._blocks,), (THREADS,), self._arguments), 4, self._repeats)
        return (2 if name == "copy" else 1) * self.size / took


def size_of(asked: step.Asked) -> int:
    """Bytes that are read: many times what any cache holds."""
    return asked.of(2 << 30, 1 << 30, 1 << 18)


def body(report: step.Report, asked: step.Asked) -> None:
    """Measure."""
    import cupy

    gpu = Runtime.load().gpu(asked.gpu)
    gpu.use()
    size = size_of(asked)
    source, target = gpu.allocate(size), gpu.allocate(size)
    try:
        cupy.cuda.runtime.memset(source, 0, size)
        reads = Reads(asked, source, target)
        rates = {}
        for name in ("copy", "read"):
            report.begin(name)
            rates[name] = reads.rate(name)
            if asked.timed:
                report.number(name, f"{name} of {size >> 20} MiB", round(rates[name] / 1e12, 3), "TB/s")
        report.begin("read of another process's memory")
        words = launch.python("services.doctor.firstlight.bandwidth", asked.size, str(asked.gpu))
        done = subprocess.run(
            [*words, gpu.export(source).hex()], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            report.failed("the process that was to read mapped memory failed: " + (done.stderr.strip() or "silently"))
            return
        mapped = float(json.loads(done.stdout.splitlines()[-1]))
    finally:
        gpu.free(source)
        gpu.free(target)
    properties = cupy.cuda.runtime.getDeviceProperties(asked.gpu)
    report.facts(compute_units=int(properties["multiProcessorCount"]), wave=int(properties["warpSize"]))
    if not (asked.timed or step.injected("slow-memory")):
        report.skipped("no time means anything here")
        return
    report.number("", "read of memory that another process owns", round(mapped / 1e12, 3), "TB/s")
    report.check(
        mapped >= MAPPED * rates["read"],
        f"memory that another process owns is read at {mapped / rates['read']:.0%} of the speed of one's own",
        f"memory that another process owns is slow: it is read at {mapped / rates['read']:.0%} of the speed of one's "
        "own; the driver may have mapped it with small pages",
    )
    name = properties["name"].decode() if isinstance(properties["name"], bytes) else str(properties["name"])
    card = figures.card(name)
    if card is None:
        report.skipped("what the maker of this card states of its memory is not known here")
        return
    share = rates["read"] / card.tbps / 1e12
    report.check(
        share >= figures.SLOW,
        f"reads reach {share:.0%} of the {card.tbps:g} TB/s that the card's maker states",
        f"the memory is slow: reads reach {share:.0%} of the {card.tbps:g} TB/s that the card's maker states; look for "
        "a power or clock limit, and for other processes on the GPU",
    )


def mapped(asked: step.Asked, handle: bytes) -> float:
    """Bytes a second that this process reads of another's memory."""
    gpu = Runtime.load().gpu(asked.gpu)
    pointer, target = gpu.open(handle), gpu.allocate(1 << 12)
    try:
        rate = Reads(asked, pointer, target).rate("read")
    finally:
        gpu.free(target)
        gpu.close(pointer)
    return rate / 1000 if step.injected("slow-memory") else rate


if __name__ == "__main__":
    if len(sys.argv) > 3:
        print(json.dumps(mapped(step.Asked(sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3]))))
    else:
        sys.exit(step.run(body))
