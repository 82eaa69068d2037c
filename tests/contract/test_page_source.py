"""What any page source promises the scheduler, over this process's own pages and over a daemon's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import (
    CapacityExceeded,
    ExceedsPool,
    FieldInvalid,
    PositionMismatch,
    SequenceMismatch,
    SequenceRemoved,
    SequenceUnknown,
)
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import (
    MAX_RETENTION_PRIORITY,
    MAX_RETENTION_S,
    Demand,
    Grant,
    Opening,
    PageCopy,
    PageLayout,
    PageSource,
    Retention,
)
from tests.kvcache.conftest import Running

SIZE = 4
Maker = Callable[[int], PageSource]


@pytest.fixture(params=["local", "daemon"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Makes sources of a number of pages of four tokens, each a pool to itself."""
    made: list[PageSource] = []
    if request.param == "local":

        def local(pages: int) -> PageSource:
            made.append(LocalPageSource(pages, SIZE))
            return made[-1]

        yield local
        return
    # The contract is what is answered, not how soon: a busy machine may take longer than an engine waits.
    for name in ("MAX_CALL_S", "CLOSE_S"):
        monkeypatch.setattr(f"rocmforge.client.cache.{name}", 60.0)
    daemon = Running(tmp_path)

    def remote(pages: int) -> PageSource:
        geometry = PageLayout(SIZE, layers=1, kv_heads=1, head_dim=2, dtype="f32")
        address, pool = str(daemon.config.listeners[0]), f"pool {len(made)}"
        source = GrpcPageSource(address, pool, geometry, pool_pages=pages, ttl_s=600)
        source.reopen()
        made.append(source)
        return source

    yield remote
    for source in made:
        source.close()
    daemon.close()


def opening(name: str, prompt: list[int], pages: int, salt: str = "", retention: Retention | None = None) -> Demand:
    how = Opening(prompt, salt, retention)
    return Demand(name, start=0, tokens=[], total_pages=pages, known_pages=0, opening=how)


def more(name: str, tokens: list[int], pages: int, *, start: int = 0, known: int = 0) -> Demand:
    return Demand(name, start=start, tokens=tokens, total_pages=pages, known_pages=known)


def fork(name: str, parent: str, pages: int) -> Demand:
    return Demand(name, start=0, tokens=[], total_pages=pages, known_pages=0, parent=parent)


def ask(source: PageSource, *demands: Demand, removed: tuple[str, ...] = ()) -> list[Grant]:
    grants = source.exchange(list(demands), list(removed)).result()
    assert [grant.sequence_id for grant in grants] == [demand.sequence_id for demand in demands]
    return grants


def one(source: PageSource, demand: Demand, removed: tuple[str, ...] = ()) -> Grant:
    [grant] = ask(source, demand, removed=removed)
    return grant


