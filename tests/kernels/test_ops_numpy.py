"""Every op against its definition in float64, and the bits that must not depend on company."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels import ops_numpy as ops
from tests.kernels.numbers import rope_angles


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """No op divides by zero, overflows or meets NaN in what it was given to compute."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- elementwise -----------------------------------------------------------------------------------------------------


def test_rms_norm_scales_each_row() -> None:
    x, weight = normal(5, 48), normal(48, seed=1)
    normed, total = ops.rms_norm(x, weight, 1e-5)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.abs(normed - expected).max() < 1e-6
    assert total is x


def test_rms_norm_adds_the_residual_first() -> None:
    x, residual, weight = normal(3, 16), normal(3, 16, seed=1), normal(16, seed=2)
    normed, total = ops.rms_norm(x, weight, 1e-6, residual)
    assert np.array_equal(total, x + residual)
    assert np.array_equal(normed, ops.rms_norm(x + residual, weight, 1e-6)[0])


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not ops.rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), 1e-6)[0].any()


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80])
def test_rope_turns_each_pair_by_its_angle(head_dim: int) -> None:
    positions = np.array([0, 1, 7, 1000])
    x = normal(4, 3, head_dim)
    cosine, sine = rope_angles(positions, head_dim, 10000.0)
    assert cosine.shape == sine.shape == (4, head_dim // 2)
    turned = ops.rope(x, cosine, sine)
    half = head_dim // 2
    angles = positions[:, None] * 10000.0 ** (-2 * np.arange(half) / head_dim)
    expected = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    # At position 1000 an angle rounded to float32 is off by 3e-5.
    assert np.abs(turned[..., :half] - expected.real).max() < 2e-4
    assert np.abs(turned[..., half:] - expected.imag).max() < 2e-4
    assert np.array_equal(turned[0], x[0])


def test_silu_mul_at_the_ends_of_the_range() -> None:
    gate = np.array([[-1e4, -100, -1, 0, 1, 100, 1e4]], np.float32)
    up = np.full_like(gate, 2)
    wide = gate.astype(np.float64)
    expected = 2 * wide / (1 + np.exp(-np.clip(wide, -700, 700)))
    found = ops.silu_mul(np.concatenate([gate, up], axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-30)


def test_write_kv_touches_its_slots_alone() -> None:
    pages = np.full((4, 3, 2, 2, 5, 6), np.nan, np.float32)
    k, v = normal(3, 2, 6), normal(3, 2, 6, seed=1)
    page, slot = np.array([3, 0, 3]), np.array([4, 2, 0])
    ops.write_kv(k, v, pages, 1, page, slot)
    for i in range(3):
        assert np.array_equal(pages[page[i], 1, 0, :, slot[i]], k[i])
        assert np.array_equal(pages[page[i], 1, 1, :, slot[i]], v[i])
    assert np.count_nonzero(~np.isnan(pages)) == k.size + v.size


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_kv_adds_normalises_and_rotates_in_this_order(biased: bool, normed: bool) -> None:
    n, q_heads, kv_heads, dim = 9, 6, 2, 16
    qkv = normal(n, q_heads + 2 * kv_heads, dim)
    bias = normal((q_heads + 2 * kv_heads) * dim, seed=1) if biased else None
    norms = (normal(dim, seed=2), normal(dim, seed=3)) if normed else None
    positions, page, slot = np.arange(100, 100 + n), np.arange(n) // 4, np.arange(n) % 4
    angles = rope_angles(positions, dim, 10000.0)
    before = qkv.copy()
    pages = np.full((3, 2, 2, kv_heads, 4, dim), np.nan, np.float32)
    found = ops.rope_write_kv(qkv, angles, pages, 1, (page, slot), q_heads, bias, norms, 1e-5)
    assert np.array_equal(qkv, before)

    heads = before.astype(np.float64)
    if bias is not None:
        heads = heads + bias.reshape(-1, dim)
    if norms is not None:
        factors = np.repeat(np.stack(norms), [q_heads, kv_heads], axis=0)
        scaled = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-5)
        heads[:, : q_heads + kv_heads] = (scaled[:, : q_heads + kv_heads]) * factors
    turned = ops.rope(heads.astype(np.float32), *angles)
    assert np.abs(found - turned[:, :q_heads]).max() < 1e-5
    for i in range(n):
        assert np.abs(pages[page[i], 1, 0, :, slot[i]] - turned[i, q_heads : q_heads + kv_heads]).max() < 1e-5
        assert np.abs(pages[page[i], 1, 1, :, slot[i]] - heads[i, q_heads + kv_heads :]).max() < 1e-5
        # What a token gets does not depend on its company.
        alone = ops.rope_write_kv(
            before[i : i + 1], (angles[0][i : i + 1], angles[1][i : i + 1]), np.empty_like(pages), 1,
            (page[i : i + 1], slot[i : i + 1]), q_heads, bias, norms, 1e-5,
        )  # fmt: skip
        assert np.array_equal(alone[0], found[i])
    assert np.isnan(pages[:, 0]).all()


def test_a_rope_table_of_many_positions_is_that_of_each() -> None:
    frequencies = ops.rope_frequencies(8, 10000.0)
    table = ops.rope_table(frequencies, 40_000)
    some = np.array([0, 1, 16383, 16384, 16385, 39_999])
    angles = (some.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    for found, exact in zip(ops.rotation(table, some), (np.cos(angles), np.sin(angles)), strict=True):
        assert np.array_equal(found, exact.astype(np.float32))
    assert table[0].shape == table[1].shape == (40_000, 4)


def test_a_weight_may_be_the_memory_it_is_given() -> None:
    given = normal(3, 4)
    norm = np.asarray(ops.weight(given[0], "f32"))
    assert np.shares_memory(norm, given) and np.array_equal(norm, given[0])
    expected = given.astype(np.float16).astype(np.float32)
    assert np.array_equal(ops.take(ops.weight(given.astype(np.float16), "f32"), np.arange(3)), expected)
    with pytest.raises(ValueError, match="bf16 weights are not supported on a CPU"):
        ops.weight(given, "bf16")


def test_copy_and_zero_page_touch_their_page_alone() -> None:
    pages = normal(4, 2, 2, 1, 3, 4)
    before = pages.copy()
    ops.copy_page(pages, 1, 3)
    ops.zero_page(pages, 0)
    assert np.array_equal(pages[3], before[1])
    assert not pages[0].any()
    assert np.array_equal(pages[1:3], before[1:3])


# --- attention -------------------------------------------------------------------------------------------------------


class Rows:
    """Random rows over an arena in which all that no row has written is NaN."""

    def __init__(
        self,
        starts: list[int],
        lengths: list[int],
        page_size: int,
        query_heads: int,
        kv_heads: int,
        dim: int,
        seed: int,
    ) -> None:
        generator = np.random.default_rng(seed)
        self.starts, self.lengths = np.array(starts), np.array(lengths)
        ends = self.starts + self.lengths
        counts = -(-ends // page_size)
        self.pages = np.full((int(counts.sum()) + 1, 2, 2, kv_heads, page_size, dim), np.nan, np.float32)
        free = generator.permutation(len(self.pages))
        self.tables = np.full((len(ends), int(counts.max())), -1)
        self.keys, self.values = [], []
        for row, end in enumerate(ends):
            self.tables[row, : counts[row]], free = free[: counts[row]], free[counts[row] :]
            k, v = (generator.standard_normal((end, kv_heads, dim), np.float32) for _ in range(2))
            page, slot = self.tables[row, np.arange(end) // page_size], np.arange(end) % page_size
            ops.write_kv(k, v, self.pages, 1, page, slot)
            self.keys.append(k)
            self.values.append(v)
        self.q = generator.standard_normal((int(self.lengths.sum()), query_heads, dim), np.float32)

    def attend(self) -> NDArray[np.float32]:
        plan = ops.attention_plan(self.tables, self.starts, self.lengths, self.pages, self.q.shape[1])
        return ops.paged_attention(self.q, self.pages, 1, plan, self.q.shape[2] ** -0.5)

    def definition(self) -> NDArray[np.float64]:
        out, at = np.empty(self.q.shape), 0
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            k, v = self.keys[row].astype(np.float64), self.values[row].astype(np.float64)
            group = self.q.shape[1] // k.shape[1]
            mine = slice(at, at + length)
            at += length
            hidden = np.arange(start + length) > np.arange(start, start + length)[:, None]
            for head in range(self.q.shape[1]):
                scores = self.q[mine, head] @ k[:, head // group].T * self.q.shape[2] ** -0.5
                scores[hidden] = -np.inf
                chances = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[mine, head] = chances / chances.sum(axis=1, keepdims=True) @ v[:, head // group]
        return out


HEADS = [(4, 2), (4, 4), (4, 1), (6, 2), (3, 1), (8, 1), (1, 1), (10, 2)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40) | st.just(1)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 8, 16, 24, 128, 200, 256]),
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from([2, 16, 64]),
    seed=st.integers(0, 99),
)
def test_paged_attention_is_what_its_definition_says(
    rows: list[tuple[int, int]], page_size: int, heads: tuple[int, int], dim: int, seed: int
) -> None:
    starts, lengths = (list(column) for column in zip(*rows, strict=True))
    case = Rows(starts, lengths, page_size, *heads, dim, seed)
    assert np.abs(case.attend() - case.definition()).max() < 2e-5


@pytest.mark.parametrize("end", [1, 2, 127, 128, 129, 255, 256, 257])
def test_paged_attention_at_the_edges_of_tiles(end: int) -> None:
    for start in {0, end - 1, end // 2}:
        case = Rows([start], [end - start], 16, 4, 2, 8, seed=end)
        assert np.abs(case.attend() - case.definition()).max() < 2e-5


def test_paged_attention_survives_scores_that_overflow_exp() -> None:
    case = Rows([0, 140], [150, 1], 16, 4, 2, 8, seed=1)
    case.q *= 1000
    assert np.abs(case.attend() - case.definition()).max() < 1e-3


def test_one_plan_serves_every_layer() -> None:
    case = Rows([5, 0], [3, 20], 4, 4, 2, 8, seed=3)
    plan = ops.attention_plan(case.tables, case.starts, case.lengths, case.pages, 4)
    case.pages[:, 0] = case.pages[:, 1] * 3
    lower, upper = (ops.paged_attention(case.q, case.pages, layer, plan, 1.0) for layer in (0, 1))
    again = ops.paged_attention(case.q * 3, case.pages, 1, plan, 1.0) * 3
    assert not np.allclose(lower, upper, atol=1e-2)
    np.testing.assert_allclose(lower, again, rtol=1e-4, atol=1e-4)
