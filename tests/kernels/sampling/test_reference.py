# mypy: disable-error-code="arg-type"
"""The draw as NumPy defines it, against the same in whole numbers, spelled out token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.sampling import philox, reference
from kernels.sampling.launch import (
    ENTRY,
    MAX_VOCAB,
    NOT_FINITE,
    NOTHING_LEFT,
    Batch,
    Drawn,
    TokenCounts,
    entries,
    settings,
)

LARGEST = float(np.finfo(np.float32).max)


def sample(logits: Any, *asked: dict[str, Any], own: Sequence[NDArray[np.void]] | None = None) -> Drawn:
    """Draw from rows of float32 logits, row i at position i."""
    rows = np.asarray(logits, np.float32)
    return reference.sample(rows, Batch.of([settings(**{"seed": 1} | one) for one in asked], range(len(asked)), own))


# --- weights ---------------------------------------------------------------------------------------------------------


def weight(steps: int) -> int:
    """A weight by the polynomial, in Python's whole numbers."""
    value = 116582
    for coefficient in (1367404, 10284168, 59582090, 257938816, 744260984, 1 << 30):
        value = coefficient - (value * (steps % 2**23) >> 23)
    return value << 14 >> (steps >> 23)


def test_weights_are_the_polynomials_whole_numbers() -> None:
    generator = np.random.default_rng(0)
    steps = np.concatenate([generator.integers(0, reference.FAR, 3000), np.arange(45) << 23, [reference.FAR - 1]])
    steps = steps[steps < reference.FAR].astype(np.uint32)
    assert reference.weights(steps).tolist() == [weight(one) for one in steps.tolist()]


def test_weights_are_powers_of_two_and_fall() -> None:
    steps = np.arange(2**23 + 1, dtype=np.uint32)  # two whole powers, and all between
    found = reference.weights(steps)
    assert found[0] == 2**44
    assert found[-1] == 2**43
    assert (np.diff(found.astype(np.int64)) < 0).all()
    assert np.abs(found / 2.0**44 * 2.0 ** (steps / 2**23) - 1).max() < 7e-9
    last = reference.weights(np.array([reference.FAR - 1], np.uint32))
    assert last == 1  # nothing that is drawn from is without weight


# --- the whole draw, spelled out --------------------------------------------------------------------------------------


