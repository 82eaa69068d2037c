"""Random histories of the state object under each eviction policy: after every call, everything holds.

``check`` finds a page that is indexed without its parent, which is what a policy could break. Its choice is free here,
so there is no model that predicts it; that is in ``test_cache_machine``, for the least recently used. What a history so
short teaches is next to nothing, so the learned policy also runs with values that are mere whims.

What is retained is predicted for every policy, from what the sequences asked for when they ended. Where the whole pool
may be retained that is exact; with less room, nothing else is retained, and what is evicted for want of pages is lower
than what stays.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.common.errors import ServiceError
from services.kvcache.cache.grant import Grant
from services.kvcache.eviction import density
from services.kvcache.eviction.hints import ReuseHint
from services.kvcache.eviction.policy import POLICIES
from services.kvcache.eviction.retention import Promise, Retention
from services.kvcache.eviction.reuse import ReuseModel
from services.kvcache.pool.index.chain_hash import ChainHash, blake2b_chain
from tests.kvcache.cache.demands import Demand, fork, grouped, growth, opening
from tests.kvcache.fakes import World

PAGES, SIZE = 9, 2

RETENTIONS = [Retention(3.0, 2), Retention(3.0, 7), Retention(8.0, 2), Retention(8.0, 7), Retention(500.0, 1)]

HINTS = [ReuseHint("a", 1), ReuseHint("a", 2, True), ReuseHint("a", 2, True, 30.0), ReuseHint("b"), ReuseHint()]

#: Prompts are prefixes of these, so that sequences meet, part, and compute the same prefix at the same time.
TEXTS = [[0] * 40, [0] * 4 + [1] * 36, [0, 0, 1, 1] * 10, [2] * 40]


def colliding(parent: int, tokens: bytes) -> int:
    """Three hashes for everything, at both ends of what is sampled."""
    return blake2b_chain(parent, tokens) % 3 * 0x7FFFFFFF


class Whims(ReuseModel):
    """Values without rhyme or reason: whatever is learned, what must hold holds."""

    def value(self, level: int, age: int) -> float:
        return blake2b_chain(level, age.to_bytes(8, "little")) / 2**64


class EvictionMachine(RuleBasedStateMachine):
    policy = "lru"
    chain_hash: ChainHash = staticmethod(blake2b_chain)
    retained_share = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            PAGES,
            page_size=SIZE,
            eviction=self.policy,
            chain_hash=type(self).chain_hash,
            cache_ttl_s=100.0,
            retained_share=self.retained_share,
        )
        self.session = self.world.attached(pid=1).id
        self.pool = self.world.cache.pools["pool"]
        self.texts: dict[str, list[int]] = {}
        self.retentions: dict[str, Retention | None] = {}
        self.promises: dict[tuple[int, ...], Promise] = {}  # by all tokens up to the page's last
        self.count = 0

    # --- what is promised ---

    def prefix(self, page: int) -> tuple[int, ...]:
        """All tokens up to a published page's last."""
        parent = self.pool.index.parent(page)
        before = () if parent is None else self.prefix(parent)
        return before + tuple(array("I", self.pool.index.tokens(page) or b""))

    def ended(self, name: str) -> None:
        """Before a sequence is removed: all of its complete pages get the retention it requested."""
        sequence, _ = self.world.cache.calls.get_sequence(self.session, name)
        retention = self.retentions.pop(name)
        if retention is None:
            return
        for end in range(1, sequence.published + 1):
            prefix = tuple(sequence.tokens[: end * SIZE])
            mine, other = Promise(retention.priority, self.world.now + retention.ttl_s), self.promises.get(prefix)
            if other is not None and other.until > self.world.now:
                mine = Promise(max(mine.priority, other.priority), max(mine.until, other.until))
            self.promises[prefix] = mine

    def ranks(self) -> dict[int, Promise]:
        """What every retained page is promised."""
        promised = {page: self.pool.table.cached.promised(page) for page in self.retained()}
        return {page: promise for page, promise in promised.items() if promise is not None}

    def retained(self) -> list[int]:
        """In the order in which they would go, after all others."""
        cached = list(self.pool.table.cached)
        return cached[len(cached) - self.pool.table.cached.retained_count :]

    def allocate(self, demand: Demand) -> Grant | ServiceError | None:
        """No retained page goes while another one could, and none before one that is promised less."""
        table, ranks = self.pool.table, self.ranks()
        generations = {page: table.generation(page) for page in ranks}
        told, _ = self.world.cache.calls.allocate(self.session, grouped([demand]), [])
        gone = [page for page in ranks if table.generation(page) != generations[page]]
        if gone:
            assert len(table.cached) == table.cached.retained_count, "a retained page went before others"
            assert all(min(self.ranks().values(), default=ranks[page]) >= ranks[page] for page in gone)
        return told[0][1] if told else None

    # --- rules ---

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.texts)))

    def resident(self, name: str) -> list[int]:
        sequence, _ = self.world.cache.calls.get_sequence(self.session, name)
        return list(sequence.tokens)

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 17),
        pages=st.integers(0, 8),
        retention=st.sampled_from([None, *RETENTIONS]),
        hint=st.sampled_from([None, *HINTS]),
    )
    def open(
        self, text: list[int], length: int, pages: int, retention: Retention | None, hint: ReuseHint | None
    ) -> None:
        self.count += 1
        name = f"q{self.count}"
        grant = self.allocate(opening(name, text[:length], pages, retention=retention, reuse_hint=hint))
        if isinstance(grant, Grant):
            self.texts[name], self.retentions[name] = text, retention

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 12), more=st.integers(0, 3))
    def run(self, data: st.DataObject, count: int, more: int) -> None:
        name = self.some(data)
        sequence, _ = self.world.cache.calls.get_sequence(self.session, name)
        start, room = len(sequence.tokens), len(sequence.pages) * SIZE
        tokens = self.texts[name][start : min(room, start + count)]
        self.allocate(growth(name, start, tokens, len(sequence.pages) + more, len(sequence.pages)))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.count += 1
        name, child = self.some(data), f"q{self.count}"
        assert isinstance(self.allocate(fork(child, name)), Grant)
        self.texts[child], self.retentions[child] = self.texts[name], self.retentions[name]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.ended(name)
        del self.texts[name]
        assert self.world.cache.calls.remove(self.session, [name])[0] == [True]

    @rule(most=st.integers(0, PAGES), retained=st.booleans())
    def evict(self, most: int, retained: bool) -> None:
        cached, before = self.pool.table.cached, self.retained()
        count = min(most, len(cached) if retained else len(cached) - len(before))
        going = max(0, count - (len(cached) - len(before)))
        left = (count, len(before) - going)
        assert self.world.cache.evict_pages("pool", most, retained=retained) == left
        assert self.retained() == before[going:]

    @rule(seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds / 10  # the session lives
        self.world.cache.renew_session(self.session)
        cached, before = self.pool.table.cached, self.world.now - seconds
        retained = self.retained()
        due = [page for page in cached if page not in retained and cached.since(page) <= before]
        assert self.pool.published.expire(before, self.pool.table.total) == len(due)
        assert [page for page in due if page in cached] == []
        assert self.retained() == retained

    @rule()
    def lose(self) -> None:
        """The process is gone, and another one starts."""
        for name in list(self.texts):
            self.ended(name)
        self.world.processes.kill(1)
        self.world.cache.sweep()
        self.session = self.world.attached(pid=1).id
        self.texts.clear()

    @invariant()
    def all_holds(self) -> None:
        self.world.sound()

    @invariant()
    def what_is_promised_is_retained(self) -> None:
        found = {self.prefix(page): page for page in self.pool.index.published() if self.pool.index.is_primary(page)}
        self.promises = {prefix: promise for prefix, promise in self.promises.items() if prefix in found}
        now, cached = self.world.now, self.pool.table.cached
        expected = {found[prefix]: promise for prefix, promise in self.promises.items() if promise.until > now}
        expected = {page: promise for page, promise in expected.items() if page in cached}
        ranks = self.ranks()
        if self.retained_share == 1.0:
            assert ranks == expected
        else:
            assert len(ranks) <= PAGES * self.retained_share
            assert all(expected[page].joined(promise) == expected[page] for page, promise in ranks.items())


@pytest.mark.parametrize(
    ("chain_hash", "retained_share"), [(blake2b_chain, 1.0), (colliding, 1.0), (blake2b_chain, 1 / 3)]
)
@pytest.mark.parametrize(("policy", "model"), [*((policy, ReuseModel) for policy in POLICIES), ("density", Whims)])
def test_random_histories(
    policy: str,
    model: type[ReuseModel],
    chain_hash: ChainHash,
    retained_share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(density, "ReuseModel", model)
    settled = {"policy": policy, "chain_hash": staticmethod(chain_hash), "retained_share": retained_share}
    machine = type("Machine", (EvictionMachine,), {**settled, "__module__": __name__})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
