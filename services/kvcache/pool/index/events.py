"""Numbered events of links entering and leaving the prefix caches, in a bounded ring.

A router that reads every event knows exactly which prefixes are cached. If it falls behind the ring, it learns that
there is a gap, and reads a snapshot.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

#: Maximum number of links per event, so that no event makes a message too large.
MAX_LINKS = 1024


class EventKind(enum.Enum):
    """What happened to the links of an event."""

    STORED = enum.auto()  # lookups now find them
    EVICTED = enum.auto()  # gone: evicted for another sequence, or by an operator
    EXPIRED = enum.auto()  # gone: unused for the cache TTL
    DROPPED = enum.auto()  # gone: with their pool


@dataclass(frozen=True, slots=True)
class Link:
    """One page of a prefix: the hash of its chain, and that of its parent chain (see ``prefix_cache``)."""

    hash: int
    parent: int


@dataclass(frozen=True, slots=True)
class Event:
    """Links of one pool with the same kind of event. Numbers are consecutive, from 1, within an epoch."""

    number: int
    pool_id: str
    kind: EventKind
    links: list[Link] = field(default_factory=list)
    tier: str = ""  # the lower tier that they entered or left; empty for the pool itself


class EventRing:
    """The latest events, up to ``capacity`` links. Consecutive links of one kind share an event until it is read."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._links = 0
        self._event_links = min(MAX_LINKS, capacity)
        self._events: deque[Event] = deque()
        self._last = 0
        self._read = 0  # events up to this number have been read and must not change
        self._listeners: list[Callable[[], None]] = []

    @property
    def last_number(self) -> int:
        """The number of the newest event; reading it closes that event."""
        self._read = self._last
        return self._last

    def add(self, pool_id: str, kind: EventKind, link: Link, tier: str = "") -> None:
        """Record an event of one link."""
        last = self._events[-1] if self._events and self._last > self._read else None
        full = last is None or len(last.links) >= self._event_links
        if last is None or full or last.kind is not kind or last.pool_id != pool_id or last.tier != tier:
            self._last += 1
            last = Event(self._last, pool_id, kind, tier=tier)
            self._events.append(last)
            for listener in self._listeners:
                listener()
        last.links.append(link)
        self._links += 1
        while self._links > self._capacity and len(self._events) > 1:
            self._links -= len(self._events.popleft().links)

    def after(self, number: int, limit: int = 64) -> tuple[bool, list[Event]]:
        """Whether events after ``number`` were lost, and the next ones still in the ring, oldest first."""
        oldest = self._events[0].number if self._events else self._last + 1
        gap = number + 1 < oldest or number > self._last
        start = 0 if gap else number + 1 - oldest
        found = list(islice(self._events, start, start + limit))
        if found:
            self._read = max(self._read, found[-1].number)
        return gap, found

    def kept(self) -> list[Event]:
        """The events as far back as the ring reaches, oldest first; the newest may still grow."""
        return list(self._events)

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` whenever a new event begins. Returns the function that unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