def spelled_out(row: list[float], asked: dict[str, Any], position: int) -> int:
    """The token by the definition, one step after the other."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    temperature = asked.get("temperature", 1.0)
    if temperature == 0:
        return order[0]
    scale = np.float32(2**23 / math.log(2) / temperature)
    weights = []
    for value in row:
        steps = (np.float32(row[order[0]]) - np.float32(value)) * scale
        weights.append(weight(int(steps)) if steps < reference.FAR else 0)
    kept = order[: asked.get("top_k") or None]
    if asked.get("top_p", 1.0) < 1:
        reach = sum(weights[i] for i in kept) * int(asked["top_p"] * 2**64) >> 64
        upto, first = 0, []
        for i in kept:
            first.append(i)
            upto += weights[i]
            if upto >= max(1, reach):
                break
        kept = first
    kept = sorted(i for i in kept if weights[i] >= max(1, math.ceil(asked.get("min_p", 0.0) * 2**44)))
    seeds, positions = np.array([asked["seed"]], np.uint64), np.array([position], np.uint64)
    unit = int(philox.bits(seeds, positions)[0]) * sum(weights[i] for i in kept) >> 64
    for i in kept:
        unit -= weights[i]
        if unit < 0:
            return i
    raise AssertionError("no token has the unit")


@hypothesis(max_examples=300, deadline=None)
@given(
    row=st.lists(st.integers(-300, 300), min_size=1, max_size=24),
    asked=st.fixed_dictionaries(
        {"seed": st.integers(0, 2**64 - 1)},
        optional={
            "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0, 100.0]),
            "top_k": st.integers(0, 30),
            "top_p": st.sampled_from([1e-30, 0.05, 0.31, 0.5, 0.77, 0.93, 1 - 2**-53, 1.0]),
            "min_p": st.sampled_from([0.0, 1e-15, 0.013, 0.11, 0.5, 0.999]),
        },
    ),
    spread=st.sampled_from([1e-30, 1 / 64, 1 / 8, 1.0]),
)
def test_a_draw_is_the_definitions(row: list[int], asked: dict[str, Any], spread: float) -> None:
    logits = (np.array([row], np.float32) * np.float32(spread)).astype(np.float32)
    values = logits[0].astype(float).tolist()
    for position in (0, 7, 2**40):
        batch = Batch.of([settings(**asked)], [position])
        assert reference.sample(logits, batch).tokens[0] == spelled_out(values, asked, position)


def test_rows_are_drawn_alike_alone_and_in_any_company() -> None:
    generator = np.random.default_rng(3)
    # So many that they are not all worked on together.
    n, vocab_size = 50, 5000
    rows = (generator.standard_normal((n, vocab_size)) * 3).astype(np.float32)
    rows[3, 5] = np.nan
    asked = [
        {"seed": i, "temperature": (0.0, 0.7, 1.0)[i % 3], "top_k": (0, 40)[i % 2], "top_p": (1.0, 0.9)[i // 2 % 2]}
        for i in range(n)
    ]
    together = reference.sample(rows, Batch.of([settings(**one) for one in asked], range(n)))
    for i in range(n):
        alone = reference.sample(rows[i : i + 1], Batch.of([settings(**asked[i])], [i]))
        assert (alone.tokens[0], alone.errors[0]) == (together.tokens[i], together.errors[i])


def test_minus_zero_and_what_is_below_the_normal_numbers_are_zero() -> None:
    row = [[-0.0, 0.0, 1e-40, -1e-39]]
    for asked in ({"temperature": 0.0}, {"top_k": 1}):
        assert sample(row, asked).tokens[0] == 0
    drawn = {int(sample(row, {"seed": seed, "min_p": 0.999, "temperature": 1e-12}).tokens[0]) for seed in range(80)}
    assert drawn == {0, 1, 2, 3}


def test_a_tiny_temperature_is_greedy_and_a_tiny_share_too() -> None:
    generator = np.random.default_rng(4)
    rows = generator.standard_normal((20, 100)).astype(np.float32)
    for asked in ({"temperature": 5e-324}, {"top_p": 5e-324}, {"top_k": 1}, {"min_p": 1 - 2**-53}):
        assert sample(rows, *[asked] * 20).tokens.tolist() == rows.argmax(axis=1).tolist()


def test_the_extremes_of_float32() -> None:
    row = [[-LARGEST, LARGEST, 0.0, LARGEST]]
    drawn = {int(sample(row, {"seed": seed, "temperature": 100.0}).tokens[0]) for seed in range(40)}
    assert drawn == {1, 3}


def test_a_vocabulary_is_limited() -> None:
    for vocab_size in (0, MAX_VOCAB + 1):
        with pytest.raises(ValueError, match=f"{vocab_size} columns.* {MAX_VOCAB}"):
            sample(np.zeros((1, vocab_size)), {})


# --- penalties, biases, bans ------------------------------------------------------------------------------------------


def greedy_order(row: list[float], own: NDArray[np.void], **asked: float) -> list[int]:
    """Tokens in their order after the entries' changes: each in turn is the likeliest once those before are banned."""
    order: list[int] = []
    for _ in row:
        banned = own.copy()
        rest = np.zeros(len(row), ENTRY)
        rest["id"], rest["count"] = np.arange(len(row)), -1
        rest[banned["id"]] = banned
        rest["bias"][order] = -np.inf
        order.append(int(sample([row], {"temperature": 0.0, **asked}, own=[rest]).tokens[0]))
    return order


