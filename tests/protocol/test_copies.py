"""No order of steps has a sequence read or continue what is not its own, and each protection of a copy is needed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.protocol.copies import Model, Rules, State
from tests.protocol.search import Found, search

STEPS = {"own", "order", "copy", "write", "report", "remove", "take", "fill", "leave"}

#: What is taken away, and the step before the harm.
NEEDED = {"copy_when_shared": "share", "hold_source": "copy", "report_after_copy": "copy"}


def searched(rules: Rules) -> Found[State]:
    model = Model(rules)
    return search(model.first, model.steps, model.violated)


def test_with_all_protections_every_copy_is_of_what_was_shared() -> None:
    found = searched(Rules())
    assert not found.violation, str(found)
    assert set(found.taken) == STEPS and found.states > 100


@pytest.mark.parametrize("protection", NEEDED)
def test_without_a_protection_the_search_finds_the_harm(protection: str) -> None:
    found = searched(dataclasses.replace(Rules(), **{protection: False}))
    assert "writes behind" in found.violation, str(found)
    assert found.trace[-2].startswith(NEEDED[protection]) and found.trace[-1].startswith("write")


def test_every_protection_is_taken_away_once() -> None:
    assert {field.name for field in dataclasses.fields(Rules)} == set(NEEDED)
