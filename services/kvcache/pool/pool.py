"""One layout's pages: page table, prefix cache and sequences, changed in whole transactions."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from services.common.errors import CapacityExceeded, ExceedsPool, PositionMismatch
from services.kvcache import slices
from services.kvcache.eviction.policy import make_queue
from services.kvcache.eviction.retention import RetainingQueue
from services.kvcache.pool.checksums import Checksums
from services.kvcache.pool.debts import Debts
from services.kvcache.pool.events import EventKind, EventRing
from services.kvcache.pool.host_memory import (
    SALT,
    SHARED,
    HostMemory,
    ending_bytes,
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
from services.kvcache.slices import Work

#: Takes pages that a lost engine may still write. False when it is known by now that it does not: they are free.
Fenced = Callable[[list[int]], bool]


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


class Promised:
    """Pages of a pool, and room in the daemon's own memory for block tables, that a call which was checked takes in
    slices: nobody else is granted them meanwhile. What it has not taken when it ends it gives back.
    """

    def __init__(self, pool: Pool, pages: int, entries: int, shared: int = 0) -> None:
        """``entries`` of block tables, ``shared`` of them of pages that others hold."""
        self._pool = pool
        self._pages = self._bytes = 0
        self._add(pages, entries, shared)

    def take(self, pages: int) -> None:
        """So many pages, with their entries, are taken at once."""
        self._add(-pages, -pages, 0)

    def share(self, pages: int) -> None:
        """So many pages that others hold are shared at once."""
        self._add(0, -pages, -pages)

    def _add(self, pages: int, entries: int, shared: int) -> None:
        memory = entries * self._pool.entry_bytes + shared * SHARED
        self._pages += pages
        self._bytes += memory
        self._pool.promise(pages, memory)

    def __enter__(self) -> Promised:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.promise(-self._pages, -self._bytes)


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
        debts: Debts | None = None,
    ) -> None:
        """``wake`` is called when there is work for ``scrubber``: ``checksums`` to take, or ``zero_pages`` given up.

        ``memory`` is charged for what comes and goes in the pool, the pool itself apart; ``debts`` has what takes long.
        """
        self.memory = HostMemory() if memory is None else memory
        self.debts = Debts() if debts is None else debts
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
        #: Those that have ended and hold pages still, all together ``ending_entries``; and pages that leave quarantine.
        self.ending: dict[Sequence, None] = {}
        self.ending_entries = 0
        self.leaving: list[int] = []
        #: Promised to calls that are under way.
        self.promised_pages = self.promised_bytes = 0
        self.checksums = Checksums(self.table, self.index, wake) if checksums else None
        self.totals = Totals()
        self.last_used = 0.0
        self.owner = ""  # the identity for which it was made

    @property
    def available_pages(self) -> int:
        """Pages that an allocation can get: free or evictable ones that are promised to no other."""
        return self.table.free_count + self.table.cached_count - self.promised_pages

    def match(self, prompt: array[int], salt: str, most: int | None = None, *, behind: Ordered[int] = ()) -> list[int]:
        """The pages of the prompt's longest cached prefix, in whole pages and without its last token. Read-only.

        At most so many of them; those that follow the pages ``behind``, which the caller holds.
        """
        first, end, size = len(behind), (len(prompt) - 1) // self.page_size, self.page_size
        if most is not None:
            end = min(end, first + most)
        width, tokens = prompt.itemsize * size, prompt[first * size : end * size].tobytes()
        chunks = (tokens[at : at + width] for at in range(0, len(tokens), width))
        return self.index.match(salt, chunks, behind[-1] if behind else None)

    def matching(self, prompt: array[int], salt: str) -> Work[tuple[list[int], int]]:
        """As ``match``, in slices, and how many of the pages were cached, with no holder. Pages that were found may
        have been given up since.
        """
        found = self.match(prompt, salt, slices.ENTRIES)
        more, cached = found, self.table.cached_among(found)
        while len(more) == slices.ENTRIES:
            yield None
            if not self.index.is_published(found[-1]):
                break
            more = self.match(prompt, salt, slices.ENTRIES, behind=found)
            cached += self.table.cached_among(more)
            found += more
        return found, cached

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
        ending = ending_bytes(len(self.ending), self.ending_entries)
        return self.bytes + self.table.charged() + self.index.charged() + expired + ending + self.promised_bytes

    def promise(self, pages: int, memory: int) -> None:
        """Promise so many pages more, and bytes of the daemon's own memory, that the caller has checked."""
        self.promised_pages += pages
        self.promised_bytes += memory
        self.memory.used += memory

    def cached_among(self, pages: list[int]) -> int:
        """How many of these pages are cached, with no holder."""
        return self.table.cached_among(pages)

    def open(self, sequence: Sequence, prompt: array[int], matched: list[int]) -> None:
        """Add a new sequence that shares its matched pages."""
        self.sequences[sequence] = None
        self.share(sequence, prompt, matched)

    def count_lookup(self, sequence: Sequence, prompt: array[int]) -> None:
        """A sequence was opened by a prompt."""
        self.totals.lookup_tokens += len(prompt)
        self.totals.hit_tokens += sequence.cached_tokens

    def share(self, sequence: Sequence, prompt: array[int], matched: list[int]) -> None:
        """Have a sequence that begins with cached pages alone share these, the next of its prompt."""
        before = sequence.cached_tokens
        self.table.hold_all(matched, sequence)
        sequence.pages.extend(matched)
        sequence.published += len(matched)
        sequence.cached_tokens += len(matched) * self.page_size
        sequence.tokens.extend(prompt[before : sequence.cached_tokens])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add a new sequence that shares all pages with the parent's resident tokens."""
        self.sequences[child] = None
        self.share_fork(parent, child, self.pages_for(len(parent.tokens)))

    def share_fork(self, parent: Sequence, child: Sequence, end: int) -> None:
        """Have a fork share its parent's pages up to the index ``end``."""
        parent.forked = child.forked = True
        first, size = len(child.pages), self.page_size
        pages = parent.pages[first:end]
        if parent.copy is not None and first <= parent.copy[0] < end:
            # The parent's engine may not have made its copy yet; the source has the resident tokens in any case.
            index, source = parent.copy
            pages[index - first] = source
        for page in pages:
            self.table.hold(page, child)
        child.pages += pages
        child.published, child.chain_broken = min(parent.published, len(child.pages)), parent.chain_broken
        child.tokens.extend(parent.tokens[first * size : end * size])
        child.retention, child.cached_tokens = parent.retention, len(child.tokens)

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

    def end(self, ended: list[Sequence], entries: int, now: float, fenced: Fenced | None = None) -> None:
        """End sequences that hold so many ``entries``: published pages stay cached, the others become free, or are
        ``fenced`` when their engine may still be writing them. Many are given up in slices: those that are not yet are
        held, and owed.
        """
        if entries + len(ended) > slices.ENTRIES:
            self.end_later(ended, entries, fenced)
        elif fenced is None:
            self.release(ended, now)
        else:
            pages = list(chain.from_iterable(self.lose(sequence, now) for sequence in ended))
            if pages and not fenced(pages):
                self.unquarantine(pages)

    def end_later(self, ended: list[Sequence], entries: int, fenced: Fenced | None = None) -> None:
        """As ``end``, of which nothing is done yet but that they are no live sequences any more."""
        live = self.sequences
        for sequence in ended:
            del live[sequence]
            sequence.tokens = array("I")
        self._count_ending(ended, entries)
        self.debts.owe(self._giving_up(ended, fenced))

    def _count_ending(self, ended: list[Sequence], entries: int) -> None:
        self.ending.update(dict.fromkeys(ended))
        self.ending_entries += entries
        self.memory.used += ending_bytes(len(ended), entries)

    def _giving_up(self, ended: list[Sequence], fenced: Fenced | None, *, expired: bool = False) -> Work[None]:
        """Give up what ended sequences hold, a slice at a time, each from its tail. Those that are ``expired`` are
        among these until it is their turn.
        """
        spent, now = 0, (yield None)
        for sequence in ended:
            if spent >= slices.ENTRIES:
                spent, now = 0, (yield None)
            if expired:
                self._leave_expired(sequence)
                self._count_ending([sequence], sequence.page_count)
            cached, retention, table = self.table.cached, sequence.retention, self.table
            promise = retention.promise(now) if retention is not None else None
            if promise is not None:
                # From the head: a page is promised as much as its continuation at every moment.
                for at in range(0, sequence.published, slices.ENTRIES):
                    for page in sequence.pages[at : min(at + slices.ENTRIES, sequence.published)]:
                        primary = self.index.primary_of(page)
                        if table.state(primary) == PageState.HELD:
                            cached.promise(primary, promise)
                    now = yield None
            while sequence.page_count:
                before = sequence.page_count
                if sequence.copy is not None or before > sequence.published:
                    self._give_up_unfinished(sequence, fenced)
                else:
                    cached.pass_time(now)
                    kept = max(0, before - slices.ENTRIES)
                    pages, sequence.pages[kept:] = sequence.pages[kept:], []
                    sequence.published = kept
                    promises = promise is not None or cached.has_promises
                    for page in reversed(pages):
                        if promises:
                            promise = cached.promise(self.index.primary_of(page), promise)
                        self._settle(page, table.drop(page, sequence), now)
                given = before - sequence.page_count
                self.ending_entries -= given
                self.memory.used -= ending_bytes(0, given)
                spent += given
                if spent >= slices.ENTRIES:
                    spent, now = 0, (yield None)
            del self.ending[sequence]
            self.memory.used -= ending_bytes(1, 0)
            spent += 1

    def _give_up_unfinished(self, sequence: Sequence, fenced: Fenced | None) -> None:
        """Some pages from the tail of what an ended sequence has not published."""
        if sequence.copy is not None:
            pages, sequence.copy = [sequence.copy[1]], None
        else:
            kept = max(sequence.published, len(sequence.pages) - slices.ENTRIES)
            pages, sequence.pages[kept:] = sequence.pages[kept:], []
            pages.reverse()
        if fenced is None:
            self.table.give_back(pages, [sequence] * len(pages))
            return
        own = [page for page in pages if self.table.drop(page, sequence)]
        if own and fenced(own):
            for page in own:
                self.table.quarantine(page)
        else:
            for page in own:
                self.table.free(page)

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

    def expire(self, sequence: Sequence) -> None:
        """End a sequence whose engine does not know of it, and may be in a step that reads and writes its pages.

        It holds them, so that nothing that a step reads is evicted, until ``end_expired``; those that it alone holds
        and did not publish can go into quarantine, see ``fence_expired``.
        """
        del self.sequences[sequence]
        self.expired[sequence] = None
        sequence.tokens = array("I")
        self.memory.used += expired_bytes(sequence.salt, sequence.page_count)

    def fence_expired(self, sequence: Sequence, start: int) -> tuple[list[int], int]:
        """Have some of the unpublished pages that an expired sequence alone holds go into quarantine: from an index of
        its block table, of which the next is returned. There are no more when it is the block table's end.
        """
        table, pages, own, at = self.table, sequence.pages, list[int](), max(start, sequence.published)
        for _ in range(min(slices.ENTRIES, len(pages) - at)):
            page = pages[at]
            if table.is_shared(page):
                at += 1
                continue
            pages[at] = pages[-1]
            pages.pop()
            table.drop(page, sequence)
            table.quarantine(page)
            own.append(page)
        before = expired_bytes(sequence.salt, sequence.page_count + len(own))
        self.memory.used -= before - expired_bytes(sequence.salt, sequence.page_count)
        return own, at

    def end_expired(self, ended: list[Sequence], now: float, fenced: Fenced | None = None) -> None:
        """End expired sequences: their engine touches no page any more, or is ``fenced``. As ``end``."""
        most = slices.ENTRIES
        if len(ended) > most or (entries := sum(sequence.page_count for sequence in ended)) + len(ended) > most:
            self.debts.owe(self._giving_up(ended, fenced, expired=True))
            return
        for sequence in ended:
            self._leave_expired(sequence)
            self.sequences[sequence] = None
        self.end(ended, entries, now, fenced)

    def _leave_expired(self, sequence: Sequence) -> None:
        del self.expired[sequence]
        self.memory.used -= expired_bytes(sequence.salt, sequence.page_count)

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
        """Free quarantined pages that nothing can write any more, many of them in slices."""
        if len(pages) > slices.ENTRIES:
            self.leaving += pages
            self.debts.owe(self._leaving_quarantine())
            return
        for page in pages:
            self.table.free(page)

    def _leaving_quarantine(self) -> Work[None]:
        yield None
        while self.leaving:
            pages, self.leaving[-slices.ENTRIES :] = self.leaving[-slices.ENTRIES :], []
            for page in pages:
                self.table.free(page)
            yield None

    def expire_cached(self, before: float, most: int) -> int:
        """Free the unretained pages that were cached at or before a time, at most so many. Returns how many."""
        count = 0
        while (
            count < most and (page := self.table.cached.oldest) is not None and self.table.cached.since(page) <= before
        ):
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
