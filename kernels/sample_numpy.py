"""From logits to tokens, in NumPy: what sampling.hip means, and the CPU's sampler.

A row's tokens have an order: by falling logit, equals by rising id. Greedy takes the first. Else each token has a
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

from kernels import philox
from kernels.sampling import MAX_VOCAB, NOT_FINITE, NOTHING_LEFT, STEP_BITS, WHOLE_BITS, Batch, Drawn

_TINY = np.finfo(np.float32).tiny
#: As many steps below the likeliest, a token has no weight.
FAR = WHOLE_BITS << STEP_BITS
#: Steps of a difference of 1 at temperature 1, rounded to float32.
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
    """Draw a token for each row of ``logits`` ``[n, vocab_size]``, float32, float16 or bfloat16; see `Drawn`.

    A result depends on its own row, its parameters and its position alone. A row that holds NaN or infinity gets the
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
    random = philox.bits(batch.rows["seed"], batch.rows["position"]).tolist()
    plain = (batch.rows["scale"] == 0) & (batch.rows["entries"] == 0) & (drawn.errors == 0)
    drawn.tokens[plain] = _first(logits if plain.all() else logits[plain])
    for i in np.flatnonzero((drawn.errors == 0) & ~plain).tolist():
        row = batch.rows[i]
        own = batch.entries[row["first_entry"] : row["first_entry"] + row["entries"]]
        values = _plain(_adjusted(logits[i], row, own).astype(np.float32))
        if (own["bias"] == -np.inf).sum() == vocab_size:
            drawn.errors[i] = NOTHING_LEFT
        elif row["scale"] == 0:
            drawn.tokens[i] = np.argmax(values)
        else:
            drawn.tokens[i] = _draw(values, row, random[i])
    for i in np.flatnonzero((drawn.errors == 0) & (batch.rows["logprobs"] >= 0)).tolist():
        _tell(drawn, i, _plain(logits[i].astype(np.float32)), int(batch.rows[i]["logprobs"]))
    return drawn


def _finite(logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell of each row whether all of it is finite."""
    return np.isfinite(logits).all(axis=1)


def _plain(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Make 0 of -0 and of what is below the normal numbers."""
    return np.where(np.abs(values) < _TINY, np.float32(0), values)


def _first(logits: NDArray[Any]) -> NDArray[np.int64]:
    """Return the place of each finite row's highest logit, the first of equals."""
    first = np.argmax(logits, axis=1)
    for i in np.flatnonzero(np.abs(logits[np.arange(len(logits)), first].astype(np.float32)) < _TINY):
        first[i] = np.argmax(_plain(logits[i].astype(np.float32)))
    return first


def _adjusted(logits: NDArray[Any], row: np.void, own: NDArray[np.void]) -> NDArray[Any]:
    """Return a row with the bias added, then the repetition penalty, then the frequency and the presence penalty.

    The repetition penalty divides a logit above 0 and multiplies another, of tokens in the prompt or the output; the
    other two are subtracted from tokens in the output, the frequency penalty once for every time.
    """
    if not len(own):
        return logits
    result = logits.copy()
    with np.errstate(invalid="ignore"):  # -inf, of a ban
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
    """Bring values into the range of a float type; below its normal numbers they are 0 as far as float32 goes."""
    most = float(ml_dtypes.finfo(kind).max)
    return np.where(np.abs(values) < _TINY, 0.0, np.clip(values, -most, most))


def _draw(values: NDArray[np.float32], row: np.void, random: int) -> int:
    """Draw from logits of which one is finite, and the others finite or -inf, with 64 random bits."""
    ids, kept = _kept(values, row)
    upto = np.cumsum(kept)
    unit = (random * int(upto[-1]) >> 64) + 1
    return int(ids[np.searchsorted(upto, np.uint64(unit))])


def _kept(values: NDArray[np.float32], row: np.void) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the ids, rising, that the filters keep, and their weights."""
    most, top_k = values.max(), int(row["top_k"])
    if 0 < top_k < len(values):
        last = np.partition(values, len(values) - top_k)[len(values) - top_k]
        ids = np.flatnonzero(values >= last)
        equals = np.flatnonzero(values[ids] == last)
        ids = np.delete(ids, equals[len(equals) - (len(ids) - top_k) :])
        values = values[ids]
    else:
        ids = np.arange(len(values))
    with np.errstate(over="ignore"):  # to infinity, which is far
        steps = (most - values) * row["scale"]
    near = np.flatnonzero(steps < FAR)
    ids, values = ids[near], values[near]
    kept = weights(steps[near].astype(np.uint32))
    if row["top_p"]:
        order = np.argsort(-values, kind="stable")
        upto = np.cumsum(kept[order])
        reach = max(1, int(upto[-1]) * int(row["top_p"]) >> 64)
        order = np.sort(order[: int(np.searchsorted(upto, np.uint64(reach))) + 1])
        ids, kept = ids[order], kept[order]
    if row["least"] > 1:
        heavy = kept >= row["least"]
        ids, kept = ids[heavy], kept[heavy]
    return ids, kept


def _tell(drawn: Drawn, i: int, values: NDArray[np.float32], top: int) -> None:
    """Write the log probabilities and ranks of row i, whose raw logits are ``values``."""
    token, most = int(drawn.tokens[i]), values.max()
    with np.errstate(over="ignore"):
        steps = (most - values) * _STEPS
    whole = np.log(np.float64(weights(steps[steps < FAR].astype(np.uint32)).sum()) * 2.0**-WHOLE_BITS)
    chosen = values[token]
    drawn.logprobs[i] = np.float64(chosen) - most - whole
    drawn.ranks[i] = 1 + np.count_nonzero(values > chosen) + np.count_nonzero(values[:token] == chosen)
    if top := min(top, len(values)):
        last = np.partition(values, len(values) - top)[len(values) - top]
        ids = np.flatnonzero(values >= last)
        ids = ids[np.argsort(-values[ids], kind="stable")][:top]
        drawn.top_ids[i, :top] = ids
        drawn.top_logprobs[i, :top] = values[ids].astype(np.float64) - most - whole
