"""One request on its way through the engine: its tokens, its pages, and how far the one has got into the other."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from services.common.errors import ServiceError
from services.engine.pages.source import Retention
from services.engine.sampling.result import Choice

#: Samples of one prompt that a request may ask for.
MAX_SAMPLES = 16


class State(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; back to WAITING when the pages are lost or given up for a request before it."""

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
    """How a request ended: a reason, with the stop that matched, or an error."""

    reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_text: str | None = None
    error: ServiceError | None = None


class Text(Protocol):
    """Turns one request's tokens into text, holding back what may become a stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""

    def push(self, token: int) -> str:
        """Take one token; return the text that is sure to stand."""

    def finish(self) -> str:
        """Return what was held back; that may turn out to end in a stop string."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a request ends, but for stop strings, which its text knows. No ``eos_token_ids``: it is to be ignored.

    ``min_tokens`` come before an end-of-sequence token or a stop token, which does not count as one of them.
    """

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()


#: A first sample's is the request's id; no other's is any request's.
Key: TypeAlias = str | tuple[str, int]


def key_of(request_id: str, sample: int) -> Key:
    """See `Sequence.key`."""
    return (request_id, sample) if sample else request_id


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took: tokens, and seconds since it was submitted, None for what it never came to."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float | None


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, checked. ``sampling`` is the sampler's and opaque to scheduling.

    Times are seconds of the engine's clock; at ``deadline`` the request ends, done or not. ``others`` are further
    samples of the same prompt, numbered from 1 by ``sample``, with sampling and text of their own and all else alike.
    """

    request_id: str
    prompt: Items[int]
    stopping: Stopping
    sampling: Any
    text: Text
    salt: str = ""
    retention: Retention | None = None
    submitted_at: float = 0.0
    deadline: float | None = None
    priority: int = 0
    sample: int = 0
    others: tuple[Request, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's progress. The counters are the truth; everything else is derived from them.

    ``num_reported_tokens <= num_computed_tokens <= len(tokens)``, and ``num_computed_tokens`` never exceeds what
    ``pages`` hold. ``pages`` is append-only while a ``source_id`` lasts; 64 bits each, they are laid out for a step at
    once. A source id is given per admission and never used again; it is empty as long as the page source has not heard
    of the sequence.

    ``order`` never changes: the first by it is admitted first, has the step's budget first, and is preempted last.

    Samples of one prompt are a ``family``, which a sequence on its own does not have. The first computes the prompt for
    all; the others wait as its ``forks``, each with it as ``leader``, until they have their first token, which is drawn
    when the leader's is, and share its pages. While ``shares_tail`` the page that the next token goes into may be
    others' as well.
    """

    request: Request
    arrival: int
    virtual_arrival: float = 0.0
    tokens: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_reported_tokens: int = 0
    pages: array[int] = field(default_factory=partial(array, "q"))
    source_id: str = ""
    state: State = State.WAITING
    outcome: Outcome | None = None
    family: Items[Sequence] = ()
    leader: Sequence | None = None
    forks: list[Sequence] = field(default_factory=list)
    shares_tail: bool = False
    counts: Any = None  # the sampler's, of its tokens
    prompt_logprobs: list[Choice] = field(default_factory=list)  # of its prompt's tokens from the second on, so far
    cached_tokens: int = 0
    preemptions: int = 0
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
        """The request's id."""
        return self.request.request_id

    @property
    def order(self) -> tuple[float, int]:
        """When it came, moved by its priority, in seconds of the engine's clock; among equals, first come."""
        return self.virtual_arrival, self.arrival

    @property
    def key(self) -> Key:
        """What tells it from every other live sequence."""
        return key_of(self.id, self.request.sample)

    @property
    def held(self) -> bool:
        """Whether nothing may be computed for it until others have taken copies of its last page, or it has."""
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
        """The most tokens whose K and V it can ever need: the last token's are never computed."""
        return len(self.request.prompt) + self.request.stopping.max_tokens - 1

    @property
    def resident_target(self) -> int:
        """Tokens it must have room for so that neither the step under way nor the next one waits for a page."""
        return min(len(self.tokens) + 1, self.max_resident_tokens)

    @property
    def usage(self) -> Usage:
        """What it took so far."""
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
        )

    def unreported_pages(self, page_size: int) -> int:
        """Pages that are complete and that the source does not know to be."""
        return self.num_computed_tokens // page_size - self.num_reported_tokens // page_size

    def forget_pages(self) -> None:
        """Go back to having computed nothing. The tokens stay, so the same output comes out again."""
        del self.pages[:]
        self.num_computed_tokens = self.num_reported_tokens = 0
        self.source_id = ""
        self.shares_tail = False
        self.state = State.WAITING

    def accept(self, token: int, now: float) -> tuple[str, Outcome | None]:
        """Take a sampled token. Returns the text it released and, when it ends the request, how."""
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
        # A stop string comes before whatever else ended the request at its last token.
        if text.stopped is not None:
            outcome = Outcome(FinishReason.STOP, stop_text=text.stopped)
        return released, outcome
