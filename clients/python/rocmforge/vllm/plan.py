"""What the connector's two halves say to each other: a plan with each of vLLM's steps, and a report of what came of it.

Pure Python: neither vLLM nor the daemon is imported. Tokens are counted from the start of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Opening:
    """Open a sequence of the daemon with these tokens: it holds the cached pages of their prefix."""

    sequence: str
    tokens: Sequence[int]
    salt: str


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the K and V of tokens [start, stop) out of the sequence's pages.

    ``blocks`` are vLLM's, from the one that holds ``start`` on.
    """

    request: str
    sequence: str
    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the K and V of ``tokens``, the first at position ``start``, into pages of the sequence, and publish them.

    ``start`` and the end are multiples of the page size. ``blocks`` are vLLM's, from the one that holds ``start`` on.
    ``number`` names it in the report.
    """

    number: int
    sequence: str
    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]

    @property
    def stop(self) -> int:
        """The end of the tokens."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step asks of the worker. An ``idle`` one computes nothing; with ``waits``, requests wait for answers."""

    openings: list[Opening] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    idle: bool = False
    waits: bool = False

    @property
    def empty(self) -> bool:
        """Whether it asks for nothing."""
        return not (self.openings or self.loads or self.saves or self.endings)


@dataclass(slots=True)
class Report:
    """What happened since the report before.

    - ``session``: counts the sessions so far; 0 while there is none. Sequences of an earlier one are gone.
    - ``opened``: of each sequence that was opened, the tokens that its pages hold; None if it could not be opened.
    - ``saved``: of each save, whether its pages are published. Its blocks are not read any more either way.
    - ``loaded``: the requests whose loads are over, and ``unloaded`` the blocks that they did not fill.
    - ``lost``: sequences that the daemon ended by itself.
    """

    session: int = 0
    opened: dict[str, int | None] = field(default_factory=dict)
    saved: dict[int, bool] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    unloaded: set[int] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.opened or self.saved or self.loaded or self.unloaded or self.lost)
