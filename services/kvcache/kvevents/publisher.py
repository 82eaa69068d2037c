"""Publishes the prefix caches as vLLM's KV events over ZeroMQ: a topic for each attached engine.

The pages of a pool are published under the topic of every engine that is attached to it, since routers keep their maps
by engine. When an engine attaches, its topic begins with `AllBlocksCleared` and everything cached; when it leaves, the
topic ends with `AllBlocksCleared`. Two sessions with the same engine name and model share a topic. When a reader
connects or reconnects, its topics begin anew for all their readers.

What has been published is the state of the cache up to one event of its ring. A snapshot (for a new topic, or a replay
of messages no longer kept) is taken at that point and published under a lock that holds later events back.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

import structlog
import zmq
import zmq.asyncio

from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.tiers_below import TiersBelow
from services.kvcache.kvevents import chains
from services.kvcache.kvevents.format import END, AllBlocksCleared, KvEvent, encode, topic
from services.kvcache.kvevents.journal import NOBODY, Journal, Message
from services.kvcache.pool.index.events import Event, EventKind, Link
from services.kvcache.pool.index.frozen_links import FrozenLinks
from services.kvcache.pool.pool import Pool

log = structlog.get_logger()

#: Seconds between two looks at the ring while there is news: links of one kind share an event meanwhile.
PAUSE_S = 0.01

#: Seconds that a reader of a replay may take for one message.
REPLAY_S = 10.0

#: Messages that wait for a slow reader; beyond them it misses some, which the numbers tell it.
HIGH_WATER = 1000

#: Bytes of messages kept for replays.
KEPT_BYTES = 16 << 20

#: The pools under each topic.
Topics = Mapping[str, frozenset[str]]


class KvEventPublisher:
    """Belongs to the loop that owns the cache.

    ``form`` is the format of events, ``to`` a reader that listens itself, and ``clock`` in seconds since 1970.
    """

    def __init__(
        self,
        cache: KvCache,
        listener: Listener,
        replay: Listener | None,
        form: str,
        *,
        to: Listener | None = None,
        kept_bytes: int = KEPT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._listener = listener
        self._replay_listener = replay
        self._form = form
        self._to = to
        self._clock = clock
        self._journal = Journal(kept_bytes)
        self._topics: Topics = {}
        self._left: dict[str, int] = {}  # topics that were cleared in this numbering, and by which message
        self._number = 0  # of the last event of the ring that is published
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._lost = False  # whether every topic has to begin anew
        self._joined: set[str] = set()  # what new readers have subscribed to: the beginnings of topics
        self._context = zmq.asyncio.Context()
        self._news = self._context.socket(zmq.XPUB)  # a PUB that learns who subscribes
        self._replays = self._context.socket(zmq.ROUTER)
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None
        self.bound = ""
        self.replay_bound = ""
        self.published = 0
        self.replayed = 0

    def start(self) -> None:
        """Bind and begin to publish. Raises InvalidConfiguration if an address cannot be bound."""
        self._news.set_hwm(HIGH_WATER)
        self._news.setsockopt(zmq.XPUB_VERBOSE, 1)
        # A reader of a replay that does not keep up is waited for, not skipped.
        self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.bound = _bind(self._news, self._listener, "--kv-events")
        if self._replay_listener is not None:
            self.replay_bound = _bind(self._replays, self._replay_listener, "--kv-events-replay")
            self._tasks.append(asyncio.create_task(self._answer()))
        if self._to is not None:
            self._news.connect(f"tcp://{self._to}")
        self._number = self._cache.events.last_number
        self._unsubscribe = self._cache.events.subscribe(self._changed.set)
        self._cache.on_sessions = self._changed.set
        self._tasks += [asyncio.create_task(self._run()), asyncio.create_task(self._greet())]

    async def stop(self) -> None:
        """Publish that all engines have left, and stop. Idempotent."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
            self._cache.on_sessions = lambda: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if not self._news.closed:
            for name in sorted(self._topics):
                self._publish(name, [AllBlocksCleared()])
            self._news.close(linger=100)
            self._replays.close(linger=0)
            self._context.term()

    async def _run(self) -> None:
        while True:
            try:
                async with self._lock:
                    await self._catch_up()
            except Exception:
                log.exception("kv_events_failed")
                self._lost = True
            await asyncio.sleep(PAUSE_S)
            await self._changed.wait()

    async def _greet(self) -> None:
        while True:
            said = await self._news.recv()
            if said[:1] == b"\x01":
                self._joined.add(said[1:].decode(errors="replace"))
                self._changed.set()

    # --- publishing, under the lock ---

    async def _catch_up(self) -> bool:
        """Publish what has happened since the last time, then what it takes for topics to be right.

        Returns whether any topic began anew. If none did, what has been published is the current state.
        """
        self._changed.clear()
        self._lost |= await self._publish_ring()
        # No await from here to the copies: what is published is the state that is copied.
        wanted = _topics(self._cache)
        if self._journal.is_full:
            self._restart()
        joined, self._joined = self._joined, set()
        fresh = {
            name
            for name, pools in wanted.items()
            if self._lost or self._topics.get(name) != pools or any(map(name.startswith, joined))
        }
        gone = set(self._topics) - set(wanted)
        self._topics = wanted
        states = self._states(fresh)
        self._number = self._cache.events.last_number
        self._lost = False
        for name in sorted(gone):
            self._left[name] = self._journal.next
            self._publish(name, [AllBlocksCleared()])
        for name, events in states.items():
            self._publish(name, [AllBlocksCleared()])
            async for event in _pausing(events):
                self._publish(name, [event])
        for prefix in joined:  # if nothing else, a new reader learns the number
            self._publish(NOBODY if NOBODY.startswith(prefix) else prefix, [])
        return bool(states)

    def _restart(self) -> None:
        """Begin at 0 again, by which every reader forgets all it knows."""
        self._journal.restart()
        self._left.clear()
        self._lost = True

    async def _publish_ring(self) -> bool:
        """Publish all events of the ring; whether some are lost."""
        while True:
            lost, events = self._cache.events.after(self._number, limit=4)
            if lost:
                return True
            if not events:
                return False
            for event in events:
                names = [name for name, pools in self._topics.items() if event.pool_id in pools]
                # The events of a pool that is gone are of engines that have left, and their topics are cleared.
                pool = next((pool for pool in self._cache.pools if pool.id == event.pool_id), None)
                if names and pool is not None:
                    async for one in _pausing(_kv_events(pool, event, self._cache.tiers)):
                        self._publish_to(names, [one])
                self._number = event.number

    def _publish(self, name: str, events: list[KvEvent]) -> None:
        self._publish_to([name], events)

    def _publish_to(self, names: list[str], events: list[KvEvent]) -> None:
        batch = encode(events, self._clock(), self._form)
        for name in names:
            message = self._journal.add(name, batch)
            # It never waits: a reader that is too slow misses the message.
            self._news.send_multipart(message.frames, zmq.NOBLOCK)
            self.published += 1

    def _states(self, names: Iterable[str]) -> dict[str, Iterator[KvEvent | None]]:
        """All that is cached under topics, copied now and made into events when it is read."""
        frozen, tiers = dict[str, tuple[Pool, FrozenLinks, list[Link]]](), self._cache.tiers
        for pool_id in {pool_id for name in names for pool_id in self._topics[name]}:
            pool = self._cache.pools.get(pool_id)
            below = [] if tiers is None else [one.link for one in tiers.stored_links(pool_id)]
            frozen[pool_id] = (pool, pool.index.frozen(), below)
        return {name: _all_stored([frozen[id_] for id_ in sorted(self._topics[name])], tiers) for name in names}

    # --- replays ---

    async def _answer(self) -> None:
        while True:
            client, *rest = await self._replays.recv_multipart()
            if not rest or len(rest[-1]) != 8:
                log.info("kv_events_replay_refused", frames=len(rest))
                continue
            start = int.from_bytes(rest[-1], "big")
            try:
                async with self._lock:
                    messages = await self._since(start)
                for message in messages:
                    await self._send(client, message.frames)
                await self._send(client, (b"", END, b""))
                self.replayed += 1
            except (zmq.ZMQError, TimeoutError) as error:
                log.info("kv_events_replay_lost", start=start, error=repr(error))
            except Exception:
                log.exception("kv_events_replay_failed", start=start)

    async def _send(self, client: bytes, frames: tuple[bytes, bytes, bytes]) -> None:
        """Raises TimeoutError for a reader that does not keep up, and ZMQError for one that is gone."""
        deadline = time.monotonic() + REPLAY_S
        while True:
            try:
                await self._replays.send_multipart((client, b"", *frames), zmq.NOBLOCK)
                return await asyncio.sleep(0)
            except zmq.Again:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                await asyncio.sleep(PAUSE_S)

    async def _since(self, start: int) -> list[Message]:
        """Messages from a number on, one for each: those published, or what they came to."""
        if start >= self._journal.first:
            return self._journal.since(start)
        while await self._catch_up():
            pass
        states = list[tuple[str, bytes]]()
        for name, events in self._states(list(self._topics)).items():
            opening: list[KvEvent] = [AllBlocksCleared(), *[event async for event in _pausing(events)]]
            states.append((name, encode(opening, self._clock(), self._form)))
        cleared = encode([AllBlocksCleared()], self._clock(), self._form)
        states += [(name, cleared) for name, at in self._left.items() if at >= start and name not in self._topics]
        empty = encode([], self._clock(), self._form)
        messages = self._journal.summary(start, states, lambda: empty)
        if states and not messages:  # more topics than numbers: everybody starts over
            self._restart()
            self._changed.set()
        return messages


