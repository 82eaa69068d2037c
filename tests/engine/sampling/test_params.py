# mypy: disable-error-code="arg-type, var-annotated"
"""From logits to tokens: what is kept, how it is drawn, and that nobody else has a say in it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.sampling.launch import Drawn, TokenCounts
from services.common.errors import FieldInvalid, ForwardFailed
from services.engine.checkpoint.config import ModelConfig
from services.engine.sampling import params as sampling
from services.engine.sampling.params import SamplingParams, choose, sample, validate
from services.engine.sampling.result import Choice

DEFAULTS = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=64,
    layers=1,
    query_heads=1,
    kv_heads=1,
    head_dim=64,
    intermediate_size=64,
    max_context=64,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    eos_token_ids=(0,),
    bos_token_id=0,
)


def params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> SamplingParams:
    return SamplingParams(temperature, top_k, top_p, min_p, seed)


def logits_of(*chances: float) -> NDArray[np.float32]:
    """A row whose softmax is ``chances``."""
    return np.log(np.array([chances], np.float64)).astype(np.float32)


def draw(row: NDArray[np.float32], p: SamplingParams, times: int) -> NDArray[np.int64]:
    """How often each token comes in ``times`` positions."""
    tokens = sample(np.repeat(row, times, axis=0), [p] * times, range(times))
    return np.bincount(np.array(tokens), minlength=row.shape[1])


def kept(row: NDArray[np.float32], p: SamplingParams, times: int = 600) -> set[int]:
    """The tokens that come. One of a tenth is missed by a chance of 1e-27."""
    return set(np.flatnonzero(draw(row, p, times)).tolist())


def chi_square(observed: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    expected = chances * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


# --- greedy ----------------------------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first() -> None:
    row = np.array([[1, 3, 3, -2, 3]], np.float32)
    for seed in range(5):
        assert sample(row, [params(0.0, seed=seed)], [seed]) == [1]
    assert sample(np.zeros((1, 9), np.float32), [params(0.0)], [0]) == [0]
    # Greedy does not look at the filters.
    assert sample(row, [params(0.0, top_k=2, top_p=0.1, min_p=0.9)], [0]) == [1]


def test_a_tiny_temperature_is_all_but_greedy() -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((50, 300), np.float32) * 30
    assert sample(rows, [params(5e-324)] * 50, range(50)) == rows.argmax(axis=1).tolist()


# --- distribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 100.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    row = np.random.default_rng(1).standard_normal((1, 20), np.float32) * 2
    chances = np.exp(row[0].astype(np.float64) / temperature)
    chances /= chances.sum()
    likely = chances > 1e-3
    observed = draw(row, params(temperature, seed=11), 20_000)
    both = np.append(chances[likely], chances[~likely].sum() + 1e-12)
    assert chi_square(np.append(observed[likely], observed[~likely].sum()), both) < 50  # 20 degrees: 1 in 5,000
    # And the test can tell another temperature.
    other = np.exp(row[0].astype(np.float64) / (temperature * 1.3))
    if temperature < 100:
        assert chi_square(observed[likely], other[likely] / other[likely].sum()) > 50


def test_what_a_filter_leaves_keeps_its_proportions() -> None:
    row = logits_of(0.4, 0.1, 0.2, 0.3)
    for p in (params(top_k=2, seed=3), params(top_p=0.6, seed=3), params(min_p=0.6, seed=3)):
        observed = draw(row, p, 6000)
        assert observed[1] == observed[2] == 0
        assert chi_square(observed[[0, 3]], np.array([4 / 7, 3 / 7])) < 15


def test_seeds_and_positions_give_independent_draws() -> None:
    row = np.zeros((1, 16), np.float32)
    by_position = sample(np.repeat(row, 8000, axis=0), [params(seed=5)] * 8000, range(8000))
    by_seed = sample(np.repeat(row, 8000, axis=0), [params(seed=s) for s in range(8000)], [5] * 8000)
    even = np.full(16, 1 / 16)
    for tokens in (by_position, by_seed):
        assert chi_square(np.bincount(np.array(tokens), minlength=16), even) < 40  # 15 degrees: 1 in 2,000
    pairs = np.array(by_position[:-1]) * 16 + np.array(by_position[1:])
    assert chi_square(np.bincount(pairs, minlength=256), np.full(256, 1 / 256)) < 340
    assert by_position != by_seed


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "p,expected",
    [
        (params(top_k=1), {3}),
        (params(top_k=2), {0, 3}),
        (params(top_k=4), {0, 1, 2, 3}),
        (params(top_k=5), {0, 1, 2, 3}),
        (params(top_k=2**31 - 1), {0, 1, 2, 3}),
        (params(top_p=1e-9), {3}),
        (params(top_p=0.39), {3}),
        (params(top_p=0.41), {0, 3}),
        (params(top_p=0.69), {0, 3}),
        (params(top_p=0.71), {0, 2, 3}),
        (params(top_p=1.0), {0, 1, 2, 3}),
        (params(min_p=0.999), {3}),
        (params(min_p=0.74), {0, 3}),
        (params(min_p=0.76), {3}),
        (params(min_p=0.24), {0, 1, 2, 3}),
        (params(min_p=0.26), {0, 2, 3}),
        # top_p counts in what top_k left: 0.4 of 0.7 is 0.57.
        (params(top_k=2, top_p=0.56), {3}),
        (params(top_k=2, top_p=0.58), {0, 3}),
        (params(top_k=3, top_p=0.8, min_p=0.74), {0, 3}),
        # Temperature first: the square flattens 0.4 : 0.3 : 0.2 : 0.1 to ratios of 1 : 0.75 ** 0.5 and so on.
        (params(2.0, min_p=0.74), {0, 3}),
        (params(2.0, min_p=0.70), {0, 2, 3}),
    ],
    ids=str,
)
def test_which_tokens_are_kept(p: SamplingParams, expected: set[int]) -> None:
    assert kept(logits_of(0.3, 0.1, 0.2, 0.4), p) == expected


def test_of_equal_tokens_the_lower_ids_are_kept() -> None:
    row = np.array([[0, 5, 5, 5, 5, 5, 0]], np.float32)
    assert kept(row, params(top_k=2)) == {1, 2}
    assert kept(row, params(top_k=2, seed=9)) == {1, 2}
    assert kept(row, params(top_p=0.55)) == {1, 2, 3}
    assert kept(row, params(min_p=0.99)) == {1, 2, 3, 4, 5}
    # -0.0 and 0.0 are equal.
    assert kept(np.array([[-0.0, 0.0, -0.0, -3]], np.float32), params(top_k=1)) == {0}


def test_one_token_may_be_all_there_is() -> None:
    assert sample(np.zeros((1, 1), np.float32), [params(top_k=3, top_p=0.5, min_p=0.5)], [0]) == [0]


def slow(row: NDArray[np.float32], p: SamplingParams) -> set[int]:
    """The tokens kept, by the definition of each filter in turn."""
    chances = {i: math.exp((float(x) - float(row.max())) / p.temperature) for i, x in enumerate(row)}
    ranked = sorted(chances, key=lambda i: (-float(row[i]), i))
    ranked = ranked[: p.top_k] if p.top_k else ranked
    whole, found, reached = sum(chances[i] for i in ranked), [], 0.0
    for i in ranked:
        if found and reached >= p.top_p * whole:
            break
        found.append(i)
        reached += chances[i]
    return {i for i in found if chances[i] >= p.min_p * max(chances[i] for i in found)}


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.11, 0.52]),
)
def test_only_what_the_definitions_keep_is_drawn(
    row: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits, p = np.array([row], np.float32) / 8, params(temperature, top_k, top_p, min_p, seed=4)
    expected = slow(logits[0], p)
    drawn = kept(logits, p, 300)
    assert drawn <= expected
    chances = np.exp((logits[0] - logits.max()) / temperature)
    likely = {i for i in expected if chances[i] > 0.2 * sum(chances[j] for j in expected)}
    assert likely <= drawn  # missed by a chance of 1e-29


def test_each_token_has_its_half_open_share_of_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {0: 0, 2**63 - 1: 0, 2**63: 1, 2**64 - 1: 1}
    monkeypatch.setattr("kernels.sampling.philox.bits", lambda seeds, positions: np.array(list(drawn), np.uint64))
    assert sample(np.zeros((4, 2), np.float32), [params()] * 4, range(4)) == list(drawn.values())


# --- independence ----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_row_is_drawn_the_same_in_any_company(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    rows = np.random.default_rng(n).standard_normal((n, 257), np.float32) * 3
    choice = st.builds(
        params,
        st.sampled_from([0.0, 0.7, 1.0]),
        st.sampled_from([0, 1, 40]),
        st.sampled_from([0.5, 0.9, 1.0]),
        st.sampled_from([0.0, 0.05]),
        st.integers(0, 2**64 - 1),
    )
    several = [data.draw(choice) for _ in range(n)]
    positions = [data.draw(st.integers(0, 10_000)) for _ in range(n)]
    alone = [sample(rows[i : i + 1], [several[i]], [positions[i]])[0] for i in range(n)]
    order = data.draw(st.permutations(range(n)))
    together = sample(rows[order], [several[i] for i in order], [positions[i] for i in order])
    assert together == [alone[i] for i in order]


def test_all_64_bits_of_the_seed_count() -> None:
    rows = np.zeros((1, 4096), np.float32)
    drawn = [sample(rows, [params(seed=1 << bit)], [0])[0] for bit in range(64)]
    assert len(set(drawn)) > 55


def test_no_rows() -> None:
    assert sample(np.zeros((0, 8), np.float32), [], []) == []


# --- bad logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(bad: float, temperature: float) -> None:
    rows = np.random.default_rng(2).standard_normal((4, 50), np.float32)
    several = [params(0.0), params(temperature), params(1.0), params(0.0)]
    good = sample(rows, several, range(10, 14))
    rows[1, 17] = bad
    found = sample(rows, several, range(10, 14))
    assert isinstance(found[1], ForwardFailed)
    assert "position 11" in found[1].message
    assert found[:1] + found[2:] == good[:1] + good[2:]


def test_extreme_but_finite_logits_are_drawn_from() -> None:
    largest = np.finfo(np.float32).max
    row = np.array([[-largest, largest, 0, largest]], np.float32)
    assert kept(row, params(100.0)) == {1, 3}


# --- penalties, biases, bans, log probabilities ----------------------------------------------------------------------


def test_penalties_look_at_the_tokens_so_far() -> None:
    rows = np.array([[2.0, 1.9, 1.8]] * 4, np.float32)
    several = [
        dataclasses.replace(params(0.0), presence_penalty=0.15),
        dataclasses.replace(params(0.0), frequency_penalty=0.15),
        dataclasses.replace(params(0.0), repetition_penalty=1.2),
        params(0.0),
    ]
    # Token 0 in the output, twice; token 1 in the prompt.
    counts = [TokenCounts([1], [0, 0]) for _ in several]
    assert sample(rows, several, range(4), counts) == [1, 1, 2, 0]
    counts[0].add(1)
    assert sample(rows, several, range(4), counts) == [0, 1, 2, 0]


def test_penalties_without_counts_are_a_mistake() -> None:
    penalised = dataclasses.replace(params(), frequency_penalty=0.1)
    for counts in (None, [None, None]):
        with pytest.raises(ValueError, match="row 1 has penalties"):
            sample(np.zeros((2, 4), np.float32), [params(), penalised], [0, 1], counts)


def test_biases_and_bans_are_of_their_row() -> None:
    rows = np.array([[2.0, 1.0, 0.0]] * 4, np.float32)
    biased = dataclasses.replace(params(0.0), logit_bias=((1, 1.5), (2, 1.0)))
    several = [params(0.0), biased, params(0.0), biased]
    assert sample(rows, several, range(4)) == [0, 1, 0, 1]
    assert sample(rows, several, range(4), banned=[(), (), (0,), {0, 1}]) == [0, 1, 1, 2]
    found = sample(rows, several, range(4), banned=[(), (2, 1, 0), (0,), (1,)])
    assert isinstance(found[1], FieldInvalid)
    assert "position 1" in found[1].message
    assert found[:1] + found[2:] == [0, 1, 0]


def test_what_is_told_of_a_choice() -> None:
    rows = np.log(np.array([[0.5, 0.3, 0.2]] * 4, np.float64)).astype(np.float32)
    rows[3, 0] = np.nan
    wanted = [dataclasses.replace(params(0.0), logit_bias=((0, -50.0),), logprobs=n) for n in (None, 0, 2, 2)]
    unasked, alone, two, bad = choose(rows, wanted, [4, 5, 6, 7])
    assert unasked == Choice(1)
    assert isinstance(alone, Choice)
    assert (alone.token, alone.rank, alone.top) == (1, 2, ())
    assert alone.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert isinstance(two, Choice)
    assert [token for token, _ in two.top] == [0, 1]
    assert [value for _, value in two.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)
    assert isinstance(bad, ForwardFailed)
    # More than there are.
    many = choose(rows[:1], [dataclasses.replace(params(), logprobs=20)], [0])[0]
    assert isinstance(many, Choice)
    assert [token for token, _ in many.top] == [0, 1, 2]


def test_another_sampler_draws_of_the_same_arrays() -> None:
    def last(logits: Any, batch: Any) -> Drawn:
        n = len(batch.rows)
        none = np.zeros((n, 0))
        tokens = batch.rows["position"].astype(np.int32) + logits
        errors = np.zeros(n, np.int32)
        return Drawn(tokens, errors, none[:, :0], none, none, none)

    assert sample(100, [params(), params(0.0)], [3, 4], draw=last) == [103, 104]
    assert choose(100, [params()], [3], draw=last) == [Choice(103)]


# --- validation ------------------------------------------------------------------------------------------------------


def checked(defaults: ModelConfig = DEFAULTS, **given: Any) -> SamplingParams:
    unset: dict[str, Any] = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed"))
    return validate(**(unset | given), defaults=defaults)


def test_unset_fields_take_the_models_defaults_then_the_protocols() -> None:
    plain = checked(seed=1)
    assert plain == params(1.0, 0, 1.0, 0.0, 1)
    model = dataclasses.replace(DEFAULTS, default_temperature=0.6, default_top_k=40, default_top_p=0.9)
    assert checked(model, seed=1) == params(0.6, 40, 0.9, 0.0, 1)
    assert checked(model, temperature=0.0, top_k=0, top_p=1.0, min_p=0.1, seed=0) == params(0.0, 0, 1.0, 0.1, 0)
    greedy = dataclasses.replace(DEFAULTS, default_temperature=0.0)
    assert checked(greedy).temperature == 0


def test_an_unset_seed_is_drawn() -> None:
    seeds = {checked().seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) > 2**56
    assert max(seeds) < 2**64


@pytest.mark.parametrize(
    "name,bad,limit",
    [
        ("temperature", math.nan, "100"),
        ("temperature", -0.1, "100"),
        ("temperature", 100.1, "100"),
        ("temperature", math.inf, "100"),
        ("top_p", 0.0, "1"),
        ("top_p", 1.0001, "1"),
        ("top_p", -1.0, "1"),
        ("top_p", math.nan, "1"),
        ("min_p", 1.0, "1"),
        ("min_p", -0.01, "1"),
        ("min_p", math.nan, "1"),
        ("top_k", 2**31, "2147483647"),
        ("top_k", -1, "2147483647"),
        ("seed", 2**64, "18446744073709551615"),
        ("seed", -1, "18446744073709551615"),
        ("repetition_penalty", 0.0, "100"),
        ("repetition_penalty", -1.0, "100"),
        ("repetition_penalty", 100.5, "100"),
        ("repetition_penalty", math.nan, "100"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("presence_penalty", -2.1, "-2 to 2"),
        ("presence_penalty", math.nan, "-2 to 2"),
        ("frequency_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -math.inf, "-2 to 2"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
    ],
)
def test_what_is_out_of_range_is_said_with_its_field_and_limit(name: str, bad: float, limit: str) -> None:
    with pytest.raises(FieldInvalid, match=limit) as caught:
        checked(**{name: bad})
    assert caught.value.field == f"sampling.{name}"
    assert str(bad) in caught.value.message


@pytest.mark.parametrize(
    "name,edges",
    [
        ("temperature", (0.0, 100.0)),
        ("top_p", (1e-30, 1.0)),
        ("min_p", (0.0, 0.999999)),
        ("top_k", (0, 2**31 - 1)),
        ("seed", (0, 2**64 - 1)),
        ("repetition_penalty", (1e-30, 100.0)),
        ("presence_penalty", (-2.0, 2.0)),
        ("frequency_penalty", (-2.0, 2.0)),
        ("logprobs", (0, 20)),
    ],
)
def test_the_limits_themselves_are_allowed(name: str, edges: tuple[float, float]) -> None:
    for edge in edges:
        p = checked(**{"seed": 1, name: edge})
        assert getattr(p, name) == edge
        counts = [TokenCounts([0, 1], [1, 2])]
        assert isinstance(sample(np.zeros((1, 5), np.float32), [p], [3], counts)[0], int)


def test_logit_biases_have_limits_of_their_own() -> None:
    for bias in ({128: 1.0}, {-1: 1.0}):
        with pytest.raises(FieldInvalid, match=r"logit_bias has token -?1\d*; the vocabulary has 128 tokens") as caught:
            checked(logit_bias=bias)
        assert caught.value.field == f"sampling.logit_bias[{next(iter(bias))}]"
    for value in (100.5, -101.0, math.nan, math.inf):
        with pytest.raises(FieldInvalid, match=r"token 7 is .*; it must be -100 to 100") as caught:
            checked(logit_bias={3: 1.0, 7: value})
        assert caught.value.field == "sampling.logit_bias[7]"
    large = dataclasses.replace(DEFAULTS, vocab_size=5000)
    with pytest.raises(FieldInvalid, match="has 1025 tokens; at most 1024") as caught:
        checked(large, logit_bias=dict.fromkeys(range(1025), 0.5))
    assert caught.value.field == "sampling.logit_bias"
    assert len(checked(large, logit_bias=dict.fromkeys(range(1024), 0.5)).logit_bias) == 1024
    assert checked(logit_bias={9: -100, 2: 100}).logit_bias == ((2, 100.0), (9, -100.0))


def test_what_is_new_is_off_unless_asked_for() -> None:
    plain = checked(seed=1)
    assert (plain.repetition_penalty, plain.presence_penalty, plain.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (plain.logit_bias, plain.logprobs) == ((), None)
    assert not plain.counts_tokens
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert checked(**{name: 0.5}).counts_tokens
    assert sampling.MAX_LOGPROBS == 20
