"""How sequences end: what they hold becomes cached, free or quarantined, at once or in slices."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from itertools import chain

from services.kvcache import slices
from services.kvcache.pool.debts import Debts
from services.kvcache.pool.host_memory import HostMemory, all_expired_bytes, ending_bytes, expired_bytes
from services.kvcache.pool.index.prefix_cache import PrefixCache
from services.kvcache.pool.pages.page_table import PageState, PageTable
from services.kvcache.pool.pages.published import PublishedPages
from services.kvcache.pool.sequence import Sequence, entries_of, salts_of
from services.kvcache.slices import Work

#: Takes pages that a lost engine may still write. False when it is known by now that it does not: they are free.
Fenced = Callable[[list[int]], bool]


class Endings:
    """The sequences of one pool that are live no more and hold pages still, and pages that leave quarantine.

    ``expired`` ones hold their pages until their engine, which does not know of it, touches none any more; ``ending``
    ones, and those of ``sessions`` that ended with all that they had, have all together ``entries`` until what they owe
    is paid. All are charged to the daemon's own memory.
    """

    def __init__(
        self,
        live: dict[Sequence, None],
        table: PageTable,
        index: PrefixCache,
        published: PublishedPages,
        memory: HostMemory,
        debts: Debts,
        page_size: int,
    ) -> None:
        """``live`` are the pool's sequences, by last access; ``debts`` has what takes long."""
        self._page_size = page_size
        self.expired: dict[Sequence, None] = {}
        self.ending: dict[Sequence, None] = {}
        #: By id of the session and of the sequence.
        self.sessions: dict[str, dict[str, Sequence]] = {}
        self.entries = 0
        self.leaving: list[int] = []
        self._live = live
        self._table = table
        self._index = index
        self._published = published
        self._memory = memory
        self._debts = debts

    def charged(self) -> int:
        """What is charged for them, recomputed."""
        expired = all_expired_bytes(salts_of(self.expired), entries_of(self.expired))
        count = len(self.ending) + sum(map(len, self.sessions.values()))
        return expired + ending_bytes(count, self.entries, self._page_size)

    def is_ending(self, sequence: Sequence) -> bool:
        """Whether it has ended and owes what it holds."""
        return sequence in self.ending or self._is_of_session(sequence)

    def _is_of_session(self, sequence: Sequence) -> bool:
        return self.sessions.get(sequence.session_id, {}).get(sequence.id) is sequence

    def end(self, ended: list[Sequence], entries: int, now: float, fenced: Fenced | None = None) -> None:
        """End sequences that hold so many ``entries``: published pages stay cached, the others become free, or are
        ``fenced`` when their engine may still be writing them. Many are given up in slices: those that are not yet are
        held, and owed.
        """
        if entries + len(ended) > slices.ENTRIES:
            self.end_later(ended, entries, fenced)
        elif fenced is None:
            self._release(ended, now)
        else:
            pages = list(chain.from_iterable(self._lose(sequence, now) for sequence in ended))
            if pages and not fenced(pages):
                self.unquarantine(pages)

    def end_later(self, ended: list[Sequence], entries: int, fenced: Fenced | None = None) -> None:
        """As ``end``, of which nothing is done yet but that they are no live sequences any more."""
        self._leave_live(ended)
        self._count_ending(ended, entries)
        self._debts.owe(self._giving_up(ended, fenced))

    def end_fill(self, fill: Sequence) -> None:
        """End a fill of lower tiers, which is no live sequence: as ``end_later``."""
        fill.tokens = array("I")
        self._count_ending([fill], fill.page_count)
        self._debts.owe(self._giving_up([fill], None))

    def end_session(
        self, session_id: str, sequences: dict[str, Sequence], entries: int, now: float, fenced: Fenced | None = None
    ) -> None:
        """As ``end``, with all sequences of a session, by id. There may be very many: all of them are taken over in
        one, and what is done to each is done in its slice.
        """
        ended = list(sequences.values())
        if entries + len(ended) <= slices.ENTRIES:
            self.end(ended, entries, now, fenced)
            return
        self._leave_live(ended)
        self.sessions[session_id] = sequences
        self._count(len(ended), entries)
        self._debts.owe(self._giving_up(ended, fenced))

    def _leave_live(self, ended: list[Sequence]) -> None:
        deque(map(self._live.__delitem__, ended), maxlen=0)

    def _count_ending(self, ended: list[Sequence], entries: int) -> None:
        self.ending.update(dict.fromkeys(ended))
        self._count(len(ended), entries)

    def _count(self, ended: int, entries: int) -> None:
        self.entries += entries
        self._memory.used += ending_bytes(ended, entries, self._page_size)

    def _giving_up(self, ended: list[Sequence], fenced: Fenced | None, *, expired: bool = False) -> Work[None]:
        """Give up what ended sequences hold, a slice at a time, each from its tail. Those that are ``expired`` are
        among these until it is their turn.
        """
        settle = self._published.settle
        left = ended[::-1]  # each is freed with its slice, and not all of them in the last one
        del ended
        spent, now, none = 0, (yield None), array("I")  # to one that has ended nobody appends: an array each would show
        while left:
            sequence = left.pop()
            if spent >= slices.ENTRIES:
                spent, now = 0, (yield None)
            if expired:
                self._leave_expired(sequence)
                self._count_ending([sequence], sequence.page_count)
            elif self._is_of_session(sequence):
                del self.sessions[sequence.session_id][sequence.id]
                self.ending[sequence] = None
            sequence.tokens = none
            cached, retention, table = self._table.cached, sequence.retention, self._table
            promise = retention.promise(now) if retention is not None else None
            if promise is not None:
                # From the head: a page is promised as much as its continuation at every moment.
                for at in range(0, sequence.published, slices.ENTRIES):
                    for page in sequence.pages[at : min(at + slices.ENTRIES, sequence.published)]:
                        primary = self._index.primary_of(page)
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
                    claims = sequence.claim is not None or cached.has_claims
                    for page in reversed(pages):
                        if promises:
                            promise = cached.promise(self._index.primary_of(page), promise)
                        if claims:
                            cached.claim(self._index.primary_of(page), sequence.claim)
                        settle(page, table.drop(page, sequence), now)
                given = before - sequence.page_count
                self.entries -= given
                self._memory.used -= ending_bytes(0, given, self._page_size)
                spent += given
                if spent >= slices.ENTRIES:
                    spent, now = 0, (yield None)
            del self.ending[sequence]
            if self.sessions.get(sequence.session_id) == {}:
                del self.sessions[sequence.session_id]
            self._memory.used -= ending_bytes(1, 0, self._page_size)
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
            self._table.give_back(pages, [sequence] * len(pages))
            return
        own = [page for page in pages if self._table.drop(page, sequence)]
        if own and fenced(own):
            for page in own:
                self._table.quarantine(page)
        else:
            for page in own:
                self._table.free(page)

    def _release(self, ended: list[Sequence], now: float) -> None:
        """End sequences whose engine has released their pages: published ones stay cached, the others become free."""
        order = self._live
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
        self._table.give_back(pages, holders)

    def _lose(self, sequence: Sequence, now: float) -> list[int]:
        """End a sequence whose engine may still be writing: published pages stay cached; of the others, those without
        another holder go into quarantine and are returned.
        """
        del self._live[sequence]
        unfinished = [page for page in self._release_published(sequence, now) if self._table.drop(page, sequence)]
        for page in unfinished:
            self._table.quarantine(page)
        return unfinished

    def expire(self, sequence: Sequence) -> None:
        """End a sequence whose engine does not know of it, and may be in a step that reads and writes its pages.

        It holds them, so that nothing that a step reads is evicted, until ``end_expired``; those that it alone holds
        and did not publish can go into quarantine, see ``fence_expired``.
        """
        del self._live[sequence]
        self.expired[sequence] = None
        sequence.tokens = array("I")
        self._memory.used += expired_bytes(sequence.salt, sequence.page_count)

    def fence_expired(self, sequence: Sequence, start: int) -> tuple[list[int], int]:
        """Have some of the unpublished pages that an expired sequence alone holds go into quarantine: from an index of
        its block table, of which the next is returned. There are no more when it is the block table's end.
        """
        table, pages, own, at = self._table, sequence.pages, list[int](), max(start, sequence.published)
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
        self._memory.used -= before - expired_bytes(sequence.salt, sequence.page_count)
        return own, at

    def end_expired(self, ended: list[Sequence], now: float, fenced: Fenced | None = None) -> None:
        """End expired sequences: their engine touches no page any more, or is ``fenced``. As ``end``."""
        most = slices.ENTRIES
        if len(ended) > most or (entries := sum(sequence.page_count for sequence in ended)) + len(ended) > most:
            self._debts.owe(self._giving_up(ended, fenced, expired=True))
            return
        for sequence in ended:
            self._leave_expired(sequence)
            self._live[sequence] = None
        self.end(ended, entries, now, fenced)

    def _leave_expired(self, sequence: Sequence) -> None:
        del self.expired[sequence]
        self._memory.used -= expired_bytes(sequence.salt, sequence.page_count)

    def _release_published(self, sequence: Sequence, now: float) -> list[int]:
        """Release the published pages, tail first, so that a prefix is evicted after its continuations. Returns the
        other pages, tail first as well.

        Each page's link gets the retention promise of the sequence, joined with that of the pages after it. The promise
        is recorded for the page that lookups find for the link, whoever holds it.
        """
        table, settle, published = self._table, self._published.settle, sequence.published
        unfinished = sequence.pages[published:]
        unfinished.reverse()
        if sequence.copy is not None:
            unfinished.insert(0, sequence.copy[1])
            sequence.copy = None
        cached, retention = table.cached, sequence.retention
        cached.pass_time(now)
        promise = retention.promise(now) if retention is not None else None
        promises = promise is not None or cached.has_promises
        claims = sequence.claim is not None or cached.has_claims
        for page in reversed(sequence.pages[:published]):
            if promises:
                promise = cached.promise(self._index.primary_of(page), promise)
            if claims:
                cached.claim(self._index.primary_of(page), sequence.claim)
            settle(page, table.drop(page, sequence), now)
        return unfinished

    def unquarantine(self, pages: list[int]) -> None:
        """Free quarantined pages that nothing can write any more, many of them in slices."""
        if len(pages) > slices.ENTRIES:
            self.leaving += pages
            self._debts.owe(self._leaving_quarantine())
            return
        for page in pages:
            self._table.free(page)

    def _leaving_quarantine(self) -> Work[None]:
        yield None
        while self.leaving:
            pages, self.leaving[-slices.ENTRIES :] = self.leaving[-slices.ENTRIES :], []
            for page in pages:
                self._table.free(page)
            yield None
