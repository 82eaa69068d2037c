"""No order of steps lets two processes write one page, or serves a page that is not what its tokens say; and each of
the protections is needed for that.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.protocol.model import Model, Rules, State
from tests.protocol.search import Found, search

#: What the search has to have seen, or it has shown nothing.
STEPS = {
    *(
        "open",
        "ask-for-pages",
        "grant",
        "hear-pages",
        "launch",
        "write-prefix",
        "write-own",
        "use",
        "discard",
        "report",
    ),
    *("publish", "ask-to-remove", "remove", "deadline-passes", "give-up", "ask-to-close", "close", "hear-closed"),
    *("expire", "die", "prove-gone", "evict"),
}
WRITES, READS, FINDS = "writes page", "computed from rubbish", "is found as"


def searched(rules: Rules, pages: int = 3, restarts: int = 0) -> Found[State]:
    """All orders of two engines' steps, with a session each, and one more after a restart."""
    model = Model(rules, pages=pages, sessions=(1, 1), restarts=restarts)
    return search(model.first, model.steps, model.violated)


def test_with_all_protections_nothing_goes_wrong_in_any_order() -> None:
    found = searched(Rules())
    assert not found.violation, str(found)
    assert set(found.taken) == STEPS and found.states > 10_000


#: The protection that is taken away, how many pages it takes to see what that does, and what it does.
NEEDED = [
    ("evidence", 2, WRITES),  # a drain frees: an engine stopped for longer goes on in pages of others
    ("quarantine", 2, WRITES),
    ("proof_after_kill", 2, WRITES),
    ("true_witness", 2, WRITES),
    ("vouch_after_step", 2, WRITES),
    ("release_after_step", 2, WRITES),
    ("publish_after_step", 2, FINDS),
    ("epoch_in_ids", 2, WRITES),
    ("check_after_step", 3, READS),
    ("earlier_deadline", 3, READS),
    ("refuse_living", 2, WRITES),
    ("verify_hits", 3, READS),
]
#: What has to happen for a protection to be needed.
WITH = {"proof_after_kill": "kill", "refuse_living": "operator", "verify_hits": "damage"}


@pytest.mark.parametrize(("protection", "pages", "harm"), NEEDED, ids=[row[0] for row in NEEDED])
def test_without_a_protection_the_search_finds_the_harm(protection: str, pages: int, harm: str) -> None:
    happens = {WITH[protection]: True} if protection in WITH else {}
    rules = dataclasses.replace(Rules(), **{protection: False, **happens})
    found = searched(rules, pages, restarts=protection == "epoch_in_ids")
    assert harm in found.violation, str(found)


def test_to_kill_what_is_silent_does_no_harm() -> None:
    """It takes steps until it is gone, and nothing of it is free before that is proven."""
    found = searched(Rules(kill=True))
    assert not found.violation, str(found)
    assert set(found.taken) == STEPS | {"kill"}


def test_a_kill_that_counts_as_proof_is_found_as_it_would_be() -> None:
    trace = searched(Rules(kill=True, proof_after_kill=False), 2).trace
    assert trace[-3:] == ["expire A1", "kill A1", "free A1"]


def test_every_protection_is_taken_away_once() -> None:
    protections = {field.name for field in dataclasses.fields(Rules) if field.default is True}
    assert protections == {row[0] for row in NEEDED} | {"check_before_step", "hold_expired"}


def test_a_drain_that_frees_is_found_as_it_was() -> None:
    """The engine launches, is not heard of until it is over, and writes what is free by then."""
    trace = searched(dataclasses.replace(Rules(), evidence=False), 2).trace
    assert trace == [
        *("open A", "ask-for-pages A", "grant A1", "hear-pages A", "launch A"),
        *("deadline-passes A", "expire A1", "free A1"),
    ]


def test_safety_does_not_rest_on_the_look_at_the_lease_before_a_step() -> None:
    """It spares work that would be thrown away."""
    found = searched(dataclasses.replace(Rules(), check_before_step=False), 2)
    assert not found.violation, str(found)


def test_an_operator_who_releases_what_is_not_seen_to_live_does_no_harm() -> None:
    """Of a process that cannot be seen it is the caller's guarantee: see ``refuse_living`` for what that is worth."""
    found = searched(Rules(operator=True))
    assert not found.violation, str(found)
    assert set(found.taken) == STEPS | {"release"}


def test_a_damaged_prefix_is_purged_and_not_read() -> None:
    found = searched(Rules(damage=True))
    assert not found.violation, str(found)
    assert set(found.taken) == STEPS | {"damage"}


def test_without_a_look_at_the_checksum_what_was_damaged_is_said() -> None:
    trace = searched(Rules(damage=True, verify_hits=False)).trace
    assert "damage p" in trace and trace[-1].startswith("use")


def test_to_expire_a_sequence_that_runs_spares_what_it_writes_and_what_it_reads() -> None:
    """The engine does not know before its next exchange, and its lease is not over: its results count."""
    found = searched(dataclasses.replace(Rules(), expiry=True))
    assert not found.violation, str(found)
    assert set(found.taken) == STEPS | {"expire-sequence"}


def test_without_holding_what_an_expired_sequence_reads_the_search_finds_the_harm() -> None:
    found = searched(dataclasses.replace(Rules(), expiry=True, hold_expired=False))
    assert READS in found.violation, str(found)
    assert any(step.startswith("expire-sequence") for step in found.trace) and "evict p" in found.trace


def test_a_search_beyond_its_limit_is_none() -> None:
    model = Model(Rules())
    with pytest.raises(MemoryError, match="more than 100 states"):
        search(model.first, model.steps, model.violated, most=100)
