"""A cache with tiers below it, engines that write what they compute, and a mover in the test's hands."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

from services.common.errors import PagesFilling, ServiceError
from services.kvcache.cache.grant import Grant
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.pages.page_table import PageState
from services.kvcache.pool.pool import Pool
from services.kvcache.tiers.digests import chain_digest, root_digest
from services.kvcache.tiers.host.host_tier import Slot
from services.kvcache.tiers.tiers import Tiers, TierSettings
from tests.kvcache.cache.demands import growth, in_columns
from tests.kvcache.fakes import World
from tests.kvcache.tiers.fake_mover import GARBAGE, FakeFiles, FakeMover, Page

SIZE = 2
PAGE_BYTES = SIZE * 2 * 4 * 4
WAIT_S = 1.0


class TierWorld(World):
    """One pool, whose pages are in the mover's memory; ``slots`` of host tier."""

    def __init__(self, pages: int, *, slots: int = 3, outer: bool = True, admits_all: bool = False, **options: Any):
        super().__init__(pages, page_size=SIZE, verify_share=0.0, **options)
        self.mover, self.files, self.woken = FakeMover(), FakeFiles(), 0
        self.settings = TierSettings(
            host_bytes=slots * PAGE_BYTES,
            outer=outer,
            admits_all=admits_all,
            queue=8,
            prefill_tokens_per_s=10.0,  # a page takes 0.2 s: longer than any tier
            key=b"k" * 32,
        )
        self.tiers = self.below(self.settings)
        self.mover.listener = self.tiers
        self.cache.put_below(self.tiers)
        self.names = itertools.count(1)
        self.known: dict[str, tuple[Session, list[int], str]] = {}  # what live sequences will have computed
        self.corrupted: set[Slot] = set()
        self.truths: dict[bytes, Page] = {}  # by digest, however it was computed

    def below(self, settings: TierSettings) -> Tiers:
        cache = self.cache
        return Tiers(settings, self.mover, self.files, cache.memory, cache.events, lambda: self.now, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    @property
    def pool(self) -> Pool:
        [pool] = self.cache.pools
        return pool

    @property
    def arena(self) -> list[Page]:
        return self.mover.memories[self.lower.memory]

    @property
    def lower(self) -> Any:
        return self.pool.lower

    # --- engines ---

    def truth(self, salt: str, tokens: list[int]) -> Page:
        """What a page has whose chain ends with these tokens."""
        page = ((salt, *tokens), "first"), ((salt, *tokens), "second")
        digest = root_digest(self.settings.key, "pool", self.layout, salt)
        for at in range(0, len(tokens), SIZE):
            digest = chain_digest(digest, array("I", tokens[at : at + SIZE]).tobytes())
        self.truths[digest] = page
        return page

    def open(
        self, session: Session, tokens: list[int], salt: str = "", wait_s: float | None = None, name: str = ""
    ) -> Grant | ServiceError:
        """Open a sequence with room for its prompt, and write where nothing is cached, as a step in flight does."""
        name = name or f"q{next(self.names)}"
        pages = -(-len(tokens) // SIZE)
        demand = Opening(name, Prompt(array("I", tokens), salt), pages, wait_s)
        [(_, answer)], _ = self.cache.calls.allocate(session.id, [demand], [])
        if isinstance(answer, Grant):
            self.known[name] = session, list(tokens), salt
            for page, _ in answer.pages[answer.cached_tokens // SIZE :]:
                assert not self.mover_writes(page), f"page {page} is granted, and the mover writes it"
                self.arena[page] = (GARBAGE, GARBAGE)
            cached = [page for page, _ in answer.pages[: answer.cached_tokens // SIZE]]
            self.check_bytes(cached, tokens, salt)
        return answer

    def mover_writes(self, page: int) -> bool:
        writes = [self.mover._target(doing) for doing in self.mover.doing.values()]
        return (self.lower.memory, page) in writes

    def check_bytes(self, pages: list[int], tokens: list[int], salt: str) -> None:
        for at, page in enumerate(pages):
            assert self.arena[page] == self.truth(salt, tokens[: (at + 1) * SIZE]), f"page {page}"

    def compute(self, name: str, count: int) -> None:
        """The engine runs the next tokens of a sequence, and reports them."""
        session, tokens, salt = self.known[name]
        sequence = session.sequences[name]
        start, end = len(sequence.tokens), min(len(sequence.tokens) + count, len(tokens))
        for at in range(start // SIZE, end // SIZE):
            self.arena[sequence.pages[at]] = self.truth(salt, tokens[: (at + 1) * SIZE])
        if end > start:
            step = growth(name, start, tokens[start:end], 0)
            errors = self.cache.calls.append(session.id, in_columns([step], growing=False))
            assert errors == []

    def end(self, name: str) -> None:
        session, _, _ = self.known.pop(name)
        self.cache.calls.remove(session.id, [name])

    def forget_ended(self) -> None:
        """Of what ended with its session, or expired."""
        for name, (session, _, _) in list(self.known.items()):
            if name not in session.sequences:
                del self.known[name]

    # --- the loop ---

    def run_loop(self) -> None:
        for _ in range(1000):
            if not self.tiers.work():
                break
        self.tiers.tick()

    def make_slabs(self) -> None:
        asked, self.files.asked = self.files.asked, []
        for memory, _, slots in asked:
            self.tiers.slabs.made(memory, f"slab-{memory}")
            assert slots > 0

    def settle(self) -> None:
        """Until nothing moves any more."""
        for _ in range(1000):
            self.make_slabs()
            while pages := self.pool.table.zeroing(8):
                self.pool.table.zeroed(pages)
            self.run_loop()
            self.now += 0.01
            self.mover.answer_memories()
            if not self.mover.doing and not self.tiers.is_busy:
                return
            if self.mover.doing:
                self.mover.finish(0)
            while debts := self.cache.debts:
                debts.pay(self.now)
        raise AssertionError(f"{self.mover.doing} and {self.tiers.spills.queued} do not end")

    # --- laws ---

    def lawful(self) -> None:
        self.sound()
        for pool in self.cache.pools:
            table = pool.table
            counts = [table.free_count, table.held_count, table.cached_count, table.quarantined_count]
            assert sum(counts) + table.filling_count == table.total
            if pool.lower is None:
                continue
            for page in pool.index.published():
                assert self.arena[page] == self._truth_of(pool, page), f"page {page} has {self.arena[page]}"
            for page in range(table.total):
                if self.mover_writes(page):
                    assert table.state(page) is PageState.FILLING, f"the mover writes page {page}"
        self._lawful_slots()
        for digest, (chain, value) in self.mover.outer.items():
            right = value == self.truths[digest] or self.tiers.spills.is_spoiled(digest)
            assert chain.digest == digest and right

    def _lawful_slots(self) -> None:
        host = self.tiers.host
        if host is None:
            return
        for slot in set(host.stored()) - self.corrupted:
            assert self.mover.memories[slot.slab.memory][slot.number] == self.truths[slot.digest]
        writes = [self.mover._target(doing) for doing in self.mover.doing.values() if not doing.read]
        used = [target for target in writes if target is not None]
        assert len(set(used)) == len(used), "two jobs write to one place"

    def _truth_of(self, pool: Pool, page: int) -> Page:
        tokens, at, salt = list[int](), page, ""
        while True:
            tokens = [*array("I", pool.index.tokens(at) or b""), *tokens]
            parent = pool.index.parent(at)
            if parent is None:
                salt = pool.index.salt(at) or ""
                break
            at = parent
        return self.truth(salt, tokens)


def is_filling(answer: Grant | ServiceError) -> bool:
    return isinstance(answer, PagesFilling)
