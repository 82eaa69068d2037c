"""Capacity for arenas: compares the memory budget with the total and free space of a file system or GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from rocmforge.client.arena.gpu_ipc import Gpu
from services.common.errors import InvalidConfiguration

log = structlog.get_logger()

#: How to fix a file system that is too small.
REMEDY = (
    "lower --memory, choose another --arena-dir, or enlarge the file system (`docker run --shm-size`, a tmpfs's "
    "`size=`)"
)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a file system: its total size, and what this user may still allocate."""

    total: int
    free: int

    @classmethod
    def of(cls, directory: Path) -> Room | None:
        """The file system of the directory, or of its nearest existing ancestor.

        None if it has no limit, or reports none.
        """
        for there in (directory, *directory.parents):
            try:
                found = os.statvfs(there)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            # A tmpfs without a limit, and some network file systems, report 0 blocks.
            return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize) if found.f_blocks else None
        return None


def default_memory(most: int, room: Room | None) -> int:
    """The default budget: ``most`` bytes, or three quarters of the file system if that is less.

    A container's /dev/shm has 64 MiB by default.
    """
    return most if room is None else max(1, min(most, room.total * 3 // 4))


def check_directory(directory: Path, memory: int, room: Room | None) -> None:
    """Reject a budget larger than the file system; log a warning for one larger than its free space.

    Free space changes with everything else stored there, and arenas are created as engines connect, so too little of it
    now must not prevent starting. Raises InvalidConfiguration.
    """
    if room is None:
        return
    if memory > room.total:
        raise InvalidConfiguration(
            f"--memory {shown(memory)}: the file system of --arena-dir {directory} has only {shown(room.total)}; "
            f"{REMEDY}",
            field="--memory",
            wanted_bytes=memory,
            total_bytes=room.total,
        )
    if memory > room.free:
        log.warning(
            "arena_room_short",
            arena_dir=str(directory),
            memory_bytes=memory,
            free_bytes=room.free,
            total_bytes=room.total,
            change=f"engines whose arenas do not fit will be rejected: free space, or {REMEDY}",
        )


def check_host_cache(directory: Path, size: int, beside: int, room: Room | None) -> None:
    """Reject a host tier that does not fit into the file system, ``beside`` the pools. Raises InvalidConfiguration."""
    if size and room is not None and size + beside > room.total:
        pools = f", and pools may take {shown(beside)}" if beside else ""
        raise InvalidConfiguration(
            f"--host-cache {shown(size)}: the file system of --arena-dir {directory} has only {shown(room.total)}"
            f"{pools}; lower it, or {REMEDY}",
            field="--host-cache",
            wanted_bytes=size,
            total_bytes=room.total,
        )


def check_gpus(gpus: Sequence[Gpu], memory: int) -> None:
    """Reject a per-GPU budget larger than every GPU's memory; log a warning for each GPU that is too small.

    Raises InvalidConfiguration, GpuError.
    """
    totals = {gpu: gpu.total_memory() for gpu in gpus}
    most = max(totals.values())
    if memory > most:
        raise InvalidConfiguration(
            f"--memory {shown(memory)}: the largest GPU has only {shown(most)}; lower --memory: weights and "
            "activations need memory there too",
            field="--memory",
            wanted_bytes=memory,
            total_bytes=most,
        )
    for gpu, total in totals.items():
        if memory > total:
            log.warning(
                "gpu_room_short",
                device=gpu.ordinal,
                device_id=gpu.id,
                memory_bytes=memory,
                total_bytes=total,
                change="engines on it whose arenas do not fit will be rejected: lower --memory, or run them elsewhere",
            )


def shown(size: int) -> str:
    """A size in bytes, and in MiB if it is large."""
    return f"{size} bytes ({size / _MIB:.4g} MiB)" if size >= _MIB else f"{size} bytes"
