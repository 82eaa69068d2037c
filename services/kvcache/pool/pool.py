"""One layout's pages: page table, prefix cache and sequences, changed in whole transactions."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import CapacityExceeded, ExceedsPool, PositionMismatch
from services.kvcache.eviction.policy import make_queue
from services.kvcache.eviction.retention import RetainingQueue
from services.kvcache.pool.checksums import Checksums
from services.kvcache.pool.events import EventKind, EventRing
from services.kvcache.pool.host_memory import (
    SALT,
    SHARED,
    HostMemory,
    entry_bytes,
    expired_bytes,
    pool_bytes,
    text_bytes,
)
from services.kvcache.pool.layout import Layout
from services.kvcache.pool.page_table import PageState, PageTable
from services.kvcache.pool.prefix_cache import ChainHash, PrefixCache
from services.kvcache.pool.sequence import Sequence
from services.kvcache.pool.unclean import UncleanPages


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What an engine needs to open an arena on a GPU: the GPU, by ordinal and PCI bus id, and the IPC handle."""

    ordinal: int
    id: str
    handle: bytes


class Arena(Protocol):
    """The memory of a pool. The server creates it and the pool set closes it; the pool itself only exposes it."""

    @property
    def file_path(self) -> str:
        """The file that engines map; empty for device memory."""

    @property
    def device(self) -> DeviceMemory | None:
        """The GPU and the IPC handle; None for a file."""

    @property
    def size_bytes(self) -> int:
        """The total size: the pages and the canaries after them."""

    def admit(self, owner: str) -> None:
        """Let an identity map the memory: a user of this machine, other than the daemon's, cannot open its files."""

    def canary_offset(self, slot: int) -> int:
        """Byte offset of a canary slot."""

    def write_canary(self, slot: int, canary: bytes) -> None:
        """Write a session's canary and clear its answer."""

    def read_answer(self, slot: int) -> bytes:
        """The answer that the engine wrote after its canary."""

    def checksums(self, pages: list[int]) -> list[int]:
        """A checksum of the bytes of each page, 64 bits at most. May be called on any thread, one at a time.

        Raises GpuError, and ValueError once the arena is closed.
        """

    def zero(self, pages: list[int]) -> None:
        """Set all bytes of these pages to zero. As ``checksums``."""

    def close(self) -> None:
        """Free the memory. No session may be attached. Waits for a call on another thread, which then fails."""


