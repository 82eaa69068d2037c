# mypy: disable-error-code="arg-type"
"""sampling.hip draws, on every device, the very tokens that NumPy draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.sampling import launch, philox, reference
from kernels.sampling.launch import (
    MAX_VOCAB,
    NOT_FINITE,
    NOTHING_LEFT,
    Batch,
    Drawn,
    Sampler,
    TokenCounts,
    entries,
    settings,
)
from services.engine.sampling.params import batch, certain
from tests.kernels.devices import Device

KINDS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
LARGEST = float(np.finfo(np.float32).max)


#: Of a block: two waves at least, and as few as that shows what there is to see. A CPU is slow at many.
THREADS = 128


@functools.cache
def sampler(device: Device, kind: str, vocab_size: int, threads: int = THREADS) -> Sampler:
    return Sampler(device, kind, vocab_size, threads)


def agree(
    device: Device,
    logits: NDArray[Any],
    batch: Batch,
    kind: str = "F32",
    padding: int = 0,
    threads: int = THREADS,
) -> Drawn:
    """Draw on the device and in NumPy, compare all of it, and return it; each row is followed by ``padding`` NaNs."""
    n, vocab_size = logits.shape
    logits = logits.astype(KINDS[kind])
    there = np.full((n, vocab_size + padding), np.nan, KINDS[kind])
    there[:, :vocab_size] = logits
    array = device.array(there)
    expected = reference.sample(logits, batch)
    found = sampler(device, kind, vocab_size, threads).sample(array, batch, vocab_size + padding)
    for name in ("errors", "tokens", "ranks", "top_ids"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in ("logprobs", "top_logprobs"):
        near = np.testing.assert_allclose
        near(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=2e-6, err_msg=name)
    # A NaN that goes through a float may come back as another NaN.
    after = device.get(array)
    assert np.array_equal(after.astype(np.float32), there.astype(np.float32), equal_nan=True), "the logits have changed"
    return expected


def asked_of(generator: np.random.Generator, n: int, **fixed: Any) -> list[bytes]:
    """Settings of n rows, of every kind."""
    return [
        settings(
            **{
                "seed": int(generator.integers(2**63)),
                "temperature": float(generator.choice([0.0, 0.2, 0.7, 1.0, 1.0, 2.5, 100.0])),
                "top_k": int(generator.choice([0, 0, 1, 2, 50, 1000, 2**31 - 1])),
                "top_p": float(generator.choice([1.0, 1.0, 1e-9, 0.5, 0.9, 0.99, 1 - 2**-53])),
                "min_p": float(generator.choice([0.0, 0.0, 1e-9, 0.02, 0.5])),
            }
            | fixed
        )
        for _ in range(n)
    ]


# --- the filters and the draw -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size,n", [(1, 20), (2, 40), (31, 300), (1000, 300), (1027, 100), (32003, 10)])
def test_random_rows(device: Device, vocab_size: int, n: int) -> None:
    generator = np.random.default_rng(vocab_size)
    rows = generator.standard_normal((n, vocab_size)) * generator.choice([0.01, 1.0, 3.0, 20.0], (n, 1))
    rows += generator.choice([0.0, -30.0, 100.0], (n, 1))
    agree(device, rows, Batch.of(asked_of(generator, n), generator.integers(0, 2**40, n).tolist()))


@pytest.mark.parametrize("threads", [64, 512, launch.THREADS])
def test_blocks_of_any_size_draw_the_same(device: Device, threads: int) -> None:
    generator = np.random.default_rng(threads)
    rows = generator.standard_normal((12, 5001)) * 3
    own = own_of(generator, 12, 5001)
    agree(device, rows, Batch.of(asked_of(generator, 12, logprobs=5), range(12), own), threads=threads)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("padding", [0, 1, 8])
def test_logits_of_16_bits(device: Device, kind: str, padding: int) -> None:
    generator = np.random.default_rng(padding)
    rows = generator.standard_normal((40, 1003)) * 3
    records = asked_of(generator, 40, logprobs=3, repetition_penalty=1.3, frequency_penalty=0.1)
    own = [entries(TokenCounts(range(i), [7, 7, i]), {i: 1.5}) for i in range(40)]
    agree(device, rows, Batch.of(records, range(40), own), kind, padding)


def test_a_certain_token_is_drawn_whatever_the_logits_are_and_told_of_as_it_was(device: Device) -> None:
    generator = np.random.default_rng(7)
    rows = generator.standard_normal((6, 1003)) * np.array([[1.0], [1e-30], [1e4], [1e30], [1e37], [20.0]])
    tokens = generator.integers(0, 1003, 6).tolist()
    wanted = [certain(token, 3) for token in tokens]
    drawn = agree(device, rows, batch(wanted, range(6)))
    assert drawn.tokens.tolist() == tokens
    highest = rows.max(axis=1)
    exact = rows[range(6), tokens] - highest - np.log(np.exp(rows - highest[:, None]).sum(axis=1))
    np.testing.assert_allclose(drawn.logprobs[[0, 1, 5]], exact[[0, 1, 5]], rtol=1e-5, atol=1e-5)
    assert drawn.ranks.tolist() == [1 + int((row > row[token]).sum()) for row, token in zip(rows, tokens, strict=True)]


def test_ties_are_cut_by_id(device: Device) -> None:
    generator = np.random.default_rng(1)
    n, vocab_size = 120, 3000
    rows = generator.integers(0, generator.choice([1, 2, 3, 40], (n, 1)), (n, vocab_size)) * 0.25
    rows[: n // 2] *= -1
    records = asked_of(generator, n, logprobs=20)
    agree(device, rows, Batch.of(records, range(n)))


def test_one_likely_token_and_the_rest_far_below(device: Device) -> None:
    generator = np.random.default_rng(2)
    n, vocab_size = 60, 700
    rows = generator.standard_normal((n, vocab_size)) * 1e-3
    likely = generator.integers(0, vocab_size, n)
    rows[np.arange(n), likely] = generator.choice([5.0, 29.0, 60.0, 1e4, LARGEST], n)
    rows[: n // 3] -= 1e5
    records = asked_of(generator, n, logprobs=20)
    agree(device, rows, Batch.of(records, range(n)))


def test_the_ends_of_what_floats_can_be(device: Device) -> None:
    rows = np.zeros((6, 64), np.float32)
    rows[0, ::2] = LARGEST
    rows[0, 1::2] = -LARGEST
    rows[1] = -LARGEST
    rows[2] = np.arange(64) * 1e-40  # below the normal numbers
    rows[3] = (np.arange(64) - 32) * 2e-38
    rows[4, 1::2] = -0.0
    rows[5] = np.nextafter(np.float32(1), np.float32(2)) ** np.arange(64, dtype=np.float32)
    for asked in (
        {"temperature": 0.0},
        {"temperature": 5e-324},
        {"temperature": 1e-35},
        {"temperature": 100.0, "top_k": 33},
        {"top_k": 5, "top_p": 0.3},
        {"temperature": 1e-6, "top_p": 0.7},
    ):
        batch = Batch.of([settings(seed=seed, logprobs=20, **asked) for seed in range(6)], range(6))
        agree(device, rows, batch)


def test_weights_are_the_same_to_the_last_unit(device: Device) -> None:
    """Of two tokens the second has the random number if min-p keeps it: if it asks for its weight, and not one more."""
    n = 600
    generator = np.random.default_rng(11)
    rows = np.zeros((n, 2), np.float32)
    rows[:, 1] = -generator.uniform(0, 3, n)
    steps = (-rows[:, 1] * np.frombuffer(settings(seed=0), launch.ROW)["scale"]).astype(np.uint32)
    weights = reference.weights(steps)
    tries = np.arange(4000, dtype=np.uint64)
    high = philox.bits(np.full(4000, 5, np.uint64), tries) / 2.0**64 > 0.96
    positions = np.resize(tries[high], n)
    for more in (0, 1):
        records = [settings(seed=5, min_p=(weight + more) / 2**44) for weight in weights.tolist()]
        drawn = agree(device, rows, Batch.of(records, positions.tolist()))
        assert drawn.tokens.tolist() == [1 - more] * n


def test_steps_finer_than_the_logits_are(device: Device) -> None:
    """A coarse bin is narrower than what is between two logits, so that nobody can say beforehand which one it has."""
    generator = np.random.default_rng(12)
    n = 60
    rows = (1e4 - generator.integers(0, 40, (n, 700)) * 2.0**-10).astype(np.float32)
    rows[n // 2 :] *= -1
    temperatures = [0.0005, 0.003, 0.01, 0.04, 0.1]
    records = [
        settings(seed=i, temperature=temperatures[i % 5], top_k=(0, 7, 90)[i % 3], top_p=(0.7, 0.99, 1.0)[i // 3 % 3])
        for i in range(n)
    ]
    agree(device, rows, Batch.of(records, range(n)))


def test_a_flat_and_hot_row_takes_several_rounds(device: Device) -> None:
    """All of it in few coarse bins, so that the cut is found by place, down to single ids."""
    generator = np.random.default_rng(3)
    rows = np.stack([np.full(20000, 1.5), np.round(generator.standard_normal(20000)), generator.standard_normal(20000)])
    asked = [{"top_k": 7777}, {"top_p": 0.3}, {"top_k": 15000, "top_p": 0.61}]
    for one in asked:
        batch = Batch.of([settings(seed=seed, temperature=100.0, logprobs=20, **one) for seed in range(3)], range(3))
        agree(device, rows, batch)


def test_the_largest_vocabulary(device: Device) -> None:
    generator = np.random.default_rng(4)
    rows = np.stack([np.zeros(MAX_VOCAB), generator.standard_normal(MAX_VOCAB)])
    records = [settings(seed=1, top_k=MAX_VOCAB - 1), settings(seed=2, temperature=2.0, top_p=0.95, logprobs=20)]
    drawn = agree(device, rows, Batch.of(records, [5, 6]))
    assert drawn.tokens[0] > 1000  # the numbers are wide enough: not all falls on the first ids
    assert drawn.logprobs[1] < -5


def test_a_token_depends_on_its_row_alone(device: Device) -> None:
    generator = np.random.default_rng(5)
    rows = (generator.standard_normal((12, 400)) * 2).astype(np.float32)
    records, positions = asked_of(generator, 12, temperature=1.0), generator.integers(0, 99, 12).tolist()
    together = agree(device, rows, Batch.of(records, positions)).tokens
    order = generator.permutation(12)
    shuffled = agree(device, rows[order], Batch.of([records[i] for i in order], [positions[i] for i in order])).tokens
    assert np.array_equal(shuffled, together[order])
    alone = agree(device, rows[7:8], Batch.of(records[7:8], positions[7:8])).tokens
    assert alone[0] == together[7]


# --- what is changed before -------------------------------------------------------------------------------------------


def own_of(generator: np.random.Generator, n: int, vocab_size: int) -> list[NDArray[np.void]]:
    def tokens(most: int) -> list[int]:
        return generator.integers(0, vocab_size, generator.integers(0, most)).tolist()

    return [
        entries(
            TokenCounts(tokens(3000), tokens(50)) if generator.random() < 0.8 else None,
            {token: float(generator.uniform(-100, 100)) for token in tokens(30)} if generator.random() < 0.5 else None,
            tokens(10) if generator.random() < 0.5 else (),
            prompt=bool(generator.random() < 0.7),
        )
        for _ in range(n)
    ]


def test_penalties_biases_and_bans(device: Device) -> None:
    generator = np.random.default_rng(6)
    n, vocab_size = 150, 999
    rows = generator.standard_normal((n, vocab_size)) * 4
    records = [
        settings(
            seed=i,
            temperature=float(generator.choice([0.0, 0.7, 1.3])),
            top_k=int(generator.choice([0, 20])),
            top_p=float(generator.choice([1.0, 0.9])),
            repetition_penalty=float(generator.choice([1.0, 0.3, 1.1, 7.0])),
            presence_penalty=float(generator.uniform(-2, 2)),
            frequency_penalty=float(generator.uniform(-2, 2)),
            logprobs=int(generator.integers(0, 21)) if i % 2 else None,
        )
        for i in range(n)
    ]
    agree(device, rows, Batch.of(records, range(n), own_of(generator, n, vocab_size)))


def test_penalties_that_leave_the_range_of_floats(device: Device) -> None:
    rows = np.array([[LARGEST, -LARGEST, 1e-38, -3e-38, 1.0, 0.0]] * 4)
    own = entries(TokenCounts([0, 1, 2, 3, 5], [4]), {0: 100.0, 1: -100.0})
    records = [
        settings(seed=1, temperature=temperature, repetition_penalty=penalty, logprobs=6)
        for temperature in (0.0, 3.0)
        for penalty in (1e-6, 90.0)
    ]
    agree(device, rows, Batch.of(records, range(4), [own] * 4))
    # What the bias leaves of the first is no normal number, and counts as 0 from there on.
    small = np.array([[2e-38, 1e-35, -1.0]])
    own = entries(TokenCounts([0]), {0: -1.5e-38})
    batch = Batch.of([settings(seed=1, temperature=0.0, repetition_penalty=1e-6)], [0], [own])
    assert agree(device, small, batch).tokens.tolist() == [1]


def test_bans_that_leave_one_or_none(device: Device) -> None:
    rows = np.random.default_rng(7).standard_normal((8, 5))
    own = [entries(banned=[0, 1, 3, 4]), entries(banned=range(5))] * 4
    records = [settings(seed=i, temperature=i // 4, top_p=(1.0, 0.5)[i // 2 % 2], logprobs=2) for i in range(8)]
    drawn = agree(device, rows, Batch.of(records, range(8), own))
    assert drawn.tokens.tolist() == [2, 0] * 4
    assert drawn.errors.tolist() == [0, NOTHING_LEFT] * 4


@pytest.mark.parametrize("kind", list(KINDS))
def test_bad_rows_fail_alone(device: Device, kind: str) -> None:
    generator = np.random.default_rng(8)
    n, vocab_size = 36, 300
    rows = generator.standard_normal((n, vocab_size)) * 3
    bad = np.arange(n) % 4 == 1
    at = generator.integers(0, vocab_size, n)
    rows[bad, at[bad]] = np.resize([math.nan, math.inf, -math.inf], bad.sum())
    # Banned, biased or penalised, it is bad all the same.
    own = [[entries(), entries(banned=[t]), entries(None, {t: 1.0})][i // 12] for i, t in enumerate(at.tolist())]
    drawn = agree(device, rows, Batch.of(asked_of(generator, n, logprobs=4), range(n), own), kind)
    assert np.array_equal(drawn.errors == NOT_FINITE, bad)


# --- the host's part --------------------------------------------------------------------------------------------------


def test_rows_ask_for_as_many_log_probabilities_as_each_will(device: Device) -> None:
    generator = np.random.default_rng(9)
    rows = generator.standard_normal((6, 50))
    wanted: Sequence[int | None] = [None, 0, 20, 7, None, 1]
    drawn = agree(device, rows, Batch.of([settings(seed=1, logprobs=one) for one in wanted], range(6)))
    assert np.isnan(drawn.logprobs).tolist() == [True, False, False, False, True, False]
    assert (drawn.top_ids >= 0).sum(axis=1).tolist() == [0, 0, 20, 7, 0, 1]


def test_tokens_are_the_first_words_that_stay_on_the_device(device: Device) -> None:
    rows = np.random.default_rng(10).standard_normal((5, 40)).astype(np.float32)
    batch = Batch.of([settings(seed=i) for i in range(5)], range(5))
    pending = sampler(device, "F32", 40).start(device.array(rows), batch)
    tokens = np.asarray(device.get(pending.out))[:5]
    assert np.array_equal(tokens, pending.wait().tokens)
    assert np.array_equal(tokens, reference.sample(rows, batch).tokens)


def test_no_rows(device: Device) -> None:
    drawn = sampler(device, "F32", 40).sample(device.array(np.zeros(1, np.float32)), Batch.of([], []))
    assert drawn.tokens.shape == (0,)
    assert drawn.top_ids.shape == (0, 0)


def test_a_vocabulary_beyond_the_limit_is_refused(device: Device) -> None:
    for vocab_size in (0, MAX_VOCAB + 1):
        with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB}"):
            Sampler(device, "F32", vocab_size)