def _topics(cache: KvCache) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for session in cache.attached_sessions():
        model = session.model or session.pool_id.partition("@")[0]
        name = topic(session.engine_name or session.client_name or session.handle, model)
        found[name] = found.get(name, frozenset()) | {session.pool_id}
    return found


def _all_stored(
    pools: list[tuple[Pool, FrozenLinks, list[Link]]], tiers: TiersBelow | None
) -> Iterator[KvEvent | None]:
    for pool, links, below in pools:
        yield from chains.stored(pool, chains.parents_first(links))
        if tiers is not None:
            yield from chains.stored(pool, below, functools.partial(tiers.stored_link, pool.id))


def _kv_events(pool: Pool, event: Event, tiers: TiersBelow | None) -> Iterable[KvEvent | None]:
    below = functools.partial(tiers.stored_link, pool.id) if event.tier and tiers is not None else None
    if event.kind is EventKind.STORED:
        return chains.stored(pool, event.links, below)
    return [chains.removed(event.links, chains.medium(pool) if below is None else chains.tier_medium(pool))]


async def _pausing(events: Iterable[KvEvent | None]) -> AsyncIterator[KvEvent]:
    """The events; the loop serves others after each, and wherever there is a None."""
    for event in events:
        if event is not None:
            yield event
        await asyncio.sleep(0)


def _bind(endpoint: zmq.asyncio.Socket, listener: Listener, flag: str) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM)[0]
        endpoint.setsockopt(zmq.IPV6, int(family == socket.AF_INET6))
        host, port = str(address[0]), int(address[1])
        endpoint.bind(f"tcp://{host}:{port}" if family == socket.AF_INET else f"tcp://[{host}]:{port}")
    except (zmq.ZMQError, OSError) as error:
        raise InvalidConfiguration(f"{flag} {listener}: cannot bind: {error}", field=flag) from error
    bound: str = endpoint.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound.removeprefix("tcp://")
