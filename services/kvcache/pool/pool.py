"""One layout's pages: page table, prefix cache and sequences, changed in whole transactions."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from services.common.errors import PositionMismatch
from services.kvcache import slices
from services.kvcache.eviction.policy import make_queue
from services.kvcache.eviction.retaining_queue import RetainingQueue
from services.kvcache.pool.arena import Arena
from services.kvcache.pool.debts import Debts
from services.kvcache.pool.endings import Endings
from services.kvcache.pool.headroom import Headroom
from services.kvcache.pool.host_memory import SALT, HostMemory, pool_bytes, text_bytes
from services.kvcache.pool.index.chain_hash import ChainHash
from services.kvcache.pool.index.events import EventRing
from services.kvcache.pool.index.prefix_cache import PrefixCache
from services.kvcache.pool.layout import Layout
from services.kvcache.pool.lower_tiers import LowerTiers
from services.kvcache.pool.pages.checksums import Checksums
from services.kvcache.pool.pages.page_table import PageTable
from services.kvcache.pool.pages.published import PublishedPages
from services.kvcache.pool.pages.unclean import UncleanPages
from services.kvcache.pool.sequence import Sequence
from services.kvcache.pool.totals import Totals
from services.kvcache.slices import Work


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
        self.headroom = Headroom(self.table, self.memory, self.page_size)
        self.checksums = Checksums(self.table, self.index, wake) if checksums else None
        self.totals = Totals()
        self.published = PublishedPages(self.table, self.index, self.totals)
        #: The live ones, by last access.
        self.sequences: dict[Sequence, None] = {}
        self.endings = Endings(
            self.sequences, self.table, self.index, self.published, self.memory, self.debts, self.page_size
        )
        #: What fills hold, of the tiers below the pool, if there are any.
        self.fills: dict[Sequence, None] = {}
        self.lower: LowerTiers | None = None
        self.last_used = 0.0
        self.owner = ""  # the identity for which it was made
        #: Identities that were refused for want of pages, and until when they count as waiting.
        self.waiting: dict[str, float] = {}

    def adopt(self, lower: LowerTiers) -> None:
        """There are tiers below the pool, from its beginning on."""
        self.lower = self.published.lower = lower

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

    def salt_bytes(self, sequence: Sequence, new: int) -> int:
        """What the prefix cache's index is charged for the salt when the sequence reports ``new`` tokens more."""
        if sequence.published or sequence.chain_broken or len(sequence.tokens) + new < self.page_size:
            return 0
        return SALT + text_bytes(sequence.salt)

    def parts(self) -> list[object]:
        """All arrays, lists and tables that it is made of: of a large pool each takes a while to be freed."""
        owners: list[object] = [self.table, self.index, self.checksums]
        parts = list[object]()
        for owner in owners:  # which grows meanwhile
            for part in vars(owner).values() if hasattr(owner, "__dict__") else ():
                if isinstance(part, array | bytearray | list | dict):
                    parts.append(part)
                elif type(part).__module__.startswith(__package__.rpartition(".")[0]) and part not in owners:
                    owners.append(part)
        return parts

    @property
    def bytes(self) -> int:
        """The price of the pool itself."""
        return pool_bytes(self.table.total, self.page_size)

    def charged(self) -> int:
        """What is charged for the pool without its live sequences, recomputed."""
        apart = self.endings.charged() + self.headroom.promised_bytes
        if self.lower is not None:
            apart += self.lower.charged()
        return self.bytes + self.table.charged() + self.index.charged() + apart

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
        if self.lower is not None:
            self.lower.came_back(matched)
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
        child.retention, child.claim, child.cached_tokens = parent.retention, parent.claim, len(child.tokens)

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
                if self.lower is not None:
                    self.lower.published(sequence.pages[at], parent, chunk, sequence.salt)
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
            self.published.evict(1)
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
