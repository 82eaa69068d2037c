"""The step call's vocabulary: what an engine demands for its sequences, and what it is granted. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rocmforge.client.errors import ServiceError

#: The most tokens of one AllocatePages message. A longer step is sent in several, a longer prompt is refused.
STEP_TOKENS = 1 << 20

#: The most sequences that one AllocatePages message may demand for, and the most that it may remove.
STEP_SEQUENCES = 4096

#: The upper limits of a `Retention`.
MAX_RETENTION_S, MAX_RETENTION_PRIORITY = 86400.0, 100

#: The upper limits of a `ReuseHint`; the category's is in characters.
MAX_CATEGORY, MAX_TURN, MAX_EXPECTED_RETURN_S = 64, 1_000_000, 86400.0

#: The upper limit of `Opening.fill_wait_s`, in seconds.
MAX_FILL_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """For ``ttl_s`` seconds after a sequence ends, its complete pages are evicted only after all unretained cached
    pages. Retained pages are evicted in order of rising ``priority``.

    ``ttl_s`` is above 0 and at most `MAX_RETENTION_S`; ``priority`` is 1 to `MAX_RETENTION_PRIORITY`.
    """

    ttl_s: float
    priority: int


@dataclass(frozen=True, slots=True)
class ReuseHint:
    """What only the caller knows of when a prompt comes back, for the daemon's ``--eviction density``.

    ``category`` names a kind of traffic in the caller's own words and has at most `MAX_CATEGORY` characters. ``turn``
    is that of the conversation, from 1 to `MAX_TURN`; 0 is unknown. ``tool_call_pending``: the sequence is expected to
    end in a tool call, whose result comes as the next turn. ``expected_return_s`` is the time from now to that turn,
    above 0 and at most `MAX_EXPECTED_RETURN_S`; None is unknown.
    """

    category: str = ""
    turn: int = 0
    tool_call_pending: bool = False
    expected_return_s: float | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """Opens a sequence. It shares the cached complete pages of ``prompt`` under ``salt``.

    ``fill_wait_s`` is for how many seconds the caller can wait for pages that a lower tier holds, 0 to
    `MAX_FILL_WAIT_S`. While they are copied into the pool, the opening is refused with PagesFilling, and changes
    nothing; demand it again after the error's ``retry_after_s``. None: it is never refused for that.
    """

    prompt: Sequence[int]
    salt: str = ""
    retention: Retention | None = None
    reuse_hint: ReuseHint | None = None
    fill_wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """One sequence's report and request in an exchange.

    ``tokens`` are tokens whose K and V are resident as of the last synchronized step, ``tokens[0]`` at position
    ``start``; repeating a report is harmless. ``total_pages`` is a target size. ``known_pages`` is the length of the
    engine's block table. With a ``parent`` instead of an ``opening``, the sequence is forked from that live one: it
    shares the pages of all tokens resident there.

    A demand that opens or forks has no tokens and knows no pages, and never does both: ValueError otherwise.

    A shared last page that holds tokens must not be written (copy on write). A demand whose ``total_pages`` have room
    for more than the resident tokens gets a private page for it, and a copy to make.
    """

    sequence_id: str
    start: int
    tokens: Sequence[int]
    total_pages: int
    known_pages: int
    opening: Opening | None = None
    parent: str = ""

    def __post_init__(self) -> None:
        if not self.opens:
            return
        if self.start or self.tokens or self.known_pages:
            raise ValueError(f"sequence {self.sequence_id!r}: nothing is resident or known before it is opened")
        if self.opening is not None and self.parent:
            raise ValueError(f"sequence {self.sequence_id!r} is opened or forked, not both")

    @classmethod
    def of_prompt(
        cls,
        sequence_id: str,
        prompt: Sequence[int],
        total_pages: int,
        *,
        salt: str = "",
        retention: Retention | None = None,
        reuse_hint: ReuseHint | None = None,
        fill_wait_s: float | None = None,
    ) -> Self:
        """Open a sequence by its prompt. With 0 ``total_pages`` it holds the cached pages and no others."""
        return cls(sequence_id, 0, (), total_pages, 0, Opening(prompt, salt, retention, reuse_hint, fill_wait_s))

    @classmethod
    def of_fork(cls, sequence_id: str, parent: str, total_pages: int = 0) -> Self:
        """Open a sequence that shares the pages of ``parent``, a live one."""
        return cls(sequence_id, 0, (), total_pages, 0, parent=parent)

    @classmethod
    def of_step(cls, sequence_id: str, start: int, tokens: Sequence[int], total_pages: int, known_pages: int) -> Self:
        """Go on with an open sequence: report resident tokens, ask for pages."""
        return cls(sequence_id, start, tokens, total_pages, known_pages)

    @property
    def opens(self) -> bool:
        """Whether a sequence begins with it, by a prompt or as a fork."""
        return self.opening is not None or bool(self.parent)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy page ``source`` to ``target``, which replaces it at ``index`` of the block table."""

    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to one demand. With an ``error``, no part of the demand was carried out.

    ``pages`` extend the block table from ``first_index``. ``cached_tokens``, set when a sequence is opened, counts the
    leading tokens whose K and V are already there: whole pages of a prompt, or all that a fork's parent had. ``copies``
    must be made before anything is written past the resident tokens; they are repeated until such a token is reported.
    """

    sequence_id: str
    first_index: int = 0
    pages: tuple[int, ...] = ()
    cached_tokens: int = 0
    error: ServiceError | None = None
    copies: tuple[PageCopy, ...] = ()