def test_the_repetition_penalty_is_for_prompt_and_output_and_pulls_towards_zero_and_below() -> None:
    counts = TokenCounts([0, 2], [3])
    # 4 / 2, 3, -1 * 2, 2.5 / 2, -1.5: the order changes everywhere.
    assert greedy_order([4.0, 3.0, -1.0, 2.5, -1.5], entries(counts), repetition_penalty=2.0) == [1, 0, 3, 4, 2]


def test_presence_and_frequency_penalties_are_for_the_output() -> None:
    counts = TokenCounts([0, 0, 0], [1, 1, 2])
    row = [1.0, 1.5, 1.25, 1.125]
    assert greedy_order(row, entries(counts), presence_penalty=0.2) == [1, 3, 2, 0]
    assert greedy_order(row, entries(counts), frequency_penalty=0.3) == [3, 0, 2, 1]
    assert greedy_order(row, entries(counts), frequency_penalty=-0.3) == [1, 2, 3, 0]
    assert greedy_order(row, entries(counts, prompt=False), presence_penalty=0.2) == [1, 3, 2, 0]


def test_the_bias_comes_first_then_repetition_then_the_other_penalties() -> None:
    counts = TokenCounts([], [0, 0])
    # (1 + 3) / 2 - 2 * 0.25 - 0.5 = 1; the other orders give 1.5, 2.5, 0.75 or more.
    own = entries(counts, {0: 3.0})
    asked = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    for rival, first in ((0.99, 0), (1.0, 0), (1.01, 1)):
        assert sample([[1.0, rival]], {"temperature": 0.0, **asked}, own=[own]).tokens[0] == first


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_adjusted_logits_stay_in_the_range_of_their_type(kind: Any) -> None:
    most = float(ml_dtypes.finfo(kind).max)
    logits = np.array([[most, -most, 0.5 * most, 1.0]], kind)
    own = entries(TokenCounts([0, 1, 2]), {0: 100.0, 1: -100.0})
    for penalty in (1e-6, 100.0):
        batch = Batch.of([settings(seed=1, temperature=0.0, repetition_penalty=penalty, logprobs=4)], [0], [own])
        drawn = reference.sample(logits, batch)
        assert drawn.errors[0] == 0
        assert drawn.tokens[0] == 0
        # What is told is of the raw logits.
        assert drawn.top_ids[0].tolist() == [0, 2, 3, 1]


def test_a_bias_is_added_before_the_softmax() -> None:
    rows = np.zeros((6000, 3), np.float32)
    own = entries(bias={1: math.log(2), 2: -100.0})
    tokens = sample(rows, *[{"seed": 5}] * 6000, own=[own] * 6000).tokens
    counts = np.bincount(tokens, minlength=3)
    assert counts[2] == 0
    assert abs(counts[1] - 4000) < 4 * math.sqrt(6000 * 2 / 9)


def test_a_banned_token_is_never_drawn_and_not_counted_by_a_filter() -> None:
    row = [[9.0, 8.0, 7.0, 6.0]]
    own = entries(bias={0: 5.0}, banned=[0, 1])
    asked: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}]
    for one in asked:
        assert sample(row, one, own=[own]).tokens[0] == 2
    drawn = {
        int(sample(row, {"seed": seed, "top_k": 2, "temperature": 9.0}, own=[own]).tokens[0]) for seed in range(40)
    }
    assert drawn == {2, 3}
    only = entries(banned=[0, 1, 3])
    assert {int(sample(row, {"seed": seed}, own=[only]).tokens[0]) for seed in range(10)} == {2}


