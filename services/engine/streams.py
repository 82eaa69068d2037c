"""The callers' side of live requests: what each has yet to be told, and which ids were over recently."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.engine.loop import Event
from services.errors import RequestExists, RequestUnknown

REMEMBERED = 1024
REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class News:
    """What was added since the last look; ``last`` is the event that ended the request."""

    text: str
    token_ids: list[int]
    last: Event | None


class Stream:
    """One request's news. A caller that is slow to take them gets them merged, so none piles up."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._last: Event | None = None
        self._changed = asyncio.Event()

    def push(self, event: Event) -> None:
        """Add an event."""
        self._text.append(event.text)
        self._token_ids.extend(event.token_ids)
        if event.outcome is not None:
            self._last = event
        self._changed.set()

    async def next(self) -> News:
        """Wait for news and take them."""
        await self._changed.wait()
        self._changed.clear()
        news = News("".join(self._text), self._token_ids, self._last)
        self._text, self._token_ids = [], []
        return news


class Streams:
    """Streams by request id, from submission to the request's last event. Owned by the asyncio loop.

    Ids that are over are remembered for ``REMEMBERED_S`` seconds, at most ``REMEMBERED`` of them, so that cancelling
    one can be told from cancelling one that never was.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, Stream] = {}
        self._over: OrderedDict[str, float] = OrderedDict()
        self._none_live = asyncio.Event()
        self._none_live.set()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request_id: str) -> Stream:
        """Make a request known. Raises RequestExists when one with this id is live."""
        if request_id in self._live:
            raise RequestExists(f"a live request has the id {request_id!r}", field="request_id")
        self._over.pop(request_id, None)
        stream = self._live[request_id] = Stream()
        self._none_live.clear()
        return stream

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to their streams; the last one of a request ends its stream."""
        for event in events:
            stream = self._live.get(event.request_id)
            if stream is None:
                continue
            stream.push(event)
            if event.outcome is not None:
                del self._live[event.request_id]
                self._remember(event.request_id)
        if not self._live:
            self._none_live.set()

    def is_live(self, request_id: str) -> bool:
        """Whether a request is live; False when it is over. Raises RequestUnknown when neither is known."""
        if request_id in self._live:
            return True
        self._expire()
        if request_id not in self._over:
            raise RequestUnknown(f"no request {request_id!r}", field="request_id")
        return False

    async def until_none(self) -> None:
        """Wait until no request is live."""
        await self._none_live.wait()

    def _remember(self, request_id: str) -> None:
        self._over[request_id] = self._clock()
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._expire()

    def _expire(self) -> None:
        before = self._clock() - REMEMBERED_S
        while self._over and next(iter(self._over.values())) <= before:
            self._over.popitem(last=False)
