"""A request in the engine: its tokens, its pages, and how many of its tokens are computed."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from services.common.errors import ServiceError
from services.common.tracing.span import Span
from services.engine.pages.source import Retention, ReuseHint
from services.engine.sampling.result import Choice

#: Most samples of one prompt per request.
MAX_SAMPLES = 16


class State(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; back to WAITING when its pages are lost or it is preempted."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a request ended without an error."""

    EOS = enum.auto()
    STOP = enum.auto()
    LENGTH = enum.auto()
    CANCELLED = enum.auto()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: a reason, with the stop token or string that matched, or an error."""

    reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_text: str | None = None
    error: ServiceError | None = None


class Text(Protocol):
    """Detokenizes one request, holding back text that may become a stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""

    def push(self, token: int) -> str:
        """Take one token. Returns the text that is final."""

    def finish(self) -> str:
        """Returns the text held back, which may turn out to end in a stop string."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The stop conditions of a request, except stop strings, which its `Text` has. Empty ``eos_token_ids`` ignore the
    end of sequence.

    At least ``min_tokens`` tokens precede an end-of-sequence or stop token, which is not counted.
    """

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()


#: The request's id for its first sample; for the others a pair, which no request id equals.
Key: TypeAlias = str | tuple[str, int]


def key_of(request_id: str, sample: int) -> Key:
    """See `Sequence.key`."""
    return (request_id, sample) if sample else request_id


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used: tokens, and seconds since submission, None for a stage that it did not reach.

    ``fill_wait_s`` are the seconds that it waited for fills from lower tiers; ``queue_s`` includes those before it was
    first admitted.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float | None
    fill_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request. ``sampling`` belongs to the sampler and is opaque to scheduling.

    Times are seconds of the engine's clock; the request ends at ``deadline``, finished or not. ``others`` are further
    samples of the same prompt, numbered from 1 by ``sample``. They differ from the first in sampling and text only.
    ``trace`` is its span, if it is sampled for tracing.
    """

    request_id: str
    prompt: Items[int]
    stopping: Stopping
    sampling: Any
    text: Text
    salt: str = ""
    retention: Retention | None = None
    reuse_hint: ReuseHint | None = None
    submitted_at: float = 0.0
    deadline: float | None = None
    priority: int = 0
    sample: int = 0
    others: tuple[Request, ...] = ()
    trace: Span | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's progress. The counters are authoritative; everything else is derived from them.

    ``num_reported_tokens <= num_computed_tokens <= len(tokens)``, and ``num_computed_tokens`` never exceeds the
    capacity of ``pages``. ``pages``, the block table, is append-only during the life of a ``source_id``, apart from
    page copies; its 64-bit ids go into a step's block tables in bulk. Each admission uses a new source id, which is
    never reused; it is empty while the page source does not know the sequence.

    Steps that were launched and have not been applied compute ``in_flight`` more tokens, and sample ``pending`` more
    that the host does not know yet; ``draw_row`` is the last one's row in the sampler's output. The counters above do
    not include them: they describe the synchronized state.

    ``order`` never changes: the first in order is admitted first, gets the step's budget first, and is preempted last.

    The samples of one prompt form a ``family``; a single sample has none. The first sample, the ``leader``, computes
    the prompt for all. The others wait as its ``forks``: their first tokens are sampled together with the leader's,
    then they share its pages. While ``shares_tail`` is set, other sequences may hold the page that the next token goes
    into.
    """

    request: Request
    arrival: int
    virtual_arrival: float = 0.0
    tokens: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_reported_tokens: int = 0
    in_flight: int = 0
    pending: int = 0
    draw_row: int = 0
    pages: array[int] = field(default_factory=partial(array, "q"))
    source_id: str = ""
    state: State = State.WAITING
    outcome: Outcome | None = None
    family: Items[Sequence] = ()
    leader: Sequence | None = None
    forks: list[Sequence] = field(default_factory=list)
    shares_tail: bool = False
    counts: Any = None  # the sampler's token counts
    prompt_logprobs: list[Choice] = field(default_factory=list)  # so far, from the second prompt token on
    cached_tokens: int = 0
    preemptions: int = 0
    fill_wait_s: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} {self.state.name}: {self.num_computed_tokens} of {len(self.tokens)} tokens computed, "
            f"{len(self.pages)} pages>"
        )

    @property
    def id(self) -> str:
        """The request id."""
        return self.request.request_id

    @property
    def order(self) -> tuple[float, int]:
        """The arrival time shifted by priority, in seconds of the engine's clock; ties break by arrival number."""
        return self.virtual_arrival, self.arrival

    @property
    def key(self) -> Key:
        """Unique among live sequences."""
        return key_of(self.id, self.request.sample)

    @property
    def held(self) -> bool:
        """Whether its last page is shared: nothing may be computed for it until it or the other holders have a copy."""
        return self.shares_tail or bool(self.forks and self.num_generated_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_resident_tokens(self) -> int:
        """The most tokens whose K and V it can ever need. K and V of the last token are never computed."""
        return len(self.request.prompt) + self.request.stopping.max_tokens - 1

    @property
    def resident_target(self) -> int:
        """Tokens it must have pages for so that neither the step in flight nor the next one waits for a page."""
        return min(len(self.tokens) + self.pending + 1, self.max_resident_tokens)

    @property
    def usage(self) -> Usage:
        """Its usage so far."""
        since = self.request.submitted_at
        queue_s, first_token_s, total_s = (
            None if at is None else at - since for at in (self.admitted_at, self.first_token_at, self.finished_at)
        )
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.num_generated_tokens,
            preemptions=self.preemptions,
            queue_s=queue_s,
            first_token_s=first_token_s,
            total_s=total_s,
            fill_wait_s=self.fill_wait_s,
        )

    def unreported_pages(self, page_size: int) -> int:
        """Returns how many complete pages have not been reported to the source."""
        return self.num_computed_tokens // page_size - self.num_reported_tokens // page_size

    def forget_pages(self) -> None:
        """Reset to nothing computed. The tokens stay, so recomputing continues the same output."""
        del self.pages[:]
        self.num_computed_tokens = self.num_reported_tokens = self.in_flight = self.pending = 0
        self.source_id = ""
        self.shares_tail = False
        self.state = State.WAITING

    def accept(self, token: int, now: float) -> tuple[str, Outcome | None]:
        """Append a sampled token. Returns the text that it releases, and the outcome when it ends the request."""
        tokens, request = self.tokens, self.request
        tokens.append(token)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        stopping, text, generated = request.stopping, request.text, len(tokens) - len(request.prompt)
        outcome: Outcome | None = None
        if generated > stopping.min_tokens:
            if token in stopping.eos_token_ids:
                outcome = Outcome(FinishReason.EOS, stop_token_id=token)
            elif token in stopping.stop_token_ids:
                outcome = Outcome(FinishReason.STOP, stop_token_id=token)
        released = "" if outcome else text.push(token)
        if outcome is None and generated >= stopping.max_tokens and text.stopped is None:
            outcome = Outcome(FinishReason.LENGTH)
        if outcome is not None:
            released += text.finish()
        # A stop string takes precedence over any other reason to end at this token.
        if text.stopped is not None:
            outcome = Outcome(FinishReason.STOP, stop_text=text.stopped)
        return released, outcome
