# mypy: disable-error-code="arg-type"
"""Copy on write: what is shared is never written, and what is to be copied is kept until it was."""

from __future__ import annotations

import pytest

from services.common.errors import (
    CapacityExceeded,
    FieldInvalid,
    PositionMismatch,
    QuotaExceeded,
    SequenceExists,
    SequenceMismatch,
)
from services.kvcache.cache.demand import Copy, Demand, Grant
from services.kvcache.cache.steps import Steps
from services.kvcache.lease import sessions
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.page_table import PageState
from services.kvcache.pool.pool import Pool
from tests.kvcache.cache.test_cache import growth, opening, run, serve
from tests.kvcache.fakes import World


def forked(pages: int = 10, **limits: object) -> tuple[World, Session, Pool]:
    """Parent "a" with 6 tokens in pages 0 and 1 (of 4 tokens each), and its fork "b"."""
    world = World(pages)
    session = world.attached(**limits)
    run(world, session, "a", [1, 2, 3, 4, 5, 6], 2)
    world.cache.fork(session.id, "a", "b")
    return world, session, world.cache.pool_of(session)


def copies(world: World, session: Session, name: str) -> list[Copy]:
    return serve(world, session, growth(name, 6, [], 2, known=2)).copies


def test_the_first_to_grow_copies_and_the_other_keeps_the_page() -> None:
    world, session, pool = forked()
    assert copies(world, session, "b") == [Copy(1, (1, 0), (2, 0))]
    assert pool.table.holder_count(1) == 2, "kept as the source until the copy is made"
    serve(world, session, growth("b", 6, [7], 2))
    assert pool.table.holder_count(1) == 1
    assert copies(world, session, "a") == [], "now the parent's alone"
    serve(world, session, growth("a", 6, [8], 2))
    assert list(world.cache.get_sequence(session.id, "a")[0].tokens)[-1] == 8
    assert list(world.cache.get_sequence(session.id, "b")[0].tokens)[-1] == 7


def test_nobody_writes_into_a_shared_page() -> None:
    world, session, _ = forked()
    for name in ("a", "b"):
        with pytest.raises(PositionMismatch, match="shared"):
            serve(world, session, growth(name, 6, [7], 0))
    copies(world, session, "b")
    with pytest.raises(PositionMismatch, match="shared"):
        serve(world, session, growth("a", 6, [7], 0))


def test_the_source_outlives_the_parent_until_the_copy_is_made() -> None:
    world, session, pool = forked()
    copies(world, session, "b")
    world.cache.remove(session.id, ["a"])
    world.sound()
    assert pool.table.state(1) is PageState.HELD
    serve(world, session, growth("b", 6, [7], 2))
    assert pool.table.state(1) is PageState.FREE


def test_a_fork_of_a_fork_that_has_not_copied_yet_shares_what_is_resident() -> None:
    world, session, _ = forked()
    [copy] = copies(world, session, "b")
    grant, _ = world.cache.fork(session.id, "b", "c")
    assert [page for page, _ in grant.pages] == [0, copy.source[0]], "the target may hold nothing yet"
    world.cache.remove(session.id, ["a", "b"])
    world.sound()
    assert copies(world, session, "c") == [], "the last one has the page to itself"


def test_unsharing_needs_a_page_of_its_own() -> None:
    world, session, _ = forked(pages=2)
    with pytest.raises(CapacityExceeded):
        copies(world, session, "b")
    world.cache.remove(session.id, ["a"])
    assert copies(world, session, "b") == []


def test_complete_pages_are_shared_without_copies() -> None:
    world = World(10)
    session = world.attached()
    run(world, session, "a", list(range(8)), 2)
    world.cache.fork(session.id, "a", "b")
    assert serve(world, session, growth("b", 8, [], 3, known=2)).copies == []
    serve(world, session, growth("b", 8, [1], 3))


def test_a_fork_is_idempotent_and_takes_nobodys_id() -> None:
    world, session, _ = forked()
    again, child = world.cache.fork(session.id, "a", "b")
    assert [page for page, _ in again.pages] == [0, 1] and len(child.tokens) == 6
    serve(world, session, opening("c", [1], 0))
    with pytest.raises(SequenceExists):
        world.cache.fork(session.id, "a", "c")
    with pytest.raises(SequenceExists):
        world.cache.fork(session.id, "c", "b")


