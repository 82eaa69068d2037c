# mypy: disable-error-code="arg-type"
"""Copy on write: what is shared is never written, and what is to be copied is kept until it was."""

from __future__ import annotations

import pytest

from services.common.errors import (
    CapacityExceeded,
    PositionMismatch,
    QuotaExceeded,
    SequenceMismatch,
)
from services.kvcache.cache.grant import Copy, Grant
from services.kvcache.lease import sessions
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.pages.page_table import PageState
from services.kvcache.pool.pool import Pool
from tests.kvcache.cache.demands import fork, grouped, growth, opening
from tests.kvcache.cache.test_cache import pages, run, serve
from tests.kvcache.fakes import World


def forked(total: int = 10, **limits: object) -> tuple[World, Session, Pool]:
    """Parent "a" with 6 tokens in pages 0 and 1 (of 4 tokens each), and its fork "b"."""
    world = World(total)
    session = world.attached(**limits)
    run(world, session, "a", [1, 2, 3, 4, 5, 6], 2)
    serve(world, session, fork("b", "a"))
    return world, session, world.cache.pool_of(session)


def copies(world: World, session: Session, name: str) -> list[Copy]:
    return serve(world, session, growth(name, 6, [], 2, known=2)).copies


def test_the_first_to_grow_copies_and_the_other_keeps_the_page() -> None:
    world, session, pool = forked()
    assert copies(world, session, "b") == [Copy(1, (1, 0), (2, 0))]
    assert pool.table.holder_count(1) == 2, "kept as the source until the copy is made"
    serve(world, session, growth("b", 6, [7], 2, known=2))
    assert pool.table.holder_count(1) == 1
    assert copies(world, session, "a") == [], "now the parent's alone"
    serve(world, session, growth("a", 6, [8], 2, known=2))
    assert list(world.cache.calls.get_sequence(session.id, "a")[0].tokens)[-1] == 8
    assert list(world.cache.calls.get_sequence(session.id, "b")[0].tokens)[-1] == 7


def test_nobody_writes_into_a_shared_page() -> None:
    world, session, _ = forked()
    for name in ("a", "b"):
        with pytest.raises(PositionMismatch, match="shared"):
            serve(world, session, growth(name, 6, [7], 0, known=2))
    copies(world, session, "b")
    with pytest.raises(PositionMismatch, match="shared"):
        serve(world, session, growth("a", 6, [7], 0, known=2))


def test_the_source_outlives_the_parent_until_the_copy_is_made() -> None:
    world, session, pool = forked()
    copies(world, session, "b")
    world.cache.calls.remove(session.id, ["a"])
    world.sound()
    assert pool.table.state(1) is PageState.HELD
    serve(world, session, growth("b", 6, [7], 2, known=2))
    assert pool.table.state(1) is PageState.FREE


def test_a_fork_of_a_fork_that_has_not_copied_yet_shares_what_is_resident() -> None:
    world, session, _ = forked()
    [copy] = copies(world, session, "b")
    grant = serve(world, session, fork("c", "b"))
    assert grant.cached_tokens == 6 and pages(grant) == [0, copy.source[0]], "the target may hold nothing yet"
    world.cache.calls.remove(session.id, ["a", "b"])
    world.sound()
    assert copies(world, session, "c") == [], "the last one has the page to itself"


def test_unsharing_needs_a_page_of_its_own() -> None:
    world, session, _ = forked(total=2)
    with pytest.raises(CapacityExceeded):
        copies(world, session, "b")
    world.cache.calls.remove(session.id, ["a"])
    assert copies(world, session, "b") == []


def test_complete_pages_are_shared_without_copies() -> None:
    world = World(10)
    session = world.attached()
    run(world, session, "a", list(range(8)), 2)
    serve(world, session, fork("b", "a"))
    assert serve(world, session, growth("b", 8, [], 3, known=2)).copies == []
    serve(world, session, growth("b", 8, [1], 3))


def test_a_fork_is_idempotent_and_takes_nobodys_id() -> None:
    world, session, _ = forked()
    again = serve(world, session, fork("b", "a"))
    assert pages(again) == [0, 1] and again.cached_tokens == 6
    serve(world, session, opening("c", [1], 0))
    for name, parent in (("c", "a"), ("b", "c")):
        with pytest.raises(SequenceMismatch, match="no fork of") as refused:
            serve(world, session, fork(name, parent))
        assert refused.value.field == "parent_sequence_id"


