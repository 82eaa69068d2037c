"""Why a prompt hit or missed, page by page."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import TypeVar

import pytest

from services.common.errors import FieldInvalid, PoolUnknown
from services.kvcache.cache import explain as explain_module
from services.kvcache.cache.explain import Outcome, PageAnswer
from services.kvcache.lease.sessions import Session
from tests.kvcache.cache.demands import opening
from tests.kvcache.cache.test_cache import run, serve
from tests.kvcache.fakes import World

Result = TypeVar("Result")

PROMPT = list(range(13))


def explained(world: World, pool_id: str, prompt: array[int], salt: str) -> list[PageAnswer]:
    """In one slice after the other."""
    return all_slices(world.cache.explain(pool_id, prompt, salt))


def all_slices(work: Generator[None, None, Result]) -> Result:
    """The result of work in slices."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def outcomes(world: World, prompt: list[int], salt: str = "") -> list[str]:
    return [answer.outcome.name for answer in explained(world, "pool", array("I", prompt), salt)]


def warm(pages: int = 12, **limits: object) -> tuple[World, Session]:
    world = World(pages, **limits)  # type: ignore[arg-type]
    session = world.attached(ttl_s=600.0)
    run(world, session, "a", PROMPT, 4)
    world.cache.calls.remove(session.id, ["a"])
    return world, session


def test_hits_and_the_last_token() -> None:
    world, _ = warm()
    assert outcomes(world, PROMPT) == ["HIT", "HIT", "HIT", "LAST_TOKEN"]
    assert outcomes(world, PROMPT[:12]) == ["HIT", "HIT", "LAST_TOKEN"]
    assert outcomes(world, [1]) == ["LAST_TOKEN"]
    [first, *_] = explained(world, "pool", array("I", PROMPT), "")
    assert first.page == (0, 0)


def test_evicted_from_the_tail_and_what_comes_behind() -> None:
    world, _ = warm()
    world.cache.evict_pages("pool", 2)
    assert outcomes(world, PROMPT) == ["HIT", "EVICTED", "EVICTED", "LAST_TOKEN"]


def test_expired() -> None:
    world, _ = warm(cache_ttl_s=5.0)
    world.now += 6
    world.cache.sweep()
    assert outcomes(world, PROMPT) == ["EXPIRED", "EXPIRED", "EXPIRED", "LAST_TOKEN"]


def test_stored_again_is_a_hit_and_evicted_again_is_told() -> None:
    world, session = warm()
    world.cache.evict_pages("pool", None)
    run(world, session, "b", PROMPT, 4)
    assert outcomes(world, PROMPT)[:3] == ["HIT"] * 3


def test_another_salt() -> None:
    world, _ = warm()
    assert outcomes(world, PROMPT, "tenant") == ["OTHER_SALT"] * 3 + ["LAST_TOKEN"]


def test_diverged_says_where() -> None:
    world, _ = warm()
    other = [*PROMPT[:6], 99, *PROMPT[7:]]
    answers = explained(world, "pool", array("I", other), "")
    assert [answer.outcome for answer in answers] == [
        Outcome.HIT,
        Outcome.DIVERGED,
        Outcome.NEVER_SEEN,
        Outcome.LAST_TOKEN,
    ]
    assert answers[1].diverged_at == 6
    assert explained(world, "pool", array("I", [0, 1, 99, 3, 4]), "")[0].diverged_at == 2


def test_never_seen() -> None:
    world, _ = warm()
    assert outcomes(world, [50] * 9) == ["NEVER_SEEN", "NEVER_SEEN", "LAST_TOKEN"]


def test_explaining_changes_nothing() -> None:
    world, session = warm()
    pool = next(iter(world.cache.pools))
    before = list(pool.table.cached), pool.totals.lookup_tokens, world.cache.events.last_number
    outcomes(world, PROMPT)
    outcomes(world, PROMPT, "tenant")
    assert (list(pool.table.cached), pool.totals.lookup_tokens, world.cache.events.last_number) == before
    assert serve(world, session, opening("c", PROMPT, 4)).cached_tokens == 12


def test_bad_questions() -> None:
    world, _ = warm()
    with pytest.raises(PoolUnknown):
        explained(world, "none", array("I", [1]), "")
    with pytest.raises(FieldInvalid, match="prompt is empty"):
        explained(world, "pool", array("I"), "")


def test_a_condemned_page_is_no_hit() -> None:
    world, _ = warm()
    index = world.cache.pools["pool"].index
    index.condemn(index.match("", [array("I", PROMPT[:4]).tobytes()])[0])
    assert outcomes(world, PROMPT)[0] != "HIT"


def test_who_may_not_ask_of_others_learns_nothing_of_them() -> None:
    world, _ = warm()
    for prompt, salt in ((PROMPT, "mine"), ([*PROMPT[:2], 99, *PROMPT[3:]], "")):
        assert outcomes(world, prompt, salt)[0] in ("OTHER_SALT", "DIVERGED")
        own = all_slices(world.cache.explain("pool", array("I", prompt), salt, others=False))
        assert [answer.outcome.name for answer in own] == ["NEVER_SEEN"] * 3 + ["LAST_TOKEN"]


def test_between_slices_the_pool_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "SLICE", 1)
    world, _ = warm()
    other = world.attached("pool")
    work = world.cache.explain("pool", array("I", PROMPT), "")
    for at in range(30):
        world.cache.evict_pages("pool", 1)
        run(world, other, f"b{at}", [*PROMPT[: at % 13], 90 + at], 4)
        world.cache.calls.remove(other.id, [f"b{at}"])
        world.sound()
        try:
            next(work)
        except StopIteration as end:
            answers = end.value
            break
    assert len(answers) == 4 and answers[-1].outcome is Outcome.LAST_TOKEN
    # A page that was hit is named with the generation that it had then: whoever reads it can tell if it is gone.
    assert all(answer.page is not None for answer in answers if answer.outcome is Outcome.HIT)
