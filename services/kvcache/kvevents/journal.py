"""Numbered messages, and the latest of them for readers that missed some.

Numbers are consecutive, from 0, over all topics: a reader of the whole stream finds a gap by them. After ``MOST`` of
them they begin at 0 again, which tells every reader to start over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

#: Messages of one numbering. A replay has one for each number, so this is also how long a replay can be.
MOST = 1 << 16

#: The topic of messages that say nothing about anybody.
NOBODY = "kv@@"

#: Messages that are kept whatever their size: a replay of so few never needs a summary.
LEAST_KEPT = 1 << 10


@dataclass(frozen=True, slots=True)
class Message:
    """One batch of events under a topic."""

    number: int
    topic: str
    batch: bytes

    @property
    def frames(self) -> tuple[bytes, bytes, bytes]:
        """Topic, number, batch."""
        return self.topic.encode(), self.number.to_bytes(8, "big"), self.batch


class Journal:
    """Keeps at most ``most_bytes`` of batches, but always the last `LEAST_KEPT`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: deque[Message] = deque()
        self.next = 0

    @property
    def first(self) -> int:
        """The number of the oldest message kept; ``next`` if there is none."""
        return self._kept[0].number if self._kept else self.next

    @property
    def is_full(self) -> bool:
        """Whether the numbering has come to its end."""
        return self.next >= MOST

    def restart(self) -> None:
        """Begin at 0 again."""
        self._kept.clear()
        self._bytes = self.next = 0

    def add(self, topic: str, batch: bytes) -> Message:
        """Number a batch and keep it."""
        message = Message(self.next, topic, batch)
        self.next += 1
        self._kept.append(message)
        self._bytes += len(batch)
        while self._bytes > self._most_bytes and len(self._kept) > LEAST_KEPT:
            self._bytes -= len(self._kept.popleft().batch)
        return message

    def since(self, number: int) -> list[Message]:
        """The messages from a number on; none if it is not kept."""
        return list(islice(self._kept, number - self.first, None)) if self.first <= number < self.next else []

    def summary(self, number: int, states: list[tuple[str, bytes]], filler: Callable[[], bytes]) -> list[Message]:
        """Messages from a number on that say in a batch a topic what all of them came to; the others are empty.

        Empty itself if there are fewer numbers than topics.
        """
        room = self.next - number
        if len(states) > room:
            return []
        snapshot = [Message(number + at, topic, batch) for at, (topic, batch) in enumerate(states)]
        return snapshot + [Message(at, NOBODY, filler()) for at in range(number + len(snapshot), self.next)]
