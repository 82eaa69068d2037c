"""Sampling in NumPy: the reference for sampling.hip, and the sampler on a CPU.

A row's tokens are ordered by decreasing logit, ties by increasing id. Greedy takes the first. Else each token has a
*weight*, an integer: 2 ** 44 times ``exp((logit - highest) / temperature)``, rounded down by integer arithmetic that is
the same everywhere. Top-k keeps the first k of the order; top-p the fewest first ones whose weights reach its share of
what top-k kept; min-p those with its share of the first one's weight. The weights kept are laid end to end by rising
id, one random number of (seed, position) points into that line, and the token it falls on is drawn.

**Exactness.** Weights and their sums are integers, so a sum has one value in whatever order it is taken, and a device
draws the very token that this module does. Floating point is used where one operation, rounded correctly, gives the
result: a difference, a product, a conversion; and in double precision for penalties, where products are exact. A zero's
sign and anything below the smallest normal float32 count as 0, for a GPU may flush it. Only log probabilities are
rounded differently from place to place.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kernels.sampling import philox
from kernels.sampling.launch import MAX_VOCAB, NOT_FINITE, NOTHING_LEFT, STEP_BITS, WHOLE_BITS, Batch, Drawn

_TINY = np.finfo(np.float32).tiny
#: Approximate number of elements processed together.
TOGETHER = 1 << 17
#: This many steps below the likeliest, a token's weight is 0.
FAR = WHOLE_BITS << STEP_BITS
#: Steps per difference of 1 at temperature 1, rounded to float32.
_STEPS = np.float32(2**STEP_BITS / np.log(2))
#: ``2 ** -x`` on [0, 1) in 30 bits: ``1 - x (c1 - x (c2 - ...))``, c6 first. A minimax polynomial that is exact at
#: both ends, so weights never rise where logits fall; its relative error, and that of cutting products off, is 7e-9.
_COEFFICIENTS = (116582, 1367404, 10284168, 59582090, 257938816, 744260984, 1 << 30)


def weights(steps: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return ``2 ** 44 * 2 ** -(steps / 2 ** 23)`` rounded down, uint64; ``steps`` are less than `FAR`.

    In float64, which is faster at it than 64-bit integers: 30 bits times 23 bits fit, so all is exact.
    """
    x = (steps & np.uint32(2**STEP_BITS - 1)) * 2.0**-STEP_BITS
    p = np.full(x.shape, float(_COEFFICIENTS[0]))
    for coefficient in _COEFFICIENTS[1:]:
        p *= x
        np.floor(p, out=p)
        np.subtract(float(coefficient), p, out=p)
    return p.astype(np.uint64) << np.uint64(WHOLE_BITS - 30) >> (steps >> np.uint32(STEP_BITS)).astype(np.uint64)


def sample(logits: NDArray[Any], batch: Batch) -> Drawn:
    """Sample a token for each row of ``logits`` ``[n, vocab_size]``, float32, float16 or bfloat16; see `Drawn`.

    A result depends only on its own row, parameters and position. A row that contains NaN or infinity gets the
    error `NOT_FINITE`, one whose tokens are all banned `NOTHING_LEFT`. Raises ValueError for more than `MAX_VOCAB`
    tokens.
    """
    n, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"logits has {vocab_size} columns; it may have 1 to {MAX_VOCAB}")
    most = batch.most_logprobs
    drawn = Drawn(
        np.zeros(n, np.int32),
        np.where(_finite(logits), 0, NOT_FINITE).astype(np.int32),
        np.full(n, np.nan, np.float32),
        np.zeros(n, np.int32),
        np.full((n, max(most, 0)), -1, np.int32),
        np.full((n, max(most, 0)), np.nan, np.float32),
    )
    greedy, adjusts = batch.rows["scale"] == 0, batch.rows["entries"] > 0
    good = drawn.errors == 0
    simple = good & greedy & ~adjusts
    if simple.all():
        drawn.tokens[:] = _first(logits)
    else:
        drawn.tokens[simple] = _first(logits[simple])
    several: list[int] = []
    values: list[NDArray[np.float32]] = []
    for i in (good & ~simple).nonzero()[0].tolist():
        row = batch.rows[i]
        own = batch.entries[row["first_entry"] : row["first_entry"] + row["entries"]]
        if len(own) == vocab_size and (own["bias"] == -np.inf).all():
            drawn.errors[i] = NOTHING_LEFT
            continue
        adjusted = _plain(_adjusted(logits[i], row, own).astype(np.float32))
        if greedy[i]:
            drawn.tokens[i] = np.argmax(adjusted)
            continue
        several.append(i)
        values.append(adjusted)
        if len(several) * vocab_size >= TOGETHER:
            drawn.tokens[several] = _draw(values, batch.rows[several])
            several, values = [], []
    if several:
        drawn.tokens[several] = _draw(values, batch.rows[several])
    if most >= 0:
        for i in ((drawn.errors == 0) & (batch.rows["logprobs"] >= 0)).nonzero()[0].tolist():
            _tell(drawn, i, _plain(logits[i].astype(np.float32)), int(batch.rows[i]["logprobs"]))
    return drawn


