"""What a pool needs of its memory, which the server makes in the host's memory or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What an engine needs to open an arena on a GPU: the GPU, by ordinal and PCI bus id, and the IPC handle."""

    ordinal: int
    id: str
    handle: bytes


class Arena(Protocol):
    """The memory of a pool. The server creates it and the pool set closes it; the pool itself only exposes it."""

    @property
    def file_path(self) -> str:
        """The file that engines map; empty for device memory."""

    @property
    def device(self) -> DeviceMemory | None:
        """The GPU and the IPC handle; None for a file."""

    @property
    def size_bytes(self) -> int:
        """The total size: the pages and the canaries after them."""

    def admit(self, owner: str) -> None:
        """Let an identity map the memory: a user of this machine, other than the daemon's, cannot open its files."""

    def dismiss(self, owner: str) -> None:
        """Let an identity map the memory no more. Raises OSError. A mapping that there is stays."""

    def canary_offset(self, slot: int) -> int:
        """Byte offset of a canary slot."""

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Write a session's canary and clear its answer."""

    def read_answer(self, slot: int) -> bytes:
        """The answer that the engine wrote after its canary."""

    def checksums(self, pages: list[int]) -> list[int]:
        """A checksum of the bytes of each page, 64 bits at most. May be called on any thread, one at a time.

        Raises GpuError, and ValueError once the arena is closed.
        """

    def zero(self, pages: list[int]) -> None:
        """Set all bytes of these pages to zero. As ``checksums``."""

    def close(self) -> None:
        """Free the memory. No session may be attached. Waits for a call on another thread, which then fails."""