def test_a_quota_counts_shared_pages_for_each_and_is_given_back() -> None:
    world, session, _ = forked(max_pages=5)
    assert session.held_pages == 4
    with pytest.raises(QuotaExceeded):
        world.cache.fork(session.id, "a", "c")
    copies(world, session, "b")
    assert session.held_pages == 5
    with pytest.raises(QuotaExceeded, match="hold 5 pages, 1 more are wanted and its quota is 5"):
        serve(world, session, opening("d", [1], 1))
    serve(world, session, growth("b", 6, [7], 2))
    serve(world, session, opening("d", [1], 1))
    world.cache.remove(session.id, ["a", "b", "d"])
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
    world.now += 30
    world.cache.sweep()
    assert pool.table.free_count == 9


def test_replayed_openings_do_not_confuse_forks() -> None:
    world, session, _ = forked()
    [result], _ = world.cache.allocate(session.id, [Demand("b", [1, 2, 3, 4, 5, 6], "", 0, [], 2, 0)], [])
    assert type(result).__name__ == "SequenceMismatch"


def fork_of(parent: str, name: str, total_pages: int = 0, start: int = 0, tokens: list[int] | None = None) -> Demand:
    return Demand(name, None, "", start, tokens or [], total_pages, 0, parent=parent)


@pytest.mark.parametrize(("start", "tokens"), [(1, []), (0, [1]), (6, []), (6, [7])])
def test_a_fork_in_a_step_reports_nothing(start: int, tokens: list[int]) -> None:
    world, session, _ = forked()
    [refused], _ = world.cache.allocate(session.id, [fork_of("a", "c", 2, start, tokens)], [])
    assert isinstance(refused, FieldInvalid) and refused.field == "tokens"
    assert "c" not in session.sequences


def test_a_fork_that_is_to_write_pays_for_its_copy_at_once() -> None:
    world, session, _ = forked(max_pages=6)  # 4 of them held
    [refused], _ = world.cache.allocate(session.id, [fork_of("a", "c", 2)], [])
    assert isinstance(refused, QuotaExceeded) and "3 more are wanted" in refused.message
    [granted], _ = world.cache.allocate(session.id, [fork_of("a", "c")], [])
    assert isinstance(granted, Grant) and granted.copies == [] and session.held_pages == 6
    world.sound()


def test_a_fork_that_is_to_write_needs_a_page_for_its_copy() -> None:
    world, session, _ = forked(pages=2)
    [refused], _ = world.cache.allocate(session.id, [fork_of("a", "c", 2)], [])
    assert isinstance(refused, CapacityExceeded) and refused.metadata["needed_pages"] == "1"
    world.sound()


def test_a_fork_in_a_step_is_idempotent_and_takes_nobodys_id() -> None:
    world, session, _ = forked()
    serve(world, session, opening("c", [1], 0))
    [again, other, opened], _ = world.cache.allocate(
        session.id, [fork_of("a", "b"), fork_of("c", "b"), fork_of("a", "c")], []
    )
    assert isinstance(again, Grant) and [page for page, _ in again.pages] == [0, 1]
    for refused in (other, opened):
        assert isinstance(refused, SequenceMismatch) and refused.field == "parent_sequence_id"
    world.sound()


def test_a_sequence_that_only_goes_on_is_told_of_a_copy_without_a_new_page() -> None:
    world, session, _ = forked()
    told, _ = world.cache.step(session.id, Steps(["b"], [6], [], [0], [2], [2]), [])
    [(name, grant)] = told
    assert name == "b" and isinstance(grant, Grant)
    assert (grant.pages, grant.copies) == ([], [Copy(1, (1, 0), (2, 0))])
    assert world.cache.step(session.id, Steps(["b"], [6], [7], [1], [2], [2]), [])[0] == []


def test_an_id_that_is_removed_again_is_remembered_as_if_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "REMEMBERED_REMOVALS", 3)
    world, session, _ = forked()
    for names in (["b"], ["x"], ["y"], ["b"], ["z"]):
        world.cache.remove(session.id, names)
    assert list(session.removed) == ["y", "b", "z"]


def test_pages_are_given_back_by_their_holders_alone() -> None:
    _, _, pool = forked()
    page = pool.table.take("one")
    with pytest.raises(ValueError, match="not held by 'two'"):
        pool.table.give_back([page], ["two"])
    assert pool.table.state(page) is PageState.HELD and pool.table.holders(page) == {"one"}
