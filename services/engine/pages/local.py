"""Pages of this process's own, for an engine without a daemon. Also the reference implementation of a page source."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import (
    CapacityExceeded,
    ExceedsPool,
    FieldInvalid,
    PositionMismatch,
    SequenceMismatch,
    SequenceRemoved,
    SequenceUnknown,
    ServiceError,
)
from services.engine.pages.source import Demand, Exchange, Grant, Opening, PageCopy

#: Removed ids are remembered so that a late demand cannot reopen one. Only the last exchange is ever repeated.
REMEMBERED_REMOVALS = 4096


_Key = tuple[str, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class _Node:
    """A published page in the prefix tree, keyed by salt and tokens below its parent. The root has no page."""

    page: int
    key: _Key
    parent: _Node | None = None
    children: dict[_Key, _Node] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.key[1]


@dataclass(slots=True, eq=False)
class _Held:
    """A live sequence. ``opening`` is its prompt, or the id of the sequence it was forked from. ``path`` has the nodes
    of its complete pages, even where another sequence's copy is the published one. ``copied`` is the source of a
    pending page copy, held until the sequence reports the next token.
    """

    opening: tuple[int, ...] | str
    salt: str
    pages: list[int]
    tokens: list[int]
    path: list[_Node]
    cached_tokens: int = 0
    copied: int | None = None


@dataclass(frozen=True, slots=True)
class _Answered:
    grants: list[Grant]

    def result(self) -> list[Grant]:
        return self.grants


class LocalPageSource:
    """Every page is free, cached (published, no holders, evictable) or held by at least one sequence.

    Used by one thread. The pages are private to this process, so the session never expires.
    """

    def __init__(self, total_pages: int, page_size: int, memory: Any = None) -> None:
        self._total = total_pages
        self._page_size = page_size
        self._memory = memory
        self.reopen()

    def __repr__(self) -> str:
        return (
            f"<LocalPageSource: {len(self._sequences)} sequences, {self.free_pages} free, {self.cached_pages} cached "
            f"of {self._total} pages>"
        )

    @property
    def total_pages(self) -> int:
        """Pages in the pool."""
        return self._total

    @property
    def available_pages(self) -> int:
        """Free and cached pages."""
        return len(self._free) + len(self._cached)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._page_size

    @property
    def retains(self) -> bool:
        """Local pages do not support retention."""
        return False

    @property
    def memory(self) -> Any:
        """The memory given to the constructor."""
        return self._memory

    @property
    def epoch(self) -> int:
        """0: there is no daemon."""
        return 0

    @property
    def free_pages(self) -> int:
        """Pages that hold no data."""
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        """Published pages without holders."""
        return len(self._cached)

    @property
    def live_sequences(self) -> int:
        """Sequences that were opened and not removed."""
        return len(self._sequences)

    def exchange(self, demands: Items[Demand], removed: Items[str]) -> Exchange:
        """Serve one batch immediately."""
        for sequence_id in removed:
            self._remove(sequence_id)
        return _Answered([self._serve(demand) for demand in demands])

    @property
    def silent_since(self) -> None:
        """Always None: the pages are private to this process."""

    def may_launch(self) -> bool:
        """Always true: the pages are private to this process."""
        return True

    def reopen(self) -> None:
        """Start over with an empty pool."""
        self._free = list(range(self._total - 1, -1, -1))
        self._holders = [0] * self._total
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._root = _Node(-1, ("", ()))
        self._nodes: dict[int, _Node] = {}  # by page
        self._sequences: dict[str, _Held] = {}
        self._removed: OrderedDict[str, None] = OrderedDict()

    def close(self) -> None:
        """Drop all sequences and cached pages."""
        self.reopen()

    # --- one demand: check all of it, then commit ---------------------------------------------------------------

    def _serve(self, demand: Demand) -> Grant:
        try:
            held = self._live(demand)
            opens = held is None
            held = held or self._begun(demand)
            new = self._check_tokens(demand, held, opens)
            unshares = demand.total_pages * self._page_size > len(held.tokens) + new and self._shares_tail(held, opens)
            self._check_growth(demand, held, unshares, lets_go=held.copied is not None and new > 0)
        except ServiceError as error:
            return Grant(demand.sequence_id, error=error)
        if opens:
            self._open(demand.sequence_id, held)
        if new and held.copied is not None:
            self._let_go(held.copied)
            held.copied = None
        held.tokens.extend(demand.tokens[len(held.tokens) - demand.start :])
        self._publish(held)
        at = len(held.tokens) // self._page_size
        if unshares:
            held.copied, held.pages[at] = held.pages[at], self._take()
        while len(held.pages) < demand.total_pages:
            held.pages.append(self._take())
        return Grant(
            demand.sequence_id,
            first_index=demand.known_pages,
            pages=tuple(held.pages[demand.known_pages :]),
            cached_tokens=held.cached_tokens,
            copies=() if held.copied is None else (PageCopy(at, held.copied, held.pages[at]),),
        )

    def _live(self, demand: Demand) -> _Held | None:
        held, opening = self._sequences.get(demand.sequence_id), demand.opening
        if held is None:
            return None
        if opening is not None and (held.opening, held.salt) != (tuple(opening.prompt), opening.salt):
            raise SequenceMismatch(f"sequence {demand.sequence_id!r} was opened with a different prompt or salt")
        if demand.parent and held.opening != demand.parent:
            raise SequenceMismatch(f"sequence {demand.sequence_id!r} is not a fork of {demand.parent!r}")
        return held

    def _begun(self, demand: Demand) -> _Held:
        """Returns a new sequence with the cached prefix of its prompt, or with what its parent holds."""
        if demand.sequence_id in self._removed:
            raise SequenceRemoved(f"sequence {demand.sequence_id!r} was removed")
        opening, parent = demand.opening, self._sequences.get(demand.parent)
        if opening is None and not demand.parent:
            raise SequenceUnknown(f"no sequence {demand.sequence_id!r}")
        if opening is not None and opening.retention is not None:
            raise FieldInvalid("local pages do not support retention", field="opening.retention")
        if opening is None and parent is None:
            gone = SequenceRemoved if demand.parent in self._removed else SequenceUnknown
            raise gone(f"no sequence {demand.parent!r}")
        if parent is not None:
            pages = parent.pages[: -(-len(parent.tokens) // self._page_size)]
            if parent.copied is not None:  # the engine may not have made the copy yet
                pages[-1] = parent.copied
            resident = len(parent.tokens)
            return _Held(demand.parent, parent.salt, pages, list(parent.tokens), list(parent.path), resident)
        opening = opening or Opening(())
        path = self._match(opening)
        tokens = [token for node in path for token in node.tokens]
        return _Held(tuple(opening.prompt), opening.salt, [node.page for node in path], tokens, path, len(tokens))

    def _shares_tail(self, held: _Held, forks: bool) -> bool:
        """Whether the page for the next token holds tokens and has another holder. A new fork's always has."""
        index, slot = divmod(len(held.tokens), self._page_size)
        return slot > 0 and (forks or self._holders[held.pages[index]] > 1)

    def _match(self, opening: Opening) -> list[_Node]:
        """Returns the nodes of the prompt's cached complete pages, never the one with its last token."""
        found: list[_Node] = []
        node = self._root
        for start in range(0, len(opening.prompt) - self._page_size, self._page_size):
            child = node.children.get((opening.salt, tuple(opening.prompt[start : start + self._page_size])))
            if child is None:
                break
            found.append(node := child)
        return found

    def _check_tokens(self, demand: Demand, held: _Held, opens: bool) -> int:
        """Check the reported tokens. Returns how many are new."""
        resident, pages, end = held.tokens, len(held.pages), demand.start + len(demand.tokens)
        if demand.start > len(resident) or end > pages * self._page_size:
            raise PositionMismatch(
                f"sequence {demand.sequence_id!r}: tokens {demand.start} to {end} are out of range: "
                f"{len(resident)} are resident, and its {pages} pages hold {pages * self._page_size}"
            )
        known = list(demand.tokens[: len(resident) - demand.start])
        if known != resident[demand.start : demand.start + len(known)]:
            raise PositionMismatch(
                f"sequence {demand.sequence_id!r}: tokens from {demand.start} on differ from the resident ones"
            )
        if end > len(resident) and self._shares_tail(held, opens):
            raise PositionMismatch(f"sequence {demand.sequence_id!r}: its last page is shared and must not be written")
        return max(0, end - len(resident))

    def _check_growth(self, demand: Demand, held: _Held, unshares: bool, *, lets_go: bool) -> None:
        pages = held.pages
        if demand.known_pages > max(len(pages), demand.total_pages):
            raise FieldInvalid(
                f"known_pages is {demand.known_pages}; the sequence has {len(pages)} pages", field="known_pages"
            )
        if demand.total_pages > self._total:
            raise ExceedsPool(
                f"sequence {demand.sequence_id!r} requests {demand.total_pages} pages; the pool has {self._total}"
            )
        spoken_for = sum(page in self._cached for page in pages)
        available = len(self._free) + len(self._cached) - spoken_for
        if lets_go and held.copied is not None and self._holders[held.copied] == 1:
            available += 1
        more = max(0, demand.total_pages - len(pages)) + unshares
        if more > available:
            raise CapacityExceeded(
                f"sequence {demand.sequence_id!r} needs {more} more pages; {available} are free or evictable"
            )

    # --- commits: none of these can fail ------------------------------------------------------------------------

    def _open(self, sequence_id: str, held: _Held) -> None:
        for page in held.pages:
            self._holders[page] += 1
            self._cached.pop(page, None)
        self._sequences[sequence_id] = held

    def _publish(self, held: _Held) -> None:
        """Publish newly complete pages in the tree. A duplicate of a published page stays private."""
        size = self._page_size
        while (at := len(held.path)) < len(held.tokens) // size:
            parent = held.path[-1] if held.path else self._root
            if parent is not self._root and self._nodes.get(parent.page) is not parent:
                return  # the published copy of the previous page was evicted: unreachable
            key = (held.salt, tuple(held.tokens[at * size : (at + 1) * size]))
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = _Node(held.pages[at], key, parent)
                self._nodes[node.page] = node
            held.path.append(node)

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._holders[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._withdraw(self._nodes[page])
        return page

    def _withdraw(self, top: _Node) -> None:
        """Remove a node and its descendants, which become unreachable, from the tree."""
        if top.parent is not None:
            del top.parent.children[top.key]
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            del self._nodes[node.page]
            if node.page in self._cached:
                del self._cached[node.page]
                self._free.append(node.page)

    def _remove(self, sequence_id: str) -> None:
        held = self._sequences.pop(sequence_id, None)
        self._removed[sequence_id] = None
        while len(self._removed) > REMEMBERED_REMOVALS:
            self._removed.popitem(last=False)
        if held is None:
            return
        if held.copied is not None:
            self._let_go(held.copied)
        for page in reversed(held.pages):  # the tail is evicted first, a shared prefix last
            self._let_go(page)

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._nodes:
            self._cached[page] = None
        else:
            self._free.append(page)