def _finite(logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row is entirely finite."""
    return np.isfinite(logits).all(axis=1)


def _plain(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace -0 and subnormal numbers by 0."""
    return np.where(np.abs(values) < _TINY, np.float32(0), values)


def _first(logits: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of each finite row's highest logit, the first of ties."""
    first = np.argmax(logits, axis=1)
    highest = logits[np.arange(len(logits)), first]
    for i in (np.abs(highest.astype(np.float32)) < _TINY).nonzero()[0]:
        first[i] = np.argmax(_plain(logits[i].astype(np.float32)))
    return first


def _adjusted(logits: NDArray[Any], row: np.void, own: NDArray[np.void]) -> NDArray[Any]:
    """Apply to a row the bias, then the repetition penalty, then the frequency and presence penalties.

    The repetition penalty divides positive logits and multiplies others, for tokens in the prompt or the output; the
    other two are subtracted for tokens in the output, the frequency penalty once per occurrence.
    """
    if not len(own):
        return logits
    result = logits.copy()
    with np.errstate(invalid="ignore"):  # -inf from a ban
        values = _limited(logits[own["id"]].astype(np.float64) + own["bias"], np.float32)
        values = values.astype(np.float32).astype(np.float64)
        penalty, count = float(row["repetition"]), own["count"]
        values = np.where(count >= 0, np.where(values > 0, values / penalty, values * penalty), values)
        output = values - float(row["frequency"]) * count.astype(np.float64) - float(row["presence"])
        values = _limited(np.where(count > 0, output, values), logits.dtype)
    values[own["bias"] == -np.inf] = -np.inf
    result[own["id"]] = values.astype(np.float32).astype(logits.dtype)
    return result


def _limited(values: NDArray[np.float64], kind: Any) -> NDArray[np.float64]:
    """Clamp values to the range of a float type; values subnormal in float32 become 0."""
    most = float(ml_dtypes.finfo(kind).max)
    return np.where(np.abs(values) < _TINY, 0.0, np.clip(values, -most, most))


def _draw(values: list[NDArray[np.float32]], rows: NDArray[np.void]) -> list[int]:
    """Sample from each row of logits, which are finite or -inf, at least one of them finite."""
    ids, distances = [], []
    with np.errstate(over="ignore"):  # to infinity, which is far
        for one, top_k, scale in zip(values, rows["top_k"].tolist(), rows["scale"], strict=True):
            if 0 < top_k < len(one):
                kept = _top(one, top_k)
                distance = (one.max() - one[kept]) * scale
                near = distance < FAR
                ids.append(kept[near])
            else:
                distance = (one.max() - one) * scale
                near = distance < FAR
                ids.append(np.flatnonzero(near))
            distances.append(distance[near])
    # One call for all rows: for one row, it would take longer to call than to calculate.
    all_weights = weights(np.concatenate(distances).astype(np.uint32))
    random = philox.bits(rows["seed"], rows["position"]).tolist()
    tokens, end = [], 0
    for i, (top_p, least) in enumerate(zip(rows["top_p"].tolist(), rows["least"].tolist(), strict=True)):
        own, found = ids[i], all_weights[end : end + len(ids[i])]
        end += len(own)
        if top_p:
            kept = _mass(values[i][own], found, top_p)
            own, found = own[kept], found[kept]
        if least > 1:
            heavy = found >= np.uint64(least)
            own, found = own[heavy], found[heavy]
        upto = found.cumsum()
        unit = (random[i] * int(upto[-1]) >> 64) + 1
        tokens.append(int(own[upto.searchsorted(np.uint64(unit))]))
    return tokens


def _top(values: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the ids, increasing, of the first ``k`` in a row's order."""
    last = np.partition(values, len(values) - k)[len(values) - k]
    ids = np.flatnonzero(values >= last)
    if surplus := len(ids) - k:
        equals = np.flatnonzero(values[ids] == last)
        ids = np.delete(ids, equals[-surplus:])
    return ids


def _mass(values: NDArray[np.float32], found: NDArray[np.uint64], top_p: int) -> NDArray[np.int64]:
    """Return the indices, increasing, of the first in a row's order whose weights, ``found``, reach the share."""
    whole = int(found.sum())
    reach = max(1, whole * top_p >> 64)
    # Tokens lighter than the mean of what may be left out are left out, all of them: no need to sort these.
    heavy = np.flatnonzero(found >= np.uint64((whole - reach) // len(found)))
    # The logits' bits, so that a higher one is a lower number, and the place behind them: one integer, that sorts fast.
    bits = values[heavy].view(np.uint32)
    falling = np.where(bits >> np.uint32(31), bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    order = np.sort(falling << np.uint64(32) | heavy.astype(np.uint64)) & np.uint64(0xFFFFFFFF)
    kept = order[: int(found[order].cumsum().searchsorted(np.uint64(reach))) + 1]
    return np.sort(kept).astype(np.int64)


def _tell(drawn: Drawn, i: int, values: NDArray[np.float32], top: int) -> None:
    """Write the log probabilities and ranks of row i, whose raw logits are ``values``."""
    token, most = int(drawn.tokens[i]), values.max()
    chosen = values[token]
    drawn.ranks[i] = 1 + np.count_nonzero(values > chosen) + np.count_nonzero(values[:token] == chosen)
    with np.errstate(over="ignore"):  # to infinity, which is far, and what float32 has for less than it has
        steps = (most - values) * _STEPS
        whole = np.log(np.float64(weights(steps[steps < FAR].astype(np.uint32)).sum()) * 2.0**-WHOLE_BITS)
        drawn.logprobs[i] = np.float64(chosen) - most - whole
        if top := min(top, len(values)):
            last = np.partition(values, len(values) - top)[len(values) - top]
            ids = np.flatnonzero(values >= last)
            ids = ids[np.argsort(-values[ids], kind="stable")][:top]
            drawn.top_ids[i, :top] = ids
            drawn.top_logprobs[i, :top] = values[ids].astype(np.float64) - most - whole