def run(
    source: PageSource, name: str, tokens: list[int], salt: str = "", retention: Retention | None = None
) -> tuple[int, ...]:
    """Open, report everything, leave; the pages it had."""
    pages = -(-len(tokens) // SIZE)
    grant = one(source, opening(name, tokens, pages, salt, retention))
    assert grant.error is None
    ask(source, more(name, tokens, pages, known=len(grant.pages)))
    ask(source, removed=(name,))
    return grant.pages


def spare(source: PageSource, name: str = "probe") -> int:
    """How many pages can be had now; evicts what is cached."""
    for pages in range(source.total_pages, 0, -1):
        if one(source, opening(name, [99], pages)).error is None:
            ask(source, removed=(name,))
            return pages
    return 0


def test_size_and_pages_are_told(make: Maker) -> None:
    source = make(6)
    assert (source.total_pages, source.page_size) == (6, SIZE)
    assert source.may_launch()


def test_pages_of_live_sequences_are_distinct_and_in_the_pool(make: Maker) -> None:
    source = make(6)
    first, second = ask(source, opening("a", [1] * 9, 3), opening("b", [2] * 9, 3))
    pages = first.pages + second.pages
    assert len(set(pages)) == 6 and set(pages) == set(range(6))
    assert first.first_index == 0 and first.cached_tokens == 0


def test_whole_reported_pages_are_shared(make: Maker) -> None:
    source = make(8)
    had = run(source, "a", list(range(10)))
    grant = one(source, opening("b", [*range(10), 77], 3))
    assert grant.cached_tokens == 8
    assert grant.pages[:2] == had[:2] and len(grant.pages) == 3


def test_retention_is_taken_by_who_says_so(make: Maker) -> None:
    """Up to the limits that both services have, and refused with nothing done by who does not say so."""
    source = make(8)
    for at, (ttl_s, priority) in enumerate(((MAX_RETENTION_S, 1), (1e-9, MAX_RETENTION_PRIORITY))):
        grant = one(source, opening(f"kept {at}", [at] * 5, 2, retention=Retention(ttl_s, priority)))
        if source.retains:
            assert grant.error is None and len(grant.pages) == 2
        else:
            assert isinstance(grant.error, FieldInvalid) and grant.error.field == "opening.retention"
    assert one(source, opening("b", [2] * 5, 8 - 4 * source.retains)).error is None


def test_a_retained_page_goes_last(make: Maker) -> None:
    source = make(6)
    if not source.retains:
        return  # refused: see above
    for name, retention in (("kept", Retention(60.0, 50)), ("other", None)):
        assert len(run(source, name, [ord(name[0])] * 8, retention=retention)) == 2
    assert one(source, opening("room", [9], 4)).error is None  # two free ones, and what was used last
    ask(source, removed=("room",))
    assert one(source, opening("again", [ord("k")] * 9, 3)).cached_tokens == 8
    assert one(source, opening("nor", [ord("o")] * 9, 3)).cached_tokens == 0


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        (Retention(60.0, 80), Retention(600.0, 10)),
        (Retention(600.0, 50), Retention(60.0, 50)),
    ],
)
def test_of_retained_pages_the_weaker_go_first(make: Maker, stronger: Retention, weaker: Retention) -> None:
    """By priority, and of one priority by the time that is left; whichever was used last."""
    source = make(8)
    if not source.retains:
        return
    for name, retention in (("strong", stronger), ("weak", weaker)):
        assert len(run(source, name, [ord(name[0])] * 8, retention=retention)) == 2
    assert one(source, opening("room", [9], 6)).error is None  # four free ones, and two that are retained
    ask(source, removed=("room",))
    assert one(source, opening("again", [ord("s")] * 9, 3)).cached_tokens == 8
    assert one(source, opening("nor", [ord("w")] * 9, 3)).cached_tokens == 0


def test_live_sequences_share_too(make: Maker) -> None:
    source = make(8)
    first = one(source, opening("a", list(range(9)), 3))
    ask(source, more("a", list(range(9)), 3, known=3))
    second = one(source, opening("b", list(range(9)), 3))
    assert second.cached_tokens == 8 and second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_what_was_not_reported_is_not_shared(make: Maker) -> None:
    source = make(8)
    ask(source, opening("a", list(range(9)), 3))
    ask(source, more("a", list(range(7)), 3, known=3))
    assert one(source, opening("b", list(range(9)), 3)).cached_tokens == 4


def test_a_report_in_the_same_exchange_is_seen_by_an_opening_behind_it(make: Maker) -> None:
    source = make(8)
    ask(source, opening("a", list(range(9)), 3))
    _, second = ask(source, more("a", list(range(9)), 3, known=3), opening("b", list(range(9)), 3))
    assert second.cached_tokens == 8


def test_the_last_prompt_token_is_never_matched(make: Maker) -> None:
    source = make(8)
    run(source, "a", list(range(8)))
    assert one(source, opening("b", list(range(8)), 2)).cached_tokens == 4
    assert one(source, opening("c", list(range(9)), 3)).cached_tokens == 8
    assert one(source, opening("d", list(range(4)), 1)).cached_tokens == 0


def test_a_page_is_found_only_behind_its_own_prefix(make: Maker) -> None:
    source = make(8)
    run(source, "a", [1, 1, 1, 1, 2, 2, 2, 2])
    assert one(source, opening("b", [2, 2, 2, 2, 0], 2)).cached_tokens == 0
    assert one(source, opening("c", [3, 3, 3, 3, 2, 2, 2, 2, 0], 3)).cached_tokens == 0


def test_salts_do_not_share(make: Maker) -> None:
    source = make(9)
    run(source, "a", list(range(8)), salt="mine")
    assert one(source, opening("b", list(range(9)), 3)).cached_tokens == 0
    assert one(source, opening("c", list(range(9)), 3, salt="yours")).cached_tokens == 0
    assert one(source, opening("d", list(range(9)), 3, salt="mine")).cached_tokens == 8