def test_a_quota_counts_shared_pages_for_each_and_is_given_back() -> None:
    world, session, _ = forked(max_pages=5)
    assert session.held_pages == 4
    with pytest.raises(QuotaExceeded):
        serve(world, session, fork("c", "a"))
    copies(world, session, "b")
    assert session.held_pages == 5
    with pytest.raises(QuotaExceeded, match="hold 5 pages, 1 more are wanted and its quota is 5"):
        serve(world, session, opening("d", [1], 1))
    serve(world, session, growth("b", 6, [7], 2, known=2))
    serve(world, session, opening("d", [1], 1))
    world.cache.calls.remove(session.id, ["a", "b", "d"])
    assert session.held_pages == 0


def test_a_token_behind_the_copy_leaves_its_source_s_place_in_the_quota_to_a_new_page() -> None:
    world, session, _ = forked(max_pages=5)
    copies(world, session, "b")
    assert session.held_pages == 5, "b's source is one of them"
    with pytest.raises(QuotaExceeded, match="hold 5 pages, 1 more are wanted"):
        serve(world, session, growth("b", 6, [7], 4, known=2))
    grant = serve(world, session, growth("b", 6, [7], 3, known=2))
    assert len(grant.pages) == 1 and session.held_pages == 5
    world.sound()


def test_a_lost_fork_leaves_nothing_behind() -> None:
    world, session, pool = forked()
    copies(world, session, "b")
    world.now += 11
    world.cache.sweep()
    world.sound()
    assert pool.table.quarantined_count == 2 and pool.table.cached_count == 1
    world.cache.close_session(session.id)
    assert pool.table.free_count == 9


def test_replayed_openings_do_not_confuse_forks() -> None:
    world, session, _ = forked()
    with pytest.raises(SequenceMismatch):
        serve(world, session, opening("b", [1, 2, 3, 4, 5, 6], 2))


def test_a_fork_that_is_to_write_pays_for_its_copy_at_once() -> None:
    world, session, _ = forked(max_pages=6)  # 4 of them held
    with pytest.raises(QuotaExceeded, match="3 more are wanted"):
        serve(world, session, fork("c", "a", 2))
    assert serve(world, session, fork("c", "a")).copies == [] and session.held_pages == 6


def test_a_fork_that_is_to_write_needs_a_page_for_its_copy() -> None:
    world, session, _ = forked(total=2)
    with pytest.raises(CapacityExceeded) as refused:
        serve(world, session, fork("c", "a", 2))
    assert refused.value.metadata["needed_pages"] == "1"


def test_in_one_call_a_fork_finds_what_was_reported_before_it_and_its_parent_gets_a_copy_after_it() -> None:
    world, session, _ = forked()
    serve(world, session, growth("a", 6, [], 2, known=2))
    demands = [growth("a", 6, [7], 2, known=2), fork("c", "a", 2), growth("a", 7, [], 2, known=2)]
    told, _ = world.cache.calls.allocate(session.id, grouped(demands), [])
    world.sound()
    (child, of_child), (parent, of_parent) = told
    assert (child, parent) == ("c", "a")
    assert isinstance(of_child, Grant) and of_child.cached_tokens == 7 and len(of_child.copies) == 1
    assert isinstance(of_parent, Grant) and of_parent.pages == [] and len(of_parent.copies) == 1
    assert of_parent.copies[0].source == of_child.copies[0].source


def test_a_step_is_told_of_a_copy_without_a_new_page() -> None:
    world, session, _ = forked()
    told, _ = world.cache.calls.allocate(session.id, grouped([growth("b", 6, [], 2, known=2)]), [])
    [(name, grant)] = told
    assert name == "b" and isinstance(grant, Grant)
    assert (grant.pages, grant.copies) == ([], [Copy(1, (1, 0), (2, 0))])
    assert world.cache.calls.allocate(session.id, grouped([growth("b", 6, [7], 2, known=2)]), [])[0] == []


def test_an_id_that_is_removed_again_is_remembered_as_if_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED_REMOVALS", 3)
    world, session, _ = forked()
    for names in (["b"], ["x"], ["y"], ["b"], ["z"]):
        world.cache.calls.remove(session.id, names)
    assert list(session.removed) == ["y", "b", "z"]


def test_pages_are_given_back_by_their_holders_alone() -> None:
    _, _, pool = forked()
    page = pool.table.take("one")
    with pytest.raises(ValueError, match="not held by 'two'"):
        pool.table.give_back([page], ["two"])
    assert pool.table.state(page) is PageState.HELD and pool.table.holders(page) == {"one"}
