"""Where an engine's pages come from: the one seam between the scheduler and the KV cache.

A source is asked at most once a step, for the whole batch, without waiting (``exchange``), while the step runs on the
device; the answer is collected after the step. Two sources exist, and one conformance suite runs over both:
`daemon.GrpcPageSource` (the daemon's) and `local.LocalPageSource` (this process's own).
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


#: The most that a `Retention` asks for.
MAX_RETENTION_S, MAX_RETENTION_PRIORITY = 86400.0, 100


@dataclass(frozen=True, slots=True)
class Retention:
    """For how long after a sequence's end its complete pages stay cached behind others, and how far behind.

    ``ttl_s`` is above 0 and at most `MAX_RETENTION_S`, ``priority`` 1 to `MAX_RETENTION_PRIORITY`.
    """

    ttl_s: float
    priority: int


@dataclass(frozen=True, slots=True)
class Opening:
    """Opens a sequence: its whole cached pages of ``prompt`` under ``salt`` are shared into it."""

    prompt: Sequence[int]
    salt: str = ""
    retention: Retention | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What one sequence tells and asks in one exchange.

    ``tokens`` are those whose K and V are in the pages as of the last synchronised step, ``tokens[0]`` at position
    ``start``; reporting them again is harmless. ``total_pages`` is a target size. ``known_pages`` says how much of the
    block table the engine has. With a ``parent`` instead of an ``opening`` the sequence is opened as a fork of that
    live one: it shares the pages of all that is resident there.

    One that opens or forks has no tokens and no pages to tell of, and does not do both: ValueError otherwise.

    A last page that holds tokens and is shared is nobody's to write. Whoever has room behind what is resident in its
    ``total_pages`` is granted a page of its own instead, and told to copy.
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
    """Page ``source`` is to be copied to ``target``, which then stands at ``index`` of the block table."""

    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to one demand. An ``error`` means that nothing of the demand was done.

    ``pages`` continue the block table at ``first_index``. ``cached_tokens``, told when a sequence is opened, counts the
    leading tokens whose K and V are already there: whole pages of a prompt, or all that the parent of a fork had.
    ``copies`` are to be made before
    anything is written behind the resident tokens; they are told again until such a token is reported.
    """

    sequence_id: str
    first_index: int = 0
    pages: tuple[int, ...] = ()
    cached_tokens: int = 0
    error: ServiceError | None = None
    copies: tuple[PageCopy, ...] = ()


class Exchange(Protocol):
    """An exchange under way."""

    def result(self) -> list[Grant]:
        """Wait for the grants, one for each demand, in order.

        Raises ``SessionExpired`` when every page of this engine is lost, and ``KvCacheDown`` when nobody answered and
        the same exchange may be sent again.
        """


class PageSource(Protocol):
    """Pages for one engine. Used by the engine's thread alone."""

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
        """The pages themselves, ``[page, layer, (k, v), kv_head, slot, head_dim]``, as the backend made or mapped them.

        Raises ``SessionExpired`` while there is no session.
        """

    @property
    def epoch(self) -> int:
        """The daemon's run that the pages belong to, 0 without a daemon."""

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str]) -> Exchange:
        """Send one batch: ``removed`` sequences are let go first, then ``demands`` are served in order.

        Nothing that ran on a removed sequence's pages may still be under way. Does not wait.
        """

    def may_launch(self) -> bool:
        """Whether the lease surely holds long enough to launch a step on the pages."""

    def reopen(self) -> None:
        """Open anew after ``SessionExpired``: every sequence is gone. Raises ``KvCacheDown`` when nobody answers."""

    def close(self) -> None:
        """Give everything back. No step may be under way."""