def test_growth_is_a_target(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", [1], 1))
    first = one(source, more("a", [], 3, known=1))
    assert first.first_index == 1 and len(first.pages) == 2
    assert one(source, more("a", [], 3, known=1)) == first
    assert one(source, more("a", [], 2, known=3)).pages == ()
    assert spare(source) == 3


def test_replaying_an_exchange_changes_nothing(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", list(range(5)), 2), opening("gone", [7], 1))
    exchange = [more("a", list(range(5)), 3, known=2), opening("b", list(range(5)), 2)]
    first = ask(source, *exchange, removed=("gone",))
    assert ask(source, *exchange, removed=("gone",)) == first
    assert first[1].cached_tokens == 4
    assert spare(source) == 6 - 3 - 1


def test_reporting_tokens_again_is_harmless_and_other_tokens_are_refused(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", list(range(9)), 3))
    ask(source, more("a", list(range(6)), 3, known=3))
    assert one(source, more("a", list(range(2, 9)), 3, start=2, known=3)).error is None
    assert isinstance(one(source, more("a", [5], 3, start=4, known=3)).error, PositionMismatch)
    assert isinstance(one(source, more("a", [1], 3, start=10, known=3)).error, PositionMismatch)
    assert isinstance(one(source, more("a", [9, 10, 11, 12], 4, start=9, known=3)).error, PositionMismatch)
    assert one(source, opening("b", list(range(9)), 3)).cached_tokens == 8


def test_a_sequence_that_was_never_opened_is_unknown(make: Maker) -> None:
    source = make(6)
    assert isinstance(one(source, more("a", [], 1)).error, SequenceUnknown)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": 1}, "nothing is resident"),
        ({"tokens": [1]}, "nothing is resident"),
        ({"known_pages": 1}, "nothing is resident"),
        ({"opening": Opening([1, 2]), "parent": "b"}, "not both"),
    ],
)
@pytest.mark.parametrize("origin", [{"opening": Opening([1, 2])}, {"parent": "b"}], ids=["prompt", "fork"])
def test_what_opens_a_sequence_tells_nothing_of_it(origin: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    plain = {"start": 0, "tokens": [], "total_pages": 1, "known_pages": 0}
    assert Demand("a", **{**plain, **origin}).opens
    with pytest.raises(ValueError, match=words):
        Demand("a", **{**plain, **origin, **fields})


def test_more_pages_known_than_there_are(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", [1], 1))
    assert isinstance(one(source, more("a", [], 1, known=2)).error, FieldInvalid)


def test_out_of_pages_is_an_item_s_own_error_and_changes_nothing(make: Maker) -> None:
    source = make(6)
    grants = ask(source, opening("a", [1], 4), opening("b", [2], 3), opening("c", [3], 2))
    assert [type(grant.error) for grant in grants] == [type(None), CapacityExceeded, type(None)]
    assert isinstance(one(source, more("b", [], 1)).error, SequenceUnknown)
    refused = one(source, more("a", [1, 2], 5, known=4))
    assert isinstance(refused.error, CapacityExceeded)
    assert refused.error.retry_after_s is not None
    # Nor were the tokens taken that came with the refused growth.
    assert isinstance(one(source, more("a", [3], 4, start=2, known=4)).error, PositionMismatch)
    assert one(source, opening("b", [2], 3), removed=("c", "a")).error is None


def test_what_no_pool_could_hold(make: Maker) -> None:
    source = make(6)
    assert isinstance(one(source, opening("a", [1], 7)).error, ExceedsPool)
    ask(source, opening("b", [1], 6))
    assert isinstance(one(source, more("b", [], 7, known=6)).error, ExceedsPool)


def test_removal_comes_before_the_demands_of_its_exchange(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", [1], 6))
    assert len(one(source, opening("b", [2], 6), removed=("a",)).pages) == 6


def test_a_removed_id_stays_removed(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", [1], 1))
    ask(source, removed=("a", "a", "never was"))
    assert isinstance(one(source, opening("a", [1], 1)).error, SequenceRemoved)
    assert isinstance(one(source, more("a", [], 1)).error, SequenceRemoved)
    assert isinstance(one(source, opening("never was", [1], 1)).error, SequenceRemoved)
    assert spare(source) == 6


def test_an_id_is_open_with_one_prompt_and_one_salt(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", [1, 2], 1))
    assert isinstance(one(source, opening("a", [1, 3], 1)).error, SequenceMismatch)
    assert isinstance(one(source, opening("a", [1, 2], 1, salt="s")).error, SequenceMismatch)
    assert one(source, opening("a", [1, 2], 1)).error is None


def test_unfinished_pages_are_free_at_once_and_complete_ones_can_be_had(make: Maker) -> None:
    source = make(4)
    run(source, "a", list(range(10)))
    assert spare(source) == 4
    assert one(source, opening("b", list(range(10)), 3)).cached_tokens == 0


def test_the_tail_is_evicted_before_the_head(make: Maker) -> None:
    source = make(4)
    run(source, "a", list(range(12)))
    ask(source, opening("x", [50], 2))  # one free page, one evicted
    assert one(source, opening("b", [*range(12), 0], 0)).cached_tokens == 8


def test_the_least_recently_used_is_evicted_first(make: Maker) -> None:
    source = make(4)
    run(source, "old", [1] * 8)
    run(source, "new", [2] * 8)
    ask(source, opening("x", [50], 2))
    matched = ask(source, opening("b", [*[1] * 8, 0], 0), opening("c", [*[2] * 8, 0], 0))
    assert [grant.cached_tokens for grant in matched] == [0, 8]


def test_being_found_counts_as_use(make: Maker) -> None:
    source = make(4)
    run(source, "old", [1] * 8)
    run(source, "new", [2] * 8)
    ask(source, opening("again", [*[1] * 8, 0], 0))
    ask(source, removed=("again",))
    ask(source, opening("x", [50], 2))
    matched = ask(source, opening("b", [*[1] * 8, 0], 0), opening("c", [*[2] * 8, 0], 0))
    assert [grant.cached_tokens for grant in matched] == [8, 0]


def test_a_shared_page_outlives_its_first_holder(make: Maker) -> None:
    source = make(4)
    run(source, "a", list(range(8)))
    grant = one(source, opening("b", list(range(9)), 3))
    assert isinstance(one(source, opening("x", [50], 2)).error, CapacityExceeded)
    ask(source, removed=("b",))
    assert one(source, opening("c", list(range(9)), 3)).pages[:2] == grant.pages[:2]


def test_matched_pages_are_not_evicted_for_the_opening_that_matched_them(make: Maker) -> None:
    source = make(3)
    run(source, "a", list(range(8)))
    grant = one(source, opening("b", list(range(9)), 3))
    assert grant.error is None and len(set(grant.pages)) == 3
    ask(source, removed=("b",))
    ask(source, opening("other", [50], 1))
    assert isinstance(one(source, opening("c", list(range(9)), 3)).error, CapacityExceeded)
    assert one(source, opening("d", list(range(9)), 2)).cached_tokens == 8


def test_equal_pages_computed_twice_are_found_once_either_holder_leaves(make: Maker) -> None:
    source = make(6)
    ask(source, opening("a", list(range(9)), 3), opening("b", list(range(9)), 3))
    ask(source, more("a", list(range(9)), 3, known=3), more("b", list(range(9)), 3, known=3))
    ask(source, removed=("a",))
    assert one(source, opening("c", list(range(9)), 3)).cached_tokens == 8
    ask(source, removed=("b", "c"))
    assert spare(source) == 6


def test_a_fork_shares_what_is_reported_in_its_exchange_and_copies_the_tail_it_will_write(make: Maker) -> None:
    source = make(8)
    parent = one(source, opening("a", list(range(7)), 2))
    _, child, again = ask(
        source,
        more("a", list(range(6)), 0, known=2),
        fork("b", "a", 2),
        more("a", list(range(6)), 2, known=2),
    )
    assert child.error is None and child.pages[0] == parent.pages[0] and child.cached_tokens == 6
    assert child.copies == (PageCopy(1, parent.pages[1], child.pages[1]),)
    [own] = again.copies
    assert own.index == 1 and own.source == parent.pages[1]
    assert len({own.source, own.target, child.pages[1]}) == 3
    assert spare(source, "probe 1") == 8 - 4, "the page that both copy is kept until they have"
    assert one(source, more("b", [99], 2, start=6, known=2)).copies == ()
    assert one(source, more("a", [6], 2, start=6, known=2)).copies == ()
    assert spare(source, "probe 2") == 8 - 3
    ask(source, removed=("a", "b"))
    assert spare(source, "probe 3") == 8


def test_a_fork_of_whole_pages_copies_nothing(make: Maker) -> None:
    source = make(8)
    parent = one(source, opening("a", list(range(8)), 3))
    _, child = ask(source, more("a", list(range(8)), 0, known=3), fork("b", "a", 3))
    assert child.copies == () and child.pages[:2] == parent.pages[:2] and child.pages[2] not in parent.pages
    assert one(source, more("a", [8], 3, start=8, known=3)).error is None
    assert one(source, more("b", [9], 3, start=8, known=3)).error is None


def test_a_fork_can_be_sent_again(make: Maker) -> None:
    source = make(8)
    ask(source, opening("a", list(range(6)), 2))
    exchange = [more("a", list(range(6)), 0, known=2), fork("b", "a", 2), more("a", list(range(6)), 2, known=2)]
    first = ask(source, *exchange)
    again = ask(source, *exchange)
    assert again[1:] == first[1:] and again[0].copies == first[2].copies, "a copy is told until a token behind is"
    assert spare(source, "probe 4") == 8 - 4
    assert isinstance(one(source, fork("b", "c", 2)).error, SequenceMismatch)
    assert isinstance(one(source, opening("b", list(range(6)), 2)).error, SequenceMismatch)


def test_nobody_writes_into_a_shared_tail(make: Maker) -> None:
    source = make(8)
    ask(source, opening("a", list(range(6)), 2))
    ask(source, more("a", list(range(6)), 0, known=2), fork("b", "a", 0))
    assert isinstance(one(source, more("a", [7], 0, start=6, known=2)).error, PositionMismatch)
    assert isinstance(one(source, more("b", [7], 0, start=6, known=2)).error, PositionMismatch)
    ask(source, removed=("b",))
    assert one(source, more("a", [7], 0, start=6, known=2)).error is None


def test_the_tail_outlives_who_it_was_copied_from(make: Maker) -> None:
    source = make(4)
    ask(source, opening("a", list(range(6)), 2))
    ask(source, more("a", list(range(6)), 0, known=2), fork("b", "a", 2))
    ask(source, removed=("a",))
    assert spare(source, "probe 5") == 1
    ask(source, more("b", [9], 2, start=6, known=2))
    assert spare(source, "probe 6") == 2


def test_a_fork_that_cannot_have_its_pages_is_none(make: Maker) -> None:
    source = make(3)
    ask(source, opening("a", list(range(6)), 2))
    ask(source, more("a", list(range(6)), 2, known=2))
    assert isinstance(one(source, fork("b", "a", 3)).error, CapacityExceeded)
    assert isinstance(one(source, fork("b", "a", 4)).error, ExceedsPool)
    assert isinstance(one(source, more("b", [], 0)).error, SequenceUnknown)
    assert one(source, fork("b", "a", 2)).error is None
    assert spare(source, "probe 7") == 0


def test_a_fork_needs_a_live_parent(make: Maker) -> None:
    source = make(6)
    assert isinstance(one(source, fork("b", "a", 1)).error, SequenceUnknown)
    ask(source, opening("a", [1, 2], 1))
    ask(source, removed=("a",))
    assert isinstance(one(source, fork("b", "a", 1)).error, SequenceRemoved)


def test_what_forks_compute_is_found_by_others(make: Maker) -> None:
    source = make(10)
    ask(source, opening("a", list(range(6)), 2))
    ask(source, more("a", list(range(6)), 0, known=2), fork("b", "a", 2), more("a", list(range(6)), 2, known=2))
    ask(source, more("b", [50, 51], 2, start=6, known=2), more("a", [60, 61], 2, start=6, known=2))
    ask(source, removed=("a", "b"))
    for tail in ([50, 51], [60, 61]):
        assert one(source, opening(f"c {tail}", [*range(6), *tail, 0], 3)).cached_tokens == 8


def test_an_empty_exchange_is_fine(make: Maker) -> None:
    assert ask(make(2)) == []


def test_opened_anew_it_knows_nothing(make: Maker) -> None:
    source = make(4)
    ask(source, opening("a", [1], 4))
    source.reopen()
    assert source.may_launch()
    assert isinstance(one(source, more("a", [], 1)).error, SequenceUnknown)
    assert one(source, opening("b", [1], 4)).error is None


def test_closing_twice(make: Maker) -> None:
    source = make(4)
    source.close()
    source.close()


def test_without_lower_tiers_an_opening_that_could_wait_for_a_fill_is_granted_at_once(make: Maker) -> None:
    source = make(4)
    run(source, "a", [1, 2, 3, 4])
    how = Opening([1, 2, 3, 4, 5], fill_wait_s=60.0)
    demand = Demand("b", start=0, tokens=[], total_pages=2, known_pages=0, opening=how)
    grant = one(source, demand)
    assert (grant.error, grant.cached_tokens, len(grant.pages)) == (None, 4, 2)
    again = one(source, Demand("b", 0, [], 2, 0, Opening([1, 2, 3, 4, 5])))
    assert again == grant, "an opening is the same whether it offers to wait or not"
