"""Calls of a cache and their answers as plain values, for the RPCs and the state object alike."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from services.common.errors import ServiceError
from services.kvcache.eviction.retention import Retention
from tests.kvcache.cache.demands import Demand, Step, grouped, in_columns
from tests.kvcache.fakes import World

# --- asked -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Open a session; the engine attaches it immediately afterwards."""

    pid: int | None
    max_pages: int | None


@dataclass(frozen=True)
class Allocate:
    session: str
    demands: tuple[Demand, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Append:
    """Steps that grow nothing."""

    session: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Remove:
    session: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Get:
    session: str
    name: str


@dataclass(frozen=True)
class Renew:
    session: str


@dataclass(frozen=True)
class Close:
    session: str


@dataclass(frozen=True)
class Release:
    """By an operator, of a lost session."""

    session: str


@dataclass(frozen=True)
class Evict:
    most: int
    retained: bool


@dataclass(frozen=True)
class Expire:
    age: float


@dataclass(frozen=True)
class Sweep:
    """What the daemon does twice a second."""


@dataclass(frozen=True)
class PassTime:
    seconds: float


@dataclass(frozen=True)
class Kill:
    """An engine's process ends, and the daemon can see it."""

    pid: int


@dataclass(frozen=True)
class Damage:
    """Bytes of this page change, and all pages are verified."""

    page: int


Operation = (
    Open
    | Allocate
    | Append
    | Remove
    | Get
    | Renew
    | Close
    | Release
    | Evict
    | Expire
    | Sweep
    | PassTime
    | Kill
    | Damage
)

# --- answered --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """An error, with everything that a client sees of it."""

    reason: str
    message: str
    field: str
    metadata: dict[str, str]
    retry_after_s: float | None

    @classmethod
    def of(cls, error: ServiceError) -> Refused:
        return cls(error.reason, error.message, error.field, error.metadata, error.retry_after_s)


@dataclass(frozen=True)
class Grant:
    """One sequence's. Pages are (id, generation); copies are (index, source, target)."""

    first_index: int
    pages: tuple[tuple[int, int], ...]
    cached_tokens: int
    copies: tuple[tuple[int, tuple[int, int], tuple[int, int]], ...]

    @classmethod
    def of(cls, grant: Any) -> Grant:
        copies = tuple((copy.index, copy.source, copy.target) for copy in grant.copies)
        return cls(grant.first_index, tuple(grant.pages), grant.cached_tokens, copies)


@dataclass(frozen=True)
class Granted:
    """An answer to Allocate, by name: to each opening, and to the steps that have news."""

    told: tuple[tuple[str, Grant | Refused], ...]
    available_pages: int


@dataclass(frozen=True)
class Recorded:
    """An answer to Append: the steps that failed, by name."""

    failed: tuple[tuple[str, Refused], ...]


@dataclass(frozen=True)
class Evicted:
    count: int
    retained_pages: int


@dataclass(frozen=True)
class Removed:
    count: int
    absent: tuple[str, ...]
    available_pages: int


@dataclass(frozen=True)
class Table:
    """An answer to Get."""

    pages: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    published_pages: int
    cached_tokens: int
    access_count: int
    retention: Retention | None


#: The others answer with a session id, a count, a ttl, the ids of lost sessions, or nothing.
Answer = Refused | Granted | Recorded | Evicted | Removed | Table | str | int | float | frozenset[str] | None

# --- done ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One transaction that ran, at this time of the cache's clock."""

    operation: Operation
    answer: Answer
    now: float


def perform(world: World, operation: Operation) -> Entry:
    """Do it to a world, with its cache itself if it comes to that."""
    now = world.now
    try:
        return Entry(operation, _call(world, operation), now)
    except ServiceError as error:
        return Entry(operation, Refused.of(error), now)


def can_be_seen(pid: int) -> bool:
    """Whether the cache can tell that it is gone; every other process is in a pid namespace of its own."""
    return pid % 2 == 0


def namespace_of(pid: int) -> str:
    """A process as the cache is given it; the cache's own is "here"."""
    return "here" if can_be_seen(pid) else "elsewhere"


def handle_of(session: str) -> str:
    """What people call it."""
    return hashlib.blake2b(session.encode(), digest_size=6, person=b"rocmforge.handle").hexdigest()


def start(world: World, pid: int) -> None:
    """Have the process live, as far as it can be seen."""
    if can_be_seen(pid):
        world.processes.living.add(pid)


def _call(world: World, operation: Operation) -> Answer:
    cache = world.cache
    match operation:
        case Open(pid, max_pages):
            return world.attached(pid=pid, seen=pid is not None and can_be_seen(pid), max_pages=max_pages).id
        case Allocate(name, demands, removed):
            told, pool = cache.calls.allocate(name, grouped(demands), list(removed))
            return Granted(tuple((at, _grant(item)) for at, item in told), pool.headroom.pages)
        case Append(name, steps):
            failed = cache.calls.append(name, in_columns(steps, growing=False))
            return Recorded(tuple((at, Refused.of(error)) for at, error in failed))
        case Remove(name, names):
            there, pool = cache.calls.remove(name, list(names))
            absent = tuple(one for one, was_there in zip(names, there, strict=True) if not was_there)
            return Removed(sum(there), absent, pool.headroom.pages)
        case Get(name, sequence_id):
            sequence, session = cache.calls.get_sequence(name, sequence_id)
            return _table(sequence, cache.pool_of(session))
        case Renew(name):
            return cache.renew_session(name).ttl_s
        case Close(name):
            return cache.close_session(name)
        case Release(name):
            return cache.release_quarantine(handle_of(name))
        case Evict(most, retained):
            return Evicted(*cache.evict_pages("pool", most, retained=retained))
        case Expire(age):
            return cache.expire_sequences(age)
        case Sweep():
            for pool in cache.pools:
                pool.table.zeroed(pool.table.zeroing(2))
            return frozenset(session.id for session in cache.sweep())
        case PassTime(seconds):
            world.now += seconds
        case Kill(pid):
            world.processes.kill(pid)
        case Damage(page):
            [pool] = cache.pools
            world.scrub(pool)
            arena = world.arenas[-1]
            arena.damage[page] = 1
            before = pool.totals.withdrawn_pages
            world.verify(pool, range(pool.table.total))
            arena.damage.clear()
            return pool.totals.withdrawn_pages - before
    return None


def _grant(item: Any) -> Grant | Refused:
    return Refused.of(item) if isinstance(item, ServiceError) else Grant.of(item)


def _table(sequence: Any, pool: Any) -> Table:
    return Table(
        tuple(pool.reference(page) for page in sequence.pages),
        tuple(sequence.tokens),
        sequence.published,
        sequence.cached_tokens,
        sequence.access_count,
        sequence.retention,
    )