@dataclass(slots=True)
class Totals:
    """Counts since the pool was created."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    granted_pages: int = 0
    published_pages: int = 0
    evicted_pages: int = 0
    evicted_on_request: int = 0  # included in evicted_pages
    expired_pages: int = 0
    refused_demands: int = 0
    withdrawn_pages: int = 0  # corrupted pages, and those cached behind them


class Pool:
    """Pages of one layout and one trust domain.

    Every public method is atomic: it validates first and raises without changing anything, or commits in full. A commit
    cannot fail.
    """

    def __init__(
        self,
        pool_id: str,
        layout: Layout,
        total_pages: int,
        arena: Arena,
        chain_hash: ChainHash,
        events: EventRing,
        eviction: str,
        retained_share: float,
        wake: Callable[[], None] = lambda: None,
        *,
        checksums: bool = True,
        zero_pages: bool = False,
        memory: HostMemory | None = None,
    ) -> None:
        """``wake`` is called when there is work for ``scrubber``: ``checksums`` to take, or ``zero_pages`` given up.

        ``memory`` is charged for what comes and goes in the pool, the pool itself apart.
        """
        self.memory = HostMemory() if memory is None else memory
        self.entry_bytes = entry_bytes(layout.page_size)
        self.id = pool_id
        self.layout = layout
        self.page_size = layout.page_size
        self.arena = arena
        self.index = PrefixCache(
            total_pages, chain_hash, lambda kind, link: events.add(pool_id, kind, link), self.memory
        )
        policy = make_queue(eviction, total_pages, self.index)
        # Rounded first, so that a share of 0.29 of 100 pages is 29.
        retained = int(round(total_pages * retained_share, 6))
        unclean = UncleanPages(wake) if zero_pages else None
        self.table = PageTable(total_pages, RetainingQueue(policy, self.index, retained), unclean, self.memory)
        self.sequences: dict[Sequence, None] = {}
        self.expired: dict[Sequence, None] = {}
        self.checksums = Checksums(self.table, self.index, wake) if checksums else None
        self.totals = Totals()
        self.last_used = 0.0
        self.owner = ""  # the identity for which it was made

    @property
    def available_pages(self) -> int:
        """Pages that an allocation can get: free or evictable ones."""
        return self.table.free_count + self.table.cached_count

    def match(self, prompt: array[int], salt: str) -> list[int]:
        """The pages of the prompt's longest cached prefix, in whole pages and without its last token. Read-only."""
        tokens, width = prompt.tobytes(), prompt.itemsize * self.page_size
        whole = (len(prompt) - 1) // self.page_size
        return self.index.match(salt, (tokens[at : at + width] for at in range(0, whole * width, width)))

    def check_tokens(self, sequence: Sequence, start: int, tokens: array[int]) -> array[int]:
        """Validate ``tokens`` at position ``start``. Returns those that are not recorded yet.

        Raises PositionMismatch.
        """
        recorded = sequence.tokens
        resident, end = len(recorded), start + len(tokens)
        if start > resident:
            raise PositionMismatch(
                f"sequence {sequence.id!r}: start is {start}, but only {resident} tokens are resident: a gap",
                resident_tokens=resident,
            )
        capacity = len(sequence.pages) * self.page_size
        if end > capacity:
            raise PositionMismatch(
                f"sequence {sequence.id!r}: tokens end at {end}, but its pages hold {capacity}",
                capacity_tokens=capacity,
            )
        if sequence.forked and end > resident and self.tail_is_shared(sequence):
            raise PositionMismatch(
                f"sequence {sequence.id!r}: its last page is shared; request total_pages to get a copy to write to",
                resident_tokens=resident,
            )
        if start == resident:
            return tokens
        known = tokens[: resident - start]
        if known != recorded[start : start + len(known)]:
            raise PositionMismatch(
                f"sequence {sequence.id!r}: tokens from {start} differ from those recorded", resident_tokens=resident
            )
        return tokens[resident - start :]

    def check_growth(self, sequence_id: str, total_pages: int, more: int, *, spoken_for: int = 0) -> None:
        """Check that a sequence can get ``more`` pages, to reach ``total_pages``.

        ``spoken_for`` counts cached pages that it has matched, which are not evictable for it. Raises ExceedsPool or
        CapacityExceeded.
        """
        table = self.table
        if total_pages > table.total:
            raise ExceedsPool(
                f"sequence {sequence_id!r}: total_pages is {total_pages}, but the pool has {table.total}",
                field="total_pages",
                total_pages=table.total,
            )
        available = self.available_pages - spoken_for
        if more > available:
            raise CapacityExceeded(
                f"sequence {sequence_id!r} needs {more} more pages, but {available} are free or evictable: "
                f"of {table.total}, {table.free_count} free, {table.cached_count} cached, {table.held_count} held, "
                f"{table.quarantined_count} quarantined",
                needed_pages=more,
                free_pages=table.free_count,
                cached_pages=table.cached_count,
                held_pages=table.held_count,
                quarantined_pages=table.quarantined_count,
                total_pages=table.total,
            )

    def check_memory(self, sequence: str, entries: int, more: int = 0, *, shared: int = 0) -> None:
        """Whether the daemon's own memory has room for so many entries in a block table, ``shared`` of them of pages
        that others hold, and ``more`` bytes. Raises HostMemoryExceeded.
        """
        wanted = entries * self.entry_bytes + shared * SHARED + more
        self.memory.check(wanted, f"sequence {sequence!r}")

    def salt_bytes(self, sequence: Sequence, new: int) -> int:
        """What the prefix cache's index is charged for the salt when the sequence reports ``new`` tokens more."""
        if sequence.published or sequence.chain_broken or len(sequence.tokens) + new < self.page_size:
            return 0
        return SALT + text_bytes(sequence.salt)

    @property
    def bytes(self) -> int:
        """The price of the pool itself."""
        return pool_bytes(self.table.total, self.page_size)

    def charged(self) -> int:
        """What is charged for the pool, those of its sequences apart that are live, summed up anew."""
        expired = sum(expired_bytes(sequence.salt, sequence.page_count) for sequence in self.expired)
        return self.bytes + self.table.charged() + self.index.charged() + expired

    def cached_among(self, pages: list[int]) -> int:
        """How many of these pages are cached, with no holder."""
        return self.table.cached_among(pages)

    def open(self, sequence: Sequence, prompt: array[int], matched: list[int]) -> None:
        """Add a new sequence that shares its matched pages."""
        self.sequences[sequence] = None
        self.table.hold_all(matched, sequence)
        sequence.pages.extend(matched)
        sequence.published = len(matched)
        sequence.cached_tokens = len(matched) * self.page_size
        sequence.tokens.extend(prompt[: sequence.cached_tokens])
        self.totals.lookup_tokens += len(prompt)
        self.totals.hit_tokens += sequence.cached_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add a new sequence that shares all pages with the parent's resident tokens."""
        self.sequences[child] = None
        parent.forked = child.forked = True
        child.pages.extend(parent.pages[: self.pages_for(len(parent.tokens))])
        if parent.copy is not None:
            # The parent's engine may not have made its copy yet; the source has the resident tokens in any case.
            index, source = parent.copy
            child.pages[index] = source
        for page in child.pages:
            self.table.hold(page, child)
        child.published, child.chain_broken = parent.published, parent.chain_broken
        child.retention, child.cached_tokens = parent.retention, len(parent.tokens)
        child.tokens.extend(parent.tokens)

    def tail_is_shared(self, sequence: Sequence) -> bool:
        """Whether the page for the next token is partly filled and has other holders."""
        if not sequence.forked:
            return False
        index, slot = divmod(len(sequence.tokens), self.page_size)
        return slot > 0 and self.table.is_shared(sequence.pages[index])

    def unshare_tail(self, sequence: Sequence) -> None:
        """Replace the sequence's shared tail page by one of its own (copy on write); the caller has checked capacity.

        The sequence keeps holding the shared page, the source of a copy that its engine has yet to make: nothing may
        overwrite it before then. The copy is done when the engine reports a token in the new page.
        """
        index = len(sequence.tokens) // self.page_size
        sequence.copy = (index, sequence.pages[index])
        sequence.pages[index] = self._take(sequence)

    def append(self, sequence: Sequence, new: array[int]) -> None:
        """Record the tokens that ``check_tokens`` returned, at least one, and publish the pages that they complete."""
        if sequence.copy is not None and (source := self._let_go_of_copy(sequence)) is not None:
            self.table.free(source)
        tokens, size = sequence.tokens, self.page_size
        tokens.extend(new)
        complete = len(tokens) // size
        while sequence.published < complete and not sequence.chain_broken:
            at = sequence.published
            parent = sequence.pages[at - 1] if at else None
            chunk = tokens[at * size : (at + 1) * size].tobytes()
            if self.index.publish(sequence.pages[at], parent, chunk, sequence.salt):
                sequence.published += 1
                self.totals.published_pages += 1
                if self.checksums is not None:
                    self.checksums.published(sequence.pages[at])
            else:
                sequence.chain_broken = True

    def append_within_page(
        self, sequence: Sequence, start: int, column: array[int], first: int, end: int, now: float
    ) -> bool:
        """Fast path for ``check_tokens``, ``append`` and ``touch`` of ``column[first:end]``.

        Applies if the tokens directly follow the recorded ones and stay within a page that the sequence does not share,
        without filling it: nearly every sequence of a decode step. Otherwise returns False and changes nothing.
        """
        tokens, count, size = sequence.tokens, end - first, self.page_size
        page = start // size
        if start != len(tokens) or (start + count) // size != page or page >= len(sequence.pages) or sequence.forked:
            return False
        if count == 1:
            tokens.append(column[first])
        else:
            tokens.extend(column[first:end])
        # Inlined `touch`: for a large batch this is the whole cost, and another call or slice would show.
        sequence.last_access = now
        sequence.access_count += 1
        order = self.sequences
        del order[sequence]
        order[sequence] = None
        return True

    def grow(self, sequence: Sequence, total_pages: int) -> None:
        """Grow a sequence to ``total_pages``, which the caller has checked: free pages first, then evicted ones."""
        while len(sequence.pages) < total_pages:
            sequence.pages.append(self._take(sequence))

    def _take(self, sequence: Sequence) -> int:
        if not self.table.free_count:
            self.evict(1)
        self.totals.granted_pages += 1
        return self.table.take(sequence)

    def _let_go_of_copy(self, sequence: Sequence) -> int | None:
        """Drop the source of the sequence's copy. Returns it if it has no holder left; the caller then places it."""
        if sequence.copy is None:
            return None
        _, source = sequence.copy
        sequence.copy = None
        return source if self.table.drop(source, sequence) else None

    def touch(self, sequence: Sequence, now: float) -> None:
        """Count an access and keep ``sequences`` ordered by last access."""
        sequence.last_access = now
        sequence.access_count += 1
        del self.sequences[sequence]
        self.sequences[sequence] = None

    def pages_for(self, tokens: int) -> int:
        """The number of pages needed for ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def references(self, pages: list[int]) -> list[tuple[int, int]]:
        """Ids and generations of pages."""
        return list(zip(pages, self.table.generations(pages), strict=True))

    def reference(self, page: int) -> tuple[int, int]:
        """A page's id and generation."""
        return page, self.table.generation(page)

    def release(self, ended: list[Sequence], now: float) -> None:
        """End sequences whose engine has released their pages: published ones stay cached, the others become free."""
        order = self.sequences
        pages: list[int] = []
        holders: list[Sequence] = []
        for sequence in ended:
            del order[sequence]
            if sequence.published or sequence.copy is not None:
                unfinished = self._release_published(sequence, now)
            else:
                unfinished = sequence.pages[::-1]
            pages += unfinished
            holders += [sequence] * len(unfinished)
        self.table.give_back(pages, holders)

    def lose(self, sequence: Sequence, now: float) -> list[int]:
        """End a sequence whose engine may still be writing: published pages stay cached; of the others, those without
        another holder go into quarantine and are returned.
        """
        del self.sequences[sequence]
        unfinished = [page for page in self._release_published(sequence, now) if self.table.drop(page, sequence)]
        for page in unfinished:
            self.table.quarantine(page)
        return unfinished

    def expire(self, sequence: Sequence) -> list[int]:
        """End a sequence whose engine does not know of it, and may be in a step that reads and writes its pages.

        The unpublished pages that it alone holds go into quarantine and are returned. It holds the others, so that
        nothing that a step reads is evicted, until `release_expired` or `lose_expired`.
        """
        del self.sequences[sequence]
        self.expired[sequence] = None
        own = [page for page in sequence.pages[sequence.published :] if not self.table.is_shared(page)]
        own.reverse()
        for page in own:
            self.table.drop(page, sequence)
            self.table.quarantine(page)
        left = set(own)
        sequence.pages = [page for page in sequence.pages if page not in left]
        sequence.tokens = array("I")
        self.memory.used += expired_bytes(sequence.salt, sequence.page_count)
        return own

    def release_expired(self, sequence: Sequence, now: float) -> None:
        """Its engine touches no page of an expired sequence any more: as ``release``, of what it holds still."""
        self._end_expired(sequence)
        self.release([sequence], now)

    def lose_expired(self, sequence: Sequence, now: float) -> list[int]:
        """The session of an expired sequence is lost: as ``lose``, of what it holds still."""
        self._end_expired(sequence)
        return self.lose(sequence, now)

    def _end_expired(self, sequence: Sequence) -> None:
        del self.expired[sequence]
        self.memory.used -= expired_bytes(sequence.salt, sequence.page_count)
        self.sequences[sequence] = None

    def _release_published(self, sequence: Sequence, now: float) -> list[int]:
        """Release the published pages, tail first, so that a prefix is evicted after its continuations. Returns the
        other pages, tail first as well.

        Each page's link gets the retention promise of the sequence, joined with that of the pages after it. The promise
        is recorded for the page that lookups find for the link, whoever holds it.
        """
        table, published = self.table, sequence.published
        unfinished = sequence.pages[published:]
        unfinished.reverse()
        if sequence.copy is not None:
            unfinished.insert(0, sequence.copy[1])
            sequence.copy = None
        cached, retention = table.cached, sequence.retention
        cached.pass_time(now)
        promise = retention.promise(now) if retention is not None else None
        promises = promise is not None or cached.has_promises
        for page in reversed(sequence.pages[:published]):
            if promises:
                promise = cached.promise(self.index.primary_of(page), promise)
            self._settle(page, table.drop(page, sequence), now)
        return unfinished

    def _settle(self, page: int, unheld: bool, now: float) -> None:
        """Decide where a published page goes that has lost a holder; ``unheld`` if that was its last."""
        if self.index.is_primary(page):
            if unheld:
                self.table.cache(page, now)
            return
        # A stand-by is worthless once its holder leaves. Its link was in use until now, so the primary counts as just
        # used: it must outlive the continuations that have just been cached.
        primary = self.index.primary_of(page)
        if self.table.state(primary) == PageState.CACHED:
            self.table.cached.touch(primary, now)
        if unheld:
            self.index.withdraw(page)
            self.table.free(page)

    def unquarantine(self, pages: list[int]) -> None:
        """Free quarantined pages that nothing can write any more."""
        for page in pages:
            self.table.free(page)

    def expire_cached(self, before: float) -> int:
        """Free the unretained pages that were cached at or before a time. Returns how many."""
        count = 0
        while (page := self.table.cached.oldest) is not None and self.table.cached.since(page) <= before:
            self._uncache(page, EventKind.EXPIRED)
            count += 1
        self.totals.expired_pages += count
        return count

    def evict(self, most: int, *, retained: bool = True) -> int:
        """Evict at most ``most`` cached pages, in the policy's order. Returns how many.

        Retained pages go last, or not at all without ``retained``.
        """
        count = 0
        while count < most and (page := self.table.cached.victim(retained=retained)) is not None:
            self._uncache(page, EventKind.EVICTED)
            count += 1
        self.totals.evicted_pages += count
        return count

    def withdraw(self, page: int) -> None:
        """Take a published page out of the prefix cache; all that was published behind it is out already.

        Whoever holds it goes on with it, publishes nothing more, and gives it back in the end as an unfinished page.
        """
        if self.table.state(page) == PageState.CACHED:
            self._uncache(page, EventKind.EVICTED)
            return
        for holder in self.table.holders(page):
            if isinstance(holder, Sequence):
                pages, count = holder.pages, holder.published
                if page in pages[count - 1 : count]:  # nearly always, and a search is long
                    holder.published = count - 1
                elif page in pages[:count]:
                    holder.published = pages.index(page)
                holder.chain_broken = True
        self.table.cached.forget(page)
        self.index.withdraw(page)

    def _uncache(self, page: int, kind: EventKind) -> None:
        heir = self.index.withdraw(page, kind)
        if heir is not None:  # lookups now find a stand-by: the promise belongs to the link and moves with it
            self.table.cached.promise(heir, self.table.cached.promised(page))
        self.table.free(page)
