"""Openings that are refused while pages are filled, and until when."""

from __future__ import annotations

from typing import NamedTuple

#: Openings that are remembered; of more, the oldest are forgotten, and may wait again.
MOST = 4096

#: Bytes that the daemon keeps of one.
WAIT = 512

Key = tuple[str, str]


class Wait(NamedTuple):
    """``digest`` is that of the prompt's last whole page: another prompt waits anew."""

    digest: bytes
    until: float


class Waits:
    """By session and sequence. What was waited for is never waited for again, so no opening is refused forever."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Wait] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def until(self, key: Key, digest: bytes) -> float | None:
        """Until when an opening may be refused; None if it was not refused yet."""
        wait = self._by_key.get(key)
        return wait.until if wait is not None and wait.digest == digest else None

    def begin(self, key: Key, digest: bytes, until: float) -> None:
        """An opening is refused for the first time."""
        self._by_key.pop(key, None)
        self._by_key[key] = Wait(digest, until)
        if len(self._by_key) > MOST:
            del self._by_key[next(iter(self._by_key))]

    def end(self, key: Key) -> None:
        """An opening is not refused."""
        self._by_key.pop(key, None)
