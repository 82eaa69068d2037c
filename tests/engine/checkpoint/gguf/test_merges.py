"""What each piece is merged from, and in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checkpoint.gguf.merges import merged, pairings

texts = st.text("abc", min_size=2, max_size=7)
scored = st.dictionaries(texts, st.integers(-6, 0).map(float), max_size=12)


def plainly(text: str, scores: dict[str, float]) -> list[str]:
    """The rule, word for word: of the best neighbours the leftmost, over and over."""
    symbols = list(text)
    while True:
        joint = [scores.get(left + right, -math.inf) for left, right in itertools.pairwise(symbols)]
        best = max(joint, default=-math.inf)
        if best == -math.inf:
            return symbols
        at = joint.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def by_rules(text: str, rules: list[tuple[str, str]]) -> list[str]:
    """BPE by a list: of the neighbours that come first in it the leftmost, over and over."""
    ranks = {pair: rank for rank, pair in enumerate(rules)}
    symbols = list(text)
    while True:
        found = [ranks.get(pair, len(ranks)) for pair in itertools.pairwise(symbols)]
        best = min(found, default=len(ranks))
        if best == len(ranks):
            return symbols
        at = found.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(max_examples=500, deadline=None)
@given(scores=scored, text=st.text("abc", max_size=20))
def test_merging_goes_by_the_rule(scores: dict[str, float], text: str) -> None:
    symbols, last = merged(text, scores)
    assert symbols == plainly(text, scores)
    assert (last is None) == (len(symbols) == len(text))
    assert last is None or "".join(last) in scores


@settings(max_examples=1000, deadline=None)
@given(scores=scored, examples=st.lists(st.text("abc", max_size=20), min_size=5, max_size=5))
def test_the_list_says_what_the_scores_say(scores: dict[str, float], examples: list[str]) -> None:
    try:
        made = pairings(scores)
    except ValueError as error:
        assert "have the same score" in str(error)
        assert len(set(scores.values())) < len(scores)
        return
    assert all(piece == left + right for piece, (left, right) in made.items())
    for text in [*examples, *scores]:
        assert by_rules(text, list(made.values())) == plainly(text, scores), text


def test_a_piece_has_one_pair_and_one_that_is_never_made_has_none() -> None:
    # he goes before th, so that "the" is never th and e; "bc" is taken before a comes to it.
    made = pairings({"he": -1.0, "the": -2.0, "th": -3.0, "bc": -4.0, "ab": -5.0, "abcd": -6.0})
    assert made == {"he": ("h", "e"), "the": ("t", "he"), "th": ("t", "h"), "bc": ("b", "c"), "ab": ("a", "b")}
    assert list(made) == ["he", "the", "th", "bc", "ab"]


def test_equal_scores_are_fine_while_an_order_serves_every_text() -> None:
    assert list(pairings({"bc": 0.0, "ab": 0.0})) == ["ab", "bc"]
    assert list(pairings({"ca": 0.0, "aa": 0.0, "ab": 0.0})) == ["ca", "aa", "ab"]
    assert set(pairings({"ab": 0.0, "cd": 0.0, "ef": 0.0})) == {"ab", "cd", "ef"}
    assert set(pairings({"ab": 0.0, "abc": 0.0, "abcd": 0.0, "ef": 0.0})) == {"ab", "abc", "abcd", "ef"}


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"ab": 0.0, "ba": 0.0}, "'(ab|ba)' and '(ab|ba)' have the same score, 0, and which is merged first depends"),
        ({"ab": -1.0, "bc": -1.0, "ca": -1.0}, "have the same score, -1, and which is merged first depends"),
        ({"as": 0.0, "ss": 0.0, "sa": 0.0}, "have the same score, 0, and which"),
        (
            {"ab": -1.0, "cd": -1.0, "abc": 0.0},
            "'ab' and 'cd' have the same score, -1, and a piece built from the first has",
        ),
        (
            {"ab": 2.0, "abc": 2.0, "cd": 2.0},
            "'ab' and 'abc' have the same score, 2, and a piece built from the first has",
        ),
        ({"ab": 2.0, "abab": 2.0}, "'ab' and 'abab' have the same score, 2, and a piece built from the first has"),
    ],
    ids=range(6),
)
def test_equal_scores_that_no_list_can_say(scores: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pairings(scores)


class Counted(dict[str, float]):
    """Scores that count how often one was read."""

    asked = 0

    def get(self, key: str, default: float | None = None) -> float | None:  # type: ignore[override]
        self.asked += 1
        return super().get(key, default)


def powers(letter: str, most: int) -> Iterator[str]:
    while len(letter) <= most:
        letter *= 2
        yield letter


@pytest.mark.parametrize("length", [64, 512])
def test_a_long_piece_takes_no_more_than_its_length(length: int) -> None:
    scores = Counted({piece: -float(len(piece)) for piece in powers("a", length // 2)} | {"a" * length: -1000.0})
    pairings(scores)
    # All others together are as long as the longest.
    assert scores.asked < 2 * 4 * length
