"""The page source: the only interface between the scheduler and the KV cache.

``exchange`` is called at most once per step, for the whole batch. It does not block: it overlaps with the step on the
device, and its result is collected after the step. There are two sources, tested by one conformance suite:
`daemon.GrpcPageSource` (the daemon's pages) and `local.LocalPageSource` (this process's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one page, ``[layer][k, v][kv_head][slot][head_dim]``; ``dtype`` is a name such as ``f32``."""

    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


#: The upper limits of a `Retention`.
MAX_RETENTION_S, MAX_RETENTION_PRIORITY = 86400.0, 100


@dataclass(frozen=True, slots=True)
class Retention:
    """For ``ttl_s`` seconds after a sequence ends, its complete pages are evicted only after all unretained cached
    pages. Retained pages are evicted in order of rising ``priority``.

    ``ttl_s`` is above 0 and at most `MAX_RETENTION_S`; ``priority`` is 1 to `MAX_RETENTION_PRIORITY`.
    """

    ttl_s: float
    priority: int


@dataclass(frozen=True, slots=True)
class Opening:
    """Opens a sequence. It shares the cached complete pages of ``prompt`` under ``salt``."""

    prompt: Sequence[int]
    salt: str = ""
    retention: Retention | None = None


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


class Exchange(Protocol):
    """An exchange in flight."""

    def result(self) -> list[Grant]:
        """Wait for the grants, one per demand, in order.

        Raises ``SessionExpired`` when all of this engine's pages are lost, and ``KvCacheDown`` when there was no answer
        and the same exchange may be retried.
        """


class PageSource(Protocol):
    """Pages for one engine. Its methods are called on the engine's thread only, its properties read on any."""

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def retains(self) -> bool:
        """Whether an opening may ask for a retention."""

    @property
    def memory(self) -> Any:
        """The pages, ``[page, layer, (k, v), kv_head, slot, head_dim]``, as the backend allocated or mapped them.

        Raises ``SessionExpired`` while there is no session.
        """

    @property
    def epoch(self) -> int:
        """The epoch of the daemon that owns the pages, 0 without a daemon."""

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str]) -> Exchange:
        """Send one batch: ``removed`` sequences are removed first, then ``demands`` are served in order.

        No step in flight may use a removed sequence's pages. Does not block.
        """

    def may_launch(self) -> bool:
        """Whether the lease is certain to last long enough to launch a step on the pages."""

    def reopen(self) -> None:
        """Open a new session after ``SessionExpired``, without any sequences. Raises ``KvCacheDown`` when there is no
        answer.
        """

    def close(self) -> None:
        """Release everything. No step may be in flight."""
