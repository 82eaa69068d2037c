"""Room for arenas: what a file system or a GPU holds in all and has free, beside the memory budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.errors import InvalidConfiguration
from services.common.gpu_ipc import Gpu

log = structlog.get_logger()

#: What is done about a file system that is too small.
REMEDY = (
    "lower --memory, choose another --arena-dir, or make the file system larger (`docker run --shm-size`, a tmpfs's "
    "`size=`)"
)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a file system: all that it holds, and what this user may still take."""

    total: int
    free: int

    @classmethod
    def of(cls, directory: Path) -> Room | None:
        """That of the directory, or of the nearest one above it that exists.

        None when it has no bounds, or tells none.
        """
        for there in (directory, *directory.parents):
            try:
                found = os.statvfs(there)
            except FileNotFoundError:
                continue
            except OSError:
                return None
            # A tmpfs without a limit, and some network file systems, say 0 blocks.
            return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize) if found.f_blocks else None
        return None


def default_memory(most: int, room: Room | None) -> int:
    """The budget of a daemon that is given none: ``most`` bytes, or three quarters of a file system that is smaller.

    A container's /dev/shm has 64 MiB unless it is given more.
    """
    return most if room is None else max(1, min(most, room.total * 3 // 4))


def check_directory(directory: Path, memory: int, room: Room | None) -> None:
    """Refuse a budget that the file system can never hold; log one that it has no room for at present.

    What is free changes with everything else that is there, and arenas are made as engines come: too little of it now
    is no reason not to start. Raises InvalidConfiguration.
    """
    if room is None:
        return
    if memory > room.total:
        raise InvalidConfiguration(
            f"--memory {shown(memory)}: the file system of --arena-dir {directory} holds {shown(room.total)} in all; "
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
            change=f"engines whose arenas do not fit are refused: make room, or {REMEDY}",
        )


def check_gpus(gpus: Sequence[Gpu], memory: int) -> None:
    """The same for a budget on each GPU: refuse one that none of them holds, log the GPUs that do not.

    Raises InvalidConfiguration, GpuError.
    """
    totals = {gpu: gpu.total_memory() for gpu in gpus}
    most = max(totals.values())
    if memory > most:
        raise InvalidConfiguration(
            f"--memory {shown(memory)}: the largest GPU has {shown(most)} in all; lower --memory: weights and "
            "activations need room there too",
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
                change="engines on it whose arenas do not fit are refused: lower --memory, or run them elsewhere",
            )


def shown(size: int) -> str:
    """Bytes, and the same in MiB."""
    return f"{size} bytes ({size / _MIB:.4g} MiB)" if size >= _MIB else f"{size} bytes"
