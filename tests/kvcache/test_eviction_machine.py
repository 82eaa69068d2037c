"""Random histories of the state object under each eviction policy: after every call, everything holds.

``check`` finds a page that is indexed without its parent, which is what a policy could break. Its choice is free here,
so there is no model that predicts it; that is in ``test_cache_machine``, for the least recently used. What a history so
short teaches is next to nothing, so the learned policy also runs with values that are mere whims.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.errors import ServiceError
from services.kvcache import density
from services.kvcache.demand import Demand, Grant
from services.kvcache.eviction import POLICIES
from services.kvcache.prefix import ChainHash, blake2b_chain
from services.kvcache.reuse import ReuseModel
from tests.kvcache.fakes import World

PAGES, SIZE = 9, 2

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

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            PAGES, page_size=SIZE, eviction=self.policy, chain_hash=type(self).chain_hash, cache_ttl_s=100.0
        )
        self.session = self.world.attached(pid=1).id
        self.texts: dict[str, list[int]] = {}
        self.count = 0

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.texts)))

    def resident(self, name: str) -> list[int]:
        sequence, _ = self.world.cache.get_sequence(self.session, name)
        return list(sequence.tokens)

    @rule(text=st.sampled_from(TEXTS), length=st.integers(1, 17), pages=st.integers(0, 8))
    def open(self, text: list[int], length: int, pages: int) -> None:
        self.count += 1
        name = f"q{self.count}"
        [grant], _ = self.world.cache.allocate(self.session, [Demand(name, text[:length], "", 0, [], pages, 0)], [])
        if isinstance(grant, Grant):
            self.texts[name] = text

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 12), more=st.integers(0, 3))
    def run(self, data: st.DataObject, count: int, more: int) -> None:
        name = self.some(data)
        sequence, _ = self.world.cache.get_sequence(self.session, name)
        start, room = len(sequence.tokens), len(sequence.pages) * SIZE
        tokens = self.texts[name][start : min(room, start + count)]
        demand = Demand(name, None, "", start, tokens, len(sequence.pages) + more, len(sequence.pages))
        [result], _ = self.world.cache.allocate(self.session, [demand], [])
        assert isinstance(result, Grant | ServiceError)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.count += 1
        name, child = self.some(data), f"q{self.count}"
        self.world.cache.fork(self.session, name, child)
        self.texts[child] = self.texts[name]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = self.some(data)
        del self.texts[name]
        assert self.world.cache.remove(self.session, [name])[0] == [True]

    @rule(most=st.integers(0, PAGES))
    def evict(self, most: int) -> None:
        cached = self.world.cache.pools["pool"].table.cached_count
        assert self.world.cache.evict_pages("pool", most)[0] == min(most, cached)

    @rule(seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds / 10  # the session lives
        self.world.cache.renew_session(self.session)
        pool = self.world.cache.pools["pool"]
        before = self.world.now - seconds
        due = [page for page in pool.table.cached if pool.table.cached.since(page) <= before]
        assert pool.expire_cached(before) == len(due)
        assert [page for page in due if page in pool.table.cached] == []

    @rule()
    def lose(self) -> None:
        """The process is gone, and another one starts."""
        self.world.processes.kill(1)
        self.world.cache.sweep()
        self.session = self.world.attached(pid=1).id
        self.texts.clear()

    @invariant()
    def all_holds(self) -> None:
        self.world.sound()


@pytest.mark.parametrize("chain_hash", [blake2b_chain, colliding])
@pytest.mark.parametrize(("policy", "model"), [*((policy, ReuseModel) for policy in POLICIES), ("density", Whims)])
def test_random_histories(
    policy: str, model: type[ReuseModel], chain_hash: ChainHash, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density, "ReuseModel", model)
    machine = type(
        "Machine",
        (EvictionMachine,),
        {"policy": policy, "chain_hash": staticmethod(chain_hash), "__module__": __name__},
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
