# mypy: disable-error-code="list-item"
"""The same random histories through a server, with four clients whose calls are in flight together.

Each call travels on the next client's connection, so that calls of one session, or of one sequence, race each other.
Checked is what `machine` checks: the cache ran whole transactions, one after the other; applied to the model in that
order each had to be answered as it was; and what a client got, or did not wait for, is the answer of one of them. After
every rule Fsck finds nothing, GetStats says what the model says, and the eviction queue has the model's order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from tests.kvcache.api.wire import Loop, Wire
from tests.kvcache.cache.stateful.intents import (
    ForkSequence,
    Intent,
    LookAt,
    RemoveSequence,
    Report,
    StepTogether,
    anything,
    opens,
    parts,
    removals,
    steps,
    which,
)
from tests.kvcache.cache.stateful.machine import CacheMachine, Unanswered, examples, new_world
from tests.kvcache.cache.stateful.transactions import Answer, Operation


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.close()


of_one = which.flatmap(
    lambda at: st.lists(
        st.one_of(
            st.builds(StepTogether, st.just(at), st.lists(parts, min_size=1, max_size=1), st.just(at), st.none()),
            st.builds(Report, st.just(at), st.integers(1, 5)),
            st.builds(ForkSequence, st.just(at), st.booleans()),
            st.builds(RemoveSequence, st.just(at)),
            st.builds(LookAt, st.just(at)),
        ),
        min_size=2,
        max_size=6,
    )
)


class FourClients(CacheMachine):
    """``failures`` keeps what went wrong: tried again, a race may end otherwise, and hypothesis then tells of that."""

    failures: ClassVar[list[Exception]] = []

    def ask(self, *operations: Operation, give_up: bool = False) -> list[Answer | Unanswered]:
        with self.noted():
            return super().ask(*operations, give_up=give_up)

    @invariant()
    def all_agrees(self) -> None:
        with self.noted():
            super().all_agrees()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures.append(error)
            raise

    @rule(intents=st.lists(anything, min_size=4, max_size=10))
    def race(self, intents: list[Intent]) -> None:
        self.together(intents)

    @rule(intents=of_one)
    def race_for_one_sequence(self, intents: list[Intent]) -> None:
        self.together(intents)

    @rule(intents=st.lists(steps | opens | removals, min_size=1, max_size=3), at=st.integers(0, 5))
    def give_up_and_ask_again(self, intents: list[Intent], at: int) -> None:
        """As an engine does: cancelled or not, the same words again until there is an answer."""
        for intent in intents:
            self.give_up(intent)
        self.ask_again(at)


def test_random_histories_of_four_clients(loop: Loop, tmp_path: Path) -> None:
    class Machine(FourClients):
        make_driver = staticmethod(lambda: Wire(new_world(), loop, tmp_path))

    try:
        run_state_machine_as_test(Machine, settings=examples(20))
    except Exception as error:
        raise error from (FourClients.failures or [None])[0]
