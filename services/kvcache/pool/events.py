"""What enters and leaves the prefix caches, numbered, in a bounded ring.

A router that reads every event knows exactly which prefixes are cached. One that falls behind the ring is told that
there is a gap, and reads a snapshot.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

#: Links in one event at most, so that no event makes a message too large.
MAX_LINKS = 1024


class EventKind(enum.Enum):
    """What happened to the links of an event."""

    STORED = enum.auto()  # a lookup finds them from now on
    EVICTED = enum.auto()  # gone: the memory went to another sequence, or an operator evicted them
    EXPIRED = enum.auto()  # gone: unused for the pool's cache ttl
    DROPPED = enum.auto()  # gone: with their pool


@dataclass(frozen=True, slots=True)
class Link:
    """One page of a prefix: the hash of its chain, and of the chain before it (see ``prefix``)."""

    hash: int
    parent: int


@dataclass(frozen=True, slots=True)
class Event:
    """Links of one pool that shared a fate. Numbers count up by one from 1 within an epoch."""

    number: int
    pool_id: str
    kind: EventKind
    links: list[Link] = field(default_factory=list)


class EventRing:
    """The last events, up to ``capacity`` links. Consecutive news of one kind are one event until somebody reads it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._links = 0
        self._event_links = min(MAX_LINKS, capacity)
        self._events: deque[Event] = deque()
        self._last = 0
        self._read = 0  # events up to this one were read, and may not change any more
        self._listeners: list[Callable[[], None]] = []

    @property
    def last_number(self) -> int:
        """The number of the newest event; reading it closes that event."""
        self._read = self._last
        return self._last

    def add(self, pool_id: str, kind: EventKind, link: Link) -> None:
        """Tell of one link."""
        last = self._events[-1] if self._events and self._last > self._read else None
        if last is None or last.pool_id != pool_id or last.kind is not kind or len(last.links) >= self._event_links:
            self._last += 1
            last = Event(self._last, pool_id, kind)
            self._events.append(last)
            for listener in self._listeners:
                listener()
        last.links.append(link)
        self._links += 1
        while self._links > self._capacity and len(self._events) > 1:
            self._links -= len(self._events.popleft().links)

    def after(self, number: int, limit: int = 64) -> tuple[bool, list[Event]]:
        """Whether events behind ``number`` were lost, and the next ones that are still here, oldest first."""
        oldest = self._events[0].number if self._events else self._last + 1
        gap = number + 1 < oldest or number > self._last
        start = 0 if gap else number + 1 - oldest
        found = list(islice(self._events, start, start + limit))
        if found:
            self._read = max(self._read, found[-1].number)
        return gap, found

    def fates(self, pool_id: str, hashes: set[int]) -> dict[int, EventKind]:
        """What last happened to those of the links that are gone, as far back as events are kept."""
        found: dict[int, EventKind] = {}
        for event in self._events:
            if event.pool_id == pool_id:
                for link in event.links:
                    if link.hash in hashes:
                        found[link.hash] = event.kind
        return {hash_: kind for hash_, kind in found.items() if kind is not EventKind.STORED}

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have ``listener`` called whenever a new event begins; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
