"""Checks sharing memory for real: one process creates it, another opens it, and each reads what the other wrote.

    python -m services.doctor.roundtrip file FOLDER
    python -m services.doctor.roundtrip gpu ORDINAL

runs as the owner, starts the opener as a child process, and prints ``{"error": ""}``, or the reason of a failure.
However they end, nothing is left behind: the file is unlinked before it is used.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rocmforge.client.arena.gpu_ipc import Runtime
from services import launch
from services.common.errors import ServiceError
from services.doctor.check import Finding, failed, fault, ok, skipped
from services.doctor.machine import Machine
from services.doctor.stack import Stack, nearest

OWNER_S = 60.0
OPENER_S = 30.0

_CANARY = 32
_SIZE = 1 << 20


def file_round_trip(machine: Machine, folder: Path) -> Finding:
    """Share memory in the file system that holds the arenas."""
    existing = nearest(machine, folder)
    error = _run(machine, "file", str(existing))
    if error:
        return failed(
            error, f"choose another --arena-dir: {existing} is full, or does not support files mapped by two processes"
        )
    return ok(f"one process wrote, another read and replied, in {existing}")


def gpu_round_trip(machine: Machine, stack: Stack, needed: bool, only: int | None = None) -> Finding:
    """Share memory of every GPU, or only of the one with ordinal ``only``, by IPC handle."""
    gpus = [gpu for gpu in stack.gpus if only in (None, gpu.ordinal)]
    if not gpus:
        return skipped("no GPU to try")
    for gpu in gpus:
        error = _run(machine, "gpu", str(gpu.ordinal))
        if error:
            return fault(
                needed,
                error,
                "see the other checks; in containers ROCm needs `ipc`, `pid` and `network_mode` shared between the "
                "two services, and some hosts need `cap_add: [SYS_PTRACE]` or `security_opt: [seccomp=unconfined]`",
            )
    listed = ", ".join(str(gpu.ordinal) for gpu in gpus)
    return ok(f"one process wrote, another read and replied, on GPU {listed}")


def _run(machine: Machine, kind: str, where: str) -> str:
    ran = machine.run(launch.python("services.doctor.roundtrip", kind, where), OWNER_S)
    if ran.status is None:
        return f"no answer within {OWNER_S:g} s"
    try:
        return str(json.loads(ran.output)["error"])
    except (ValueError, KeyError, TypeError):
        last = (ran.errors.strip().splitlines() or ["no output"])[-1]
        return f"the process that creates the memory exited with status {ran.status}: {last}"


# --- the owner --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _file(folder: str) -> Iterator[tuple[str, Callable[[int, int], bytes], Callable[[bytes], None]]]:
    path = Path(folder) / f"doctor-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(descriptor, 0, _SIZE)
        with mmap.mmap(descriptor, _SIZE) as memory:

            def write(data: bytes) -> None:
                memory[: len(data)] = data

            yield f"/proc/{os.getpid()}/fd/{descriptor}", lambda at, size: memory[at : at + size], write
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _device(ordinal: str) -> Iterator[tuple[str, Callable[[int, int], bytes], Callable[[bytes], None]]]:
    gpu = Runtime.load().gpu(int(ordinal))
    pointer = gpu.allocate(_SIZE)
    try:
        handle = gpu.export(pointer)
        yield (
            f"{ordinal}:{handle.hex()}",
            lambda at, size: gpu.read(pointer + at, size),
            lambda data: gpu.write(pointer, data),
        )
    finally:
        gpu.free(pointer)


def own(kind: str, where: str) -> str:
    """Create memory and have another process open it. Returns the error, or an empty string."""
    canary = secrets.token_bytes(_CANARY)
    with (_file if kind == "file" else _device)(where) as (name, read, write):
        write(canary + bytes(_CANARY))
        try:
            opener = subprocess.run(
                launch.python("services.doctor.roundtrip", f"open-{kind}", name),
                capture_output=True,
                text=True,
                timeout=OPENER_S,
            )
        except subprocess.TimeoutExpired:
            return f"the process that opens the memory did not exit within {OPENER_S:g} s"
        try:
            answer = json.loads(opener.stdout)
        except ValueError:
            last = (opener.stderr.strip().splitlines() or ["no output"])[-1]
            return f"the process that opens the memory exited with status {opener.returncode}: {last}"
        if answer["error"]:
            return str(answer["error"])
        if bytes.fromhex(answer["seen"]) != canary:
            return "the other process sees different memory: it did not read what was written"
        if read(_CANARY, _CANARY) != _complement(canary):
            return "what the other process wrote did not arrive: the mapping is not shared"
    return ""


# --- the opener -------------------------------------------------------------------------------------------------------


def open_file(path: str) -> bytes:
    """Map a file, read its canary and write the answer."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(descriptor, _SIZE) as memory:
            seen = memory[:_CANARY]
            memory[_CANARY : 2 * _CANARY] = _complement(seen)
            return seen
    finally:
        os.close(descriptor)


def open_device(name: str) -> bytes:
    """Open an IPC handle, read the canary and write the answer."""
    ordinal, _, handle = name.partition(":")
    gpu = Runtime.load().gpu(int(ordinal))
    pointer = gpu.open(bytes.fromhex(handle))
    try:
        seen = gpu.read(pointer, _CANARY)
        gpu.write(pointer + _CANARY, _complement(seen))
        return seen
    finally:
        gpu.close(pointer)


def _complement(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)


def main(kind: str, where: str) -> None:
    """Run one side and print its result as JSON."""
    answer = {"error": "", "seen": ""}
    try:
        if kind == "open-file":
            answer["seen"] = open_file(where).hex()
        elif kind == "open-gpu":
            answer["seen"] = open_device(where).hex()
        else:
            answer["error"] = own(kind, where)
    except ServiceError as error:
        answer["error"] = error.message
    except (OSError, MemoryError) as error:
        answer["error"] = str(error)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
