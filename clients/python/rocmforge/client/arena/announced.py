"""What the daemon announces of an arena, checked before it is mapped."""

from __future__ import annotations

from dataclasses import dataclass

from rocmforge.client.errors import AttachMismatch
from rocmforge.client.layout import Layout

#: Bytes of a session's canary, which the daemon writes, and of the answer after it.
CANARY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Announced:
    """Page ``p`` is the ``page_bytes`` bytes at ``p * page_bytes`` of ``size_bytes``; the canary comes after them."""

    total_pages: int
    page_bytes: int
    size_bytes: int
    canary_offset: int

    def check(self, layout: Layout) -> None:
        """Raise AttachMismatch unless these are pages of the layout, and everything lies in the arena."""
        expected = layout.page_bytes
        if self.page_bytes != expected:
            raise AttachMismatch(f"the arena's pages have {self.page_bytes} bytes; the engine's have {expected}")
        pages_end, canary_end = self.total_pages * expected, self.canary_offset + 2 * CANARY_BYTES
        if self.total_pages < 1 or pages_end > self.canary_offset or canary_end > self.size_bytes:
            raise AttachMismatch(
                f"{self.total_pages} pages of {expected} bytes and a canary at {self.canary_offset} do not fit in "
                f"{self.size_bytes} bytes"
            )


def answer(canary: bytes) -> bytes:
    """What is written after a canary that was read: its bitwise complement."""
    return bytes(byte ^ 0xFF for byte in canary)
