"""From logits to a token: temperature, then top-k, top-p, min-p, then one draw."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import philox
from services.engine.modelconfig import ModelConfig
from services.errors import FieldInvalid, ForwardFailed, ServiceError

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws: ``temperature`` 0 takes the likeliest; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


def validate(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    defaults: ModelConfig,
) -> SamplingParams:
    """Check what a request asks for; what it leaves out is the model's default, then temperature 1 and no limits.

    A seed left out is drawn at random. Raises ``FieldInvalid`` with ``field`` ``sampling.<name>``.
    """
    if temperature is None:
        temperature = 1.0 if defaults.default_temperature is None else defaults.default_temperature
    if top_k is None:
        top_k = defaults.default_top_k or 0
    if top_p is None:
        top_p = 1.0 if defaults.default_top_p is None else defaults.default_top_p
    if min_p is None:
        min_p = 0.0
    if seed is None:
        seed = secrets.randbits(64)
    # Written so that NaN fails.
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise FieldInvalid(
            f"temperature is {temperature}; it must be 0 to {MAX_TEMPERATURE:g}", field="sampling.temperature"
        )
    if not 0 <= top_k <= MAX_TOP_K:
        raise FieldInvalid(f"top_k is {top_k}; it must be 0 to {MAX_TOP_K}", field="sampling.top_k")
    if not 0 < top_p <= 1:
        raise FieldInvalid(f"top_p is {top_p}; it must be more than 0 and at most 1", field="sampling.top_p")
    if not 0 <= min_p < 1:
        raise FieldInvalid(f"min_p is {min_p}; it must be at least 0 and less than 1", field="sampling.min_p")
    if not 0 <= seed <= MAX_SEED:
        raise FieldInvalid(f"seed is {seed}; it must be 0 to {MAX_SEED}", field="sampling.seed")
    return SamplingParams(float(temperature), int(top_k), float(top_p), float(min_p), int(seed))


def sample(
    logits: NDArray[np.float32], params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | ServiceError]:
    """Draw a token for each row of ``logits``, float32 ``[n, vocab_size]``.

    ``positions[i]`` is the position the token of row i will have. A result depends on its row, its parameters and its
    position alone. A row that holds NaN or infinity gets ``ForwardFailed`` in the place of a token.
    """
    results: list[int | ServiceError] = [0] * len(params)
    finite = np.isfinite(logits).all(axis=1)
    greedy = np.array([p.temperature == 0 for p in params], bool)
    for row in np.flatnonzero(~finite).tolist():
        results[row] = ForwardFailed(f"the logits at position {positions[row]} hold NaN or infinity")
    if rows := np.flatnonzero(finite & greedy).tolist():
        for row, token in zip(rows, np.argmax(logits[rows], axis=1).tolist(), strict=True):  # the first of equals
            results[row] = token
    if rows := np.flatnonzero(finite & ~greedy).tolist():
        drawn = _draw(logits[rows], [params[row] for row in rows], [positions[row] for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            results[row] = token
    return results


def _draw(logits: NDArray[np.float32], params: list[SamplingParams], positions: list[int]) -> list[int]:
    """Draw one token a row, all rows finite and none greedy.

    In the order from likely to unlikely, equals by id, every filter keeps a beginning of the row; so the filters only
    shorten ``kept``, and one uniform number is looked up in the running sum.
    """
    n, vocab_size = logits.shape
    ids = _by_likelihood(logits)
    ordered = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    temperature = np.array([p.temperature for p in params])[:, None]
    with np.errstate(over="ignore"):  # a tiny temperature: everything but the likeliest becomes exp(-inf) = 0
        weights = np.exp((ordered - ordered[:, :1]) / temperature)
    running = np.cumsum(weights, axis=1)

    kept = np.array([min(p.top_k or vocab_size, vocab_size) for p in params])
    for row, p in enumerate(params):
        if p.top_p < 1:
            # The fewest tokens whose share of what top-k left reaches top_p; the one that crosses it included.
            reach = p.top_p * running[row, kept[row] - 1]
            kept[row] = min(kept[row], int(np.searchsorted(running[row], reach)) + 1)
        if p.min_p > 0:
            # weights[row, 0] is 1, so the threshold relative to the likeliest is min_p itself.
            kept[row] = min(kept[row], int(np.count_nonzero(weights[row] >= p.min_p)))

    seeds = np.array([p.seed for p in params], np.uint64)
    drawn = philox.uniform(seeds, np.array(positions, np.uint64))
    chosen = []
    for row in range(n):
        sums = running[row, : kept[row]]
        # The product may round up to the whole sum, hence the minimum.
        place = min(int(np.searchsorted(sums, drawn[row] * sums[-1], side="right")), len(sums) - 1)
        chosen.append(int(ids[row, place]))
    return chosen


def _by_likelihood(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the ids ``[n, vocab_size]`` of each row from the highest logit down, equal ones by rising id.

    Sorting the logit's bits and the id as one integer is several times faster than a stable argsort.
    """
    bits = (logits + np.float32(0)).view(np.uint32)  # + 0 makes -0 and 0 equal
    falling = np.where(bits >> np.uint32(31), bits, ~bits & np.uint32(0x7FFFFFFF))
    keys = (falling.astype(np.uint64) << np.uint64(32)) | np.arange(logits.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
