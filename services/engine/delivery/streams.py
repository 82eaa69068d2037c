"""The callers' side of live requests: undelivered events, and the ids of requests that ended recently."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from services.common.errors import RequestExists, RequestUnknown, ServiceError
from services.engine.delivery.throttle import Bell, Throttle
from services.engine.sampling.result import Choice
from services.engine.scheduling.event import Event
from services.engine.scheduling.sequence import Outcome, Usage

REMEMBERED = 1024
REMEMBERED_S = 600.0


@dataclass(frozen=True, slots=True)
class News:
    """A sample's output since the last read, and its outcome once it has ended; a refused request has no ``usage``.

    ``logprobs`` has one entry per token id, if requested; ``prompt_logprobs`` comes with the first token. ``over`` is
    set on a request's last news, whichever sample it belongs to.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    outcome: Outcome | None = None
    usage: Usage | None = None
    sample: int = 0
    logprobs: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[Choice, ...] = ()
    over: bool = False


@dataclass(slots=True)
class _Untold:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Choice] = field(default_factory=list)
    prompt_logprobs: tuple[Choice, ...] = ()
    outcome: Outcome | None = None
    usage: Usage | None = None


class Listener(Protocol):
    """Receives the events of one request."""

    def push(self, event: Event) -> None:
        """Receive the next event."""


class Stream:
    """One request's news for one caller; the sample whose news has waited longest comes first.

    News of a sample is merged until it is read, so neither a slow caller nor the throttle makes a backlog of messages.
    """

    def __init__(
        self, on_news: Callable[[], None] = lambda: None, samples: int = 1, throttle: Throttle | None = None
    ) -> None:
        self._on_news = on_news
        self._live = samples
        self._untold: dict[int, _Untold] = {}
        self._changed = asyncio.Event()
        self._throttle = throttle
        self._bells: dict[int, Bell] = {}  # by sample: each has its own turns, one message a turn
        self._ready: dict[int, None] = {}  # samples whose bell has sounded, in that order

    @property
    def has_news(self) -> bool:
        """Whether there is news to take now."""
        return bool(self._ready)

    def push(self, event: Event) -> None:
        """Add an event."""
        if not event.token_ids and event.outcome is None:
            return  # queued: nothing to deliver
        untold = self._untold.setdefault(event.sample, _Untold())
        untold.text.append(event.text)
        untold.token_ids.extend(event.token_ids)
        untold.logprobs.extend(event.logprobs)
        untold.prompt_logprobs += event.prompt_logprobs
        if event.outcome is not None:
            untold.outcome, untold.usage = event.outcome, event.sequence.usage if event.sequence else None
            self._live = self._live - 1 if event.sequence else 0
        bell, first = self._bells.get(event.sample), False
        if bell is None:
            bell, first = Bell(partial(self._tell, event.sample), self._throttle), True
            self._bells[event.sample] = bell
        bell.ring(at_once=first or event.outcome is not None)

    def _tell(self, sample: int) -> None:
        self._ready[sample] = None
        self._changed.set()
        self._on_news()

    def take(self) -> News:
        """Returns one sample's news. Call it only when there is news."""
        sample = next(iter(self._ready))
        del self._ready[sample]
        untold = self._untold.pop(sample)
        self._bells[sample].hush()
        if not self._ready:
            self._changed.clear()
        return News(
            "".join(untold.text),
            tuple(untold.token_ids),
            untold.outcome,
            untold.usage,
            sample,
            tuple(untold.logprobs),
            untold.prompt_logprobs,
            over=not self._live and not self._untold,
        )

    async def next(self) -> News:
        """Wait for news and return it."""
        await self._changed.wait()
        return self.take()


class Bundle:
    """Several streams read as one, the longest-waiting news first. ``remaining`` counts streams that have not ended."""

    def __init__(self, count: int, throttle: Throttle | None = None) -> None:
        self.remaining = count
        self._throttle = throttle
        self._ready: dict[int, Stream | ServiceError] = {}
        self._changed = asyncio.Event()

    def stream(self, index: int, samples: int = 1) -> Stream:
        """Create the stream of item ``index``."""
        stream = Stream(lambda: self._mark(index, stream), samples, self._throttle)
        return stream

    def fail(self, index: int, error: ServiceError) -> None:
        """End an item that got no stream."""
        self._mark(index, error)

    def _mark(self, index: int, what: Stream | ServiceError) -> None:
        self._ready.setdefault(index, what)
        self._changed.set()

    async def next(self) -> tuple[int, News]:
        """Wait for news of any item and return it with the item's index."""
        await self._changed.wait()
        index = next(iter(self._ready))
        what = self._ready.pop(index)
        if not self._ready:
            self._changed.clear()
        news = what.take() if isinstance(what, Stream) else News(outcome=Outcome(error=what), over=True)
        if isinstance(what, Stream) and what.has_news:
            self._mark(index, what)
        self.remaining -= news.over
        return index, news


class Streams:
    """Maps live requests to their listeners, from submission to the last event. Owned by the asyncio loop.

    The last ``REMEMBERED`` ended ids are remembered for ``REMEMBERED_S`` seconds, so that cancelling a request that has
    ended can be distinguished from cancelling an unknown one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Its listener, how many samples have not ended, and its owner; when it ended, and its owner.
        self._live: dict[str, tuple[Listener, int, str]] = {}
        self._over: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._none_live = asyncio.Event()
        self._none_live.set()

    def __len__(self) -> int:
        return len(self._live)

    def check_free(self, request_id: str) -> None:
        """Raises RequestExists when a request with this id is live."""
        if request_id in self._live:
            raise RequestExists(f"a live request has the id {request_id!r}", field="request_id")

    def open(self, request_id: str, listener: Listener, samples: int = 1, owner: str = "") -> None:
        """Register a request of ``samples`` samples, made by ``owner``. Raises RequestExists when one with this id is
        live.
        """
        self.check_free(request_id)
        self._over.pop(request_id, None)
        self._live[request_id] = listener, samples, owner
        self._none_live.clear()

    def deliver(self, events: Iterable[Event]) -> None:
        """Pass events to their listeners; a request's last event unregisters it."""
        for event in events:
            listener, samples, owner = self._live.get(event.request_id, (None, 0, ""))
            if listener is None:
                continue
            listener.push(event)
            if event.outcome is None:
                continue
            if event.sequence is not None and samples > 1:
                self._live[event.request_id] = listener, samples - 1, owner
            else:
                del self._live[event.request_id]
                self._remember(event.request_id, owner)
        if not self._live:
            self._none_live.set()

    def is_live(self, request_id: str, by: str | None = None) -> bool:
        """Whether a request is live; False when it ended recently. Raises RequestUnknown otherwise, and for one that is
        not ``by``'s; None is everybody.
        """
        live = self._live.get(request_id)
        if live is not None and by in (None, live[2]):
            return True
        self._expire()
        over = self._over.get(request_id)
        if over is None or by not in (None, over[1]):
            raise RequestUnknown(f"no request {request_id!r}", field="request_id")
        return False

    async def until_none(self) -> None:
        """Wait until no request is live."""
        await self._none_live.wait()

    def _remember(self, request_id: str, owner: str) -> None:
        self._over[request_id] = self._clock(), owner
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._expire()

    def _expire(self) -> None:
        before = self._clock() - REMEMBERED_S
        while self._over and next(iter(self._over.values()))[0] <= before:
            self._over.popitem(last=False)