def test_all_tokens_banned_is_an_error_of_the_row_alone() -> None:
    drawn = sample([[1.0, 2.0], [1.0, 2.0]], {}, {"temperature": 0.0}, own=[entries(banned=[0, 1]), entries()])
    assert drawn.errors.tolist() == [NOTHING_LEFT, 0]
    assert drawn.tokens.tolist() == [0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_logit_is_an_error_even_where_it_is_banned(bad: float) -> None:
    rows = [[1.0, bad, 3.0], [1.0, 2.0, 3.0]]
    asked: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
    for own in (None, [entries(banned=[1]), entries()]):
        drawn = sample(rows, asked, asked, own=own)
        assert drawn.errors.tolist() == [NOT_FINITE, 0]
        assert drawn.tokens.tolist() == [0, 2]
        assert math.isnan(drawn.logprobs[0])
        assert drawn.ranks.tolist() == [0, 1]
        assert drawn.top_ids.tolist() == [[-1, -1], [2, 1]]


# --- log probabilities ------------------------------------------------------------------------------------------------


def test_log_probabilities_are_of_the_raw_logits() -> None:
    generator = np.random.default_rng(5)
    rows = (generator.standard_normal((8, 500)) * 4).astype(np.float32)
    exact = rows.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    asked = [
        {"seed": i, "temperature": 3.0, "top_k": 100, "logprobs": i % 6, "presence_penalty": 1.0} for i in range(8)
    ]
    own = [entries(TokenCounts([], rows[i].argsort()[-20:].tolist()), {3: 5.0}) for i in range(8)]
    drawn = sample(rows, *asked, own=own)
    for i in range(8):
        token = drawn.tokens[i]
        assert drawn.logprobs[i] == pytest.approx(exact[i, token], abs=1e-6)
        assert drawn.ranks[i] == 1 + np.count_nonzero(rows[i] > rows[i, token])
        top = np.argsort(-rows[i], kind="stable")[: i % 6]
        assert drawn.top_ids[i].tolist() == [*top.tolist(), *[-1] * (5 - i % 6)]
        assert drawn.top_logprobs[i, : i % 6] == pytest.approx(exact[i, top], abs=1e-6)


def test_equals_have_ranks_by_id() -> None:
    rows = [[2.0, 5.0, 5.0, 2.0, 5.0]] * 40
    drawn = sample(rows, *[{"seed": seed, "temperature": 9.0, "logprobs": 9} for seed in range(40)])
    rank = {1: 1, 2: 2, 4: 3, 0: 4, 3: 5}
    assert drawn.ranks.tolist() == [rank[token] for token in drawn.tokens.tolist()]
    assert drawn.top_ids[0].tolist() == [1, 2, 4, 0, 3, -1, -1, -1, -1]
    assert np.isnan(drawn.top_logprobs[0, 5:]).all()


def test_far_below_the_likeliest_a_log_probability_is_still_told() -> None:
    drawn = sample([[0.0, -500.0, -40.0]], {"temperature": 0.0, "logprobs": 3})
    assert drawn.top_ids[0].tolist() == [0, 2, 1]
    assert drawn.top_logprobs[0].tolist() == [0.0, -40.0, -500.0]


# --- what is handed over ----------------------------------------------------------------------------------------------


def test_token_counts_are_kept_as_tokens_come() -> None:
    generator = np.random.default_rng(6)
    prompt, output = generator.integers(0, 300, 200).tolist(), generator.integers(0, 500, 400).tolist()
    counts = TokenCounts(prompt, output[:150])
    for token in output[150:]:
        counts.add(token)
    assert sorted(counts.ids.tolist()) == sorted({*prompt, *output})
    assert counts.counts.tolist() == [output.count(token) for token in counts.ids.tolist()]
    assert len(entries(counts, prompt=False)) == len(set(output))


def test_entries_have_each_token_once() -> None:
    counts = TokenCounts([7, 3], [3, 3, 9])
    own = entries(counts, {9: 1.5, 4: -2.0}, banned=[4, 7])
    assert own["id"].tolist() == [3, 4, 7, 9]
    assert own["count"].tolist() == [2, -1, 0, 1]
    assert own["bias"].tolist() == [0.0, -math.inf, -math.inf, 1.5]
    assert len(entries()) == 0
