"""What callers say of when a prompt comes back: the classes it makes, what they cost, and what a liar gets."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eviction import Trace, belady, hinted, hits, replay
from benchmarks.parts.agents import CONTEXT, Agents, hints
from services.common.errors import FieldInvalid
from services.kvcache.eviction.density import DensityQueue
from services.kvcache.eviction.hints import CLASSES, EXPECTED_S, OWNER_CLASSES, Claim, HintClasses, ReuseHint
from services.kvcache.eviction.reuse import LEVELS, ReuseModel
from tests.kvcache.eviction.test_policies import Forest, link_of, sound
from tests.kvcache.eviction.test_trace import Traffic

TOTAL = 64


def sound_classes(classes: HintClasses) -> bool:
    return [said for said in classes.walk() if said is not None] == []


def classes_of(*claims: Claim | None, total: int = TOTAL) -> HintClasses:
    """Pages 0, 1, ... with these claims."""
    classes = HintClasses(total)
    for page, claim in enumerate(claims):
        classes.put(page, claim)
    assert sound_classes(classes)
    return classes


# --- limits ---


@pytest.mark.parametrize(
    ("hint", "field", "says"),
    [
        (ReuseHint("x" * 65), "category", "has 65 characters; it may have 64"),
        (ReuseHint(turn=1_000_001), "turn", "is 1000001; it may be 1000000 at most"),
        (ReuseHint(expected_s=0.0), "expected_return", "above 0 s and at most 86400 s"),
        (ReuseHint(expected_s=86400.5), "expected_return", "is 86400.5 s"),
        (ReuseHint(expected_s=-1.0), "expected_return", "is -1 s"),
    ],
)
def test_what_cannot_be_said(hint: ReuseHint, field: str, says: str) -> None:
    with pytest.raises(FieldInvalid, match=says) as caught:
        hint.check()
    assert caught.value.field == f"prompt.reuse_hint.{field}"


@pytest.mark.parametrize(
    "hint", [ReuseHint(), ReuseHint("x" * 64, 1_000_000, True, 86400.0), ReuseHint("", 0, False, 1e-9)]
)
def test_what_can_be_said(hint: ReuseHint) -> None:
    hint.check()


# --- classes ---


def test_what_is_said_alike_is_one_class() -> None:
    same = [Claim("me", ReuseHint("a", turn, True, seconds)) for turn, seconds in ((2, 5.0), (9, 16.0), (0, 7.5))]
    classes = classes_of(*same)
    assert len({classes.of(page) for page in range(3)}) == 1 and classes.of(0)


def test_each_thing_that_is_said_makes_a_class() -> None:
    said = [ReuseHint(), ReuseHint("a"), ReuseHint("a", 1), ReuseHint("a", 0, True)]
    said += [ReuseHint("a", 0, True, edge) for edge in (*EXPECTED_S, 1e4)]
    classes = classes_of(*(Claim("me", hint) for hint in said))
    found = [classes.of(page) for page in range(len(said))]
    assert len(set(found)) == len(said) and 0 not in found


def test_a_page_that_different_callers_use_is_in_no_class() -> None:
    mine, other = Claim("me", ReuseHint("a")), Claim("me", ReuseHint("b"))
    for second in (other, None, Claim("you", ReuseHint("a"))):
        classes = classes_of(mine)
        classes.put(0, second)
        assert classes.of(0) == 0 and sound_classes(classes)
    classes = classes_of(mine)
    classes.put(0, Claim("me", ReuseHint("a", 2, True)))  # the same caller a turn later
    assert classes.of(0)


def test_who_invents_categories_leaves_half_of_the_classes_to_others() -> None:
    flood = [Claim("me", ReuseHint(str(number))) for number in range(TOTAL - 1)]
    classes = classes_of(*flood, Claim("you", ReuseHint("a")), total=4 * TOTAL)
    mine = {classes.of(page) for page in range(TOTAL - 1)} - {0}
    assert len(mine) == OWNER_CLASSES < CLASSES - 1 and classes.of(TOTAL - 1) not in {0, *mine}


def test_a_class_without_pages_is_remembered_until_its_number_is_wanted() -> None:
    classes = classes_of(Claim("me", ReuseHint("a")))
    number = classes.of(0)
    classes.forget(0)
    assert not classes.used
    classes.put(0, Claim("me", ReuseHint("a")))
    assert classes.of(0) == number and classes.used and not classes.ended
    classes.forget(0)
    for at in range(OWNER_CLASSES):
        classes.put(at, Claim("me", ReuseHint(str(at))))
    assert classes.ended == [number] and classes.of(OWNER_CLASSES - 1) == number
    assert sound_classes(classes)


def test_of_several_identities_each_has_its_share_of_the_pages() -> None:
    classes = HintClasses(TOTAL)
    for page in range(TOTAL // 2):
        classes.put(page, Claim("you", ReuseHint("a")))
    for page in range(TOTAL // 2, TOTAL):
        classes.put(page, Claim("me", ReuseHint("a")))
    classes.put(0, None)
    for page in range(TOTAL):  # mine are as many as may be, whatever becomes free
        if not classes.of(page):
            classes.put(page, Claim("me", ReuseHint("a")))
    count = Counter(classes.of(page) for page in range(TOTAL))
    assert max(count.values()) == TOTAL // 2 and classes.of(0) == 0
    assert sound_classes(classes)


class SlowClasses:
    """The same from lists alone: of each page its class, and of the classes when they were last left empty."""

    def __init__(self, total: int) -> None:
        self.keys: list[tuple[object, ...] | None] = [None] * total
        self.known: list[tuple[object, ...]] = []  # in the order in which they were last left, or made

    def put(self, page: int, claim: Claim | None) -> None:
        key: tuple[object, ...] | None = None
        if claim is not None:
            category, turn, pending, expected_s = claim.hint
            bucket = None if expected_s is None else sum(edge < expected_s for edge in EXPECTED_S)
            key = (claim.owner, category, turn == 1, pending, bucket)
        has = self.keys[page]
        if has == key:
            return
        self.keys[page] = None
        if has is not None and has not in self.keys:
            self.known.remove(has)
            self.known.append(has)
        if key is None or (has is not None and has[:2] != key[:2]):
            return
        owners = {one[0] for one in self.keys if one is not None} | {key[0]}
        pages = sum(one is not None and one[0] == key[0] for one in self.keys)
        if len(owners) > 1 and pages >= len(self.keys) // len(owners):
            return
        if key not in self.known:
            mine = [one for one in self.known if one[0] == key[0]]
            full = len(mine) >= OWNER_CLASSES
            if full or len(self.known) == CLASSES - 1:
                empty = [one for one in (mine if full else self.known) if one not in self.keys]
                if not empty:
                    return
                self.known.remove(empty[0])
            self.known.append(key)
        self.keys[page] = key


claims = st.builds(
    Claim,
    st.sampled_from(["me", "you", "they"]),
    st.builds(
        ReuseHint,
        st.sampled_from([*"abcdefghijklmnopqrst"]),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from([None, 1.0, 4.0, 4.5, 1e3]),
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, TOTAL - 1), st.none() | claims), max_size=200))
def test_classes_are_those_of_a_slow_model(steps: list[tuple[int, Claim | None]]) -> None:
    classes, slow = HintClasses(TOTAL), SlowClasses(TOTAL)
    for page, claim in steps:
        classes.put(page, claim)
        slow.put(page, claim)
    assert sound_classes(classes)
    pairs = {(classes.of(page), slow.keys[page]) for page in range(TOTAL)}
    assert len({number for number, _ in pairs}) == len({key for _, key in pairs}) == len(pairs)
    assert all((number == 0) == (key is None) for number, key in pairs)


# --- what is learned ---


def test_a_class_begins_as_the_average_and_becomes_what_its_pages_do() -> None:
    model = ReuseModel(1000)
    good, bad, new = LEVELS, 2 * LEVELS, 3 * LEVELS
    for now in range(40000):
        model.began(link_of(now), (good, bad)[now % 2], now)
        if now % 2 == 0 and now > 600:
            model.returned(link_of(now - 600), now)
    assert model.value(good, 0) > 10 * model.value(bad, 0)
    assert model.value(bad, 0) < model.value(new, 0) < model.value(good, 0)
    model.forget(1)
    model.refresh(40000)
    assert model.value(good, 0) == model.value(new, 0)
    for now in range(40000, 40200):  # what the class that ended had cached says nothing of the one that has its number
        model.returned(link_of(now - 200), now)
    model.refresh(40200)
    assert model.value(good, 0) == model.value(new, 0)


def test_class_0_learns_from_its_own_pages_alone() -> None:
    alone, among = ReuseModel(1000), ReuseModel(1000)
    for now in range(20000):
        for model in (alone, among):
            model.began(link_of(now), now % 3 and 1, now)
    assert [alone.value(0, age) for age in range(0, 9000, 50)] == [among.value(0, age) for age in range(0, 9000, 50)]
    for now in range(20000, 21000):  # others' pages take the clock no further for it
        among.began(link_of(now) | 0xFFFFFFFF, 2 * LEVELS, 20000)
    among.refresh(20000)
    alone.refresh(20000)
    assert [alone.value(0, age) for age in range(0, 9000, 50)] == [among.value(0, age) for age in range(0, 9000, 50)]


def test_a_page_keeps_the_queue_that_it_was_put_in() -> None:
    queue = DensityQueue(TOTAL, Forest())
    for page in range(8):
        queue.claim(page, Claim("me", ReuseHint("a")))
        queue.push(page, 0.0)
    for page in range(4):
        queue.claim(page, None)  # a sequence ended that held a stand-by
        sound(queue)
    for page in (2, 7):
        queue.discard(page)
        queue.push(page, 1.0)
        sound(queue)
    queue.evict(3)
    sound(queue)


# --- whole traces ---


def mixed(seed: int) -> Trace:
    traffic = Traffic(seed)
    return traffic.recent(600, 20) + traffic.hot_and_scan(400)


def test_who_says_nothing_gets_what_there_is_without_hints() -> None:
    trace = mixed(1)
    assert list(hits(trace, 300, "density", [None] * len(trace))) == list(hits(trace, 300, "density"))


def test_lru_does_not_use_hints() -> None:
    trace = mixed(2)
    said: list[ReuseHint | None] = [ReuseHint("a", 1, True, 1.0)] * len(trace)
    assert list(hits(trace, 300, "lru", said)) == list(hits(trace, 300, "lru"))


def test_one_category_for_everything_says_next_to_nothing() -> None:
    trace = mixed(3)
    said: list[ReuseHint | None] = [ReuseHint("all")] * len(trace)
    assert 0.95 <= hinted(trace, 300, "", said) / replay(trace, 300, "density") <= 1.1


def test_what_is_said_of_a_scan_keeps_it_from_flushing_what_returns() -> None:
    """Content that comes back once, in a scan twelve times as large: no count of returns tells them apart."""
    traffic, trace, said = Traffic(4), Trace(), list[ReuseHint | None]()
    waiting: list[list[int]] = []
    for _ in range(400):
        waiting.append(traffic.conversation())
        trace.append(waiting[-1])
        said.append(ReuseHint("agent", 1, True))
        for _ in range(3):
            trace.append(traffic.conversation())
            said.append(ReuseHint("batch"))
        if len(waiting) > 12:
            trace.append(waiting.pop(0))
            said.append(ReuseHint("agent", 2))
    with_hints, without, most = hinted(trace, 300, "", said), replay(trace, 300, "density"), belady(trace, 300, "")
    assert with_hints > 0.8 * most > 2 * without


@pytest.mark.parametrize("lie", [ReuseHint("liar", 1, True, 1.0), ReuseHint("agent", 2, True, 1.0)])
def test_who_lies_takes_next_to_nothing_from_others(lie: ReuseHint) -> None:
    """A flood of what never returns, of which is said that it returns at once, costs others what it costs unsaid."""
    traffic = Traffic(5)
    honest, flood = traffic.recent(1500, 12), traffic.scan(1500)
    trace = [request for pair in zip(honest, flood, strict=True) for request in pair]
    lies: list[ReuseHint | None] = [None, lie] * len(honest)
    unsaid, told = (sum(list(hits(trace, 300, "density", said))[::2]) for said in (None, lies))
    assert told >= 0.97 * unsaid


# --- agentic traffic ---


def test_agentic_traffic_can_be_repeated_and_has_the_shape_that_was_published() -> None:
    calls = Agents(3, 2048).calls(3000)
    assert calls == Agents(3, 2048).calls(3000) != Agents(4, 2048).calls(3000)
    assert all(a.at <= b.at for a, b in pairwise(calls))
    assert max(len(call.blocks) for call in calls) <= CONTEXT / 2048
    agents = [call for call in calls if call.category == "agent"]
    following = {(call.session, call.turn): call for call in agents}
    for call in agents:
        next_call = following.get((call.session, call.turn + 1))
        if next_call is not None and call.away_s is not None:
            assert next_call.at == call.at + call.away_s
        assert call.away_s is not None or (not call.calls_tool and next_call is None)
    assert 0.75 < sum(call.calls_tool for call in agents) / len(agents) < 0.97


@pytest.mark.parametrize("right", [1.0, 0.9])
def test_callers_are_right_as_often_as_they_are_said_to_be(right: float) -> None:
    calls = Agents(3, 2048).calls(3000)
    said = hints(calls, 1, right)
    agents = [(call, hint) for call, hint in zip(calls, said, strict=True) if call.category == "agent"]
    share = sum(call.calls_tool == hint.tool_call_pending for call, hint in agents) / len(agents)
    assert share == pytest.approx(right, abs=0.03)
    assert all(hint.expected_s is None for _, hint in agents if not hint.tool_call_pending)
    assert hints(calls, 1, right) == said


def test_on_agentic_traffic_hints_go_half_of_the_way_from_lru_to_belady() -> None:
    calls = Agents(1, 4096).calls(3000)
    trace, pages = [call.blocks for call in calls], 100
    lru, best = replay(trace, pages, "lru"), belady(trace, pages, "")
    assert hinted(trace, pages, "", [*hints(calls, 1)]) >= lru + 0.45 * (best - lru)
