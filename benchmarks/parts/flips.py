"""How often greedy tokens depend on the other requests in the batch, and the cost of batch invariance.

Libraries choose a GEMM kernel by its shape, and attention splits keys by the capacity that the batch leaves free; both
then round differently. Where the two likeliest tokens are nearly equal, the other one may be chosen, and everything
after it differs. For each way to run the same requests, the report gives the share of requests whose tokens differ from
a run alone, the position of the first difference, and how close the two likeliest tokens were there in the run alone.

`InvariantOps` is a batch-invariant backend: every product has the same number of rows, and every tile of attention is
split by its own keys. Its cost is the time of its step against that of a normal one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.parts import steps
from benchmarks.parts.rows import Row as Found
from benchmarks.parts.shapes import RandomOps
from benchmarks.parts.stand import PAGE_SIZE, Pages, Stand
from benchmarks.step import GREEDY
from kernels.attention import plan
from kernels.attention.plan import Geometry, Plan
from kernels.linear import gemm, gemv
from kernels.ops_cupy import CupyOps
from services.engine.model.batch import Row
from services.engine.sampling.params import SamplingParams, choose
from services.engine.sampling.result import Choice

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

#: Requests at a time, tokens of a prompt, and tokens that each request gets.
BATCHES, PROMPT, TOKENS = (16, 64, 256), 200, 32
#: Greedy, with the two highest log probabilities, whose gap is that of the logits.
_TOLD = replace(GREEDY, logprobs=2)
#: Requests that compute the pages that another one then hits.
FILLED_BY = 16
#: Keys of an item of attention, whatever the batch: a row of no more keys has a single item.
ITEM_KEYS = 512


class InvariantOps(CupyOps):
    """A backend whose products all have ``ROWS`` rows, and whose attention splits a tile only by its own keys."""

    ROWS = 256

    def linear(self, x: Any, weight: Any, widen: bool = False) -> Any:
        """See `ops_numpy.linear`."""
        n = len(x)
        whole = self._whole(n)
        if whole != n:
            x = self.take(x, self._upload(np.arange(whole, dtype=np.int32).clip(max=n - 1)))
        out = self._empty((whole, weight.shape[0]), np.dtype(np.float32) if widen else self._dtype)
        for at in range(0, whole, self.ROWS):
            gemm.linear(x[at : at + self.ROWS], weight, out[at : at + self.ROWS])
        return out[:n]

    def _few(self, product: gemv.Product) -> bool:
        return False

    def _whole(self, rows: int) -> int:
        return -(-rows // self.ROWS) * self.ROWS

    def _size(self, count: int) -> int:
        # A replayed step is padded to whole products, so that none of its products needs padding.
        return self._whole(count)

    def _plan(self, geometry: Geometry, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Plan:
        return plan.plan(geometry, self._verdict(geometry).gpu, starts, lengths, ITEM_KEYS, self._made_to_size)


class InvariantRandomOps(InvariantOps, RandomOps):
    """`InvariantOps` for random weights."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run requests: how many at a time, prompts in chunks or whole, and with or without cached pages."""

    name: str
    batch: int = 1
    chunk: int | None = None
    cached: bool = False


ALONE = Way("alone")


def ways(batches: Sequence[int], prompt: int) -> list[Way]:
    """The ways compared with `ALONE`: the batches, and prompts of ``prompt`` tokens in chunks and after a hit."""
    chunk = max(1, prompt // 3)
    return [
        *(Way(f"batches of {batch}", batch) for batch in batches),
        Way(f"prompts in chunks of {chunk}", chunk=chunk),
        Way("after a prefix hit", cached=True),
    ]


@dataclass(frozen=True, slots=True)
class Written:
    """The results of n requests, ``[n, t]``: ``tokens`` int32, ``gaps`` float32 between the two highest logits."""

    tokens: I32
    gaps: F32


class Requests:
    """Requests with prompts ``[n, p]`` that generate ``count`` tokens each. ``pages`` has `pages_of` pages."""

    def __init__(self, stand: Stand, pages: Pages, prompts: I32, count: int) -> None:
        self._stand, self._pages, self._prompts, self._count = stand, pages, prompts, count
        width = pages_of(1, prompts.shape[1], count)
        self._tables = [range(row * width, (row + 1) * width) for row in range(len(prompts))]

    def run(self, way: Way, params: Sequence[SamplingParams] | None = None) -> Written:
        """Run all requests, ``way``'s number at a time, greedily without ``params``.

        Raises RuntimeError for bad logits.
        """
        n = len(self._prompts)
        params = params or [_TOLD] * n
        tokens, gaps = np.zeros((n, self._count), np.int32), np.zeros((n, self._count), np.float32)
        begun = (self._prompts.shape[1] - 1) // PAGE_SIZE * PAGE_SIZE if way.cached else 0
        if begun:
            for at in range(0, n, FILLED_BY):
                self._prefill(range(at, min(n, at + FILLED_BY)), 0, begun, None, False)
        for at in range(0, n, way.batch):
            of = range(at, min(n, at + way.batch))
            drawn = self._prefill(of, begun, self._prompts.shape[1], way.chunk, True)
            for step in range(self._count):
                place = self._prompts.shape[1] + step
                for row, one in zip(of, self._chosen(drawn, [params[row] for row in of], place), strict=True):
                    tokens[row, step] = one.token
                    gaps[row, step] = one.top[0][1] - one.top[1][1] if len(one.top) > 1 else np.nan
                if step < self._count - 1:
                    drawn = self._forward([Row([int(tokens[row, step])], place, self._tables[row], 1) for row in of])
        self._stand.backend.finish()
        return Written(tokens, gaps)

    def _prefill(self, of: range, begin: int, end: int, chunk: int | None, wanted: bool) -> Any:
        """Compute tokens ``begin`` to ``end`` of some prompts. Returns the last one's logits if ``wanted``."""
        logits = None
        for at in range(begin, end, chunk or end):
            upto = min(end, at + (chunk or end))
            last = int(wanted and upto == end)
            logits = self._forward(
                [Row(self._prompts[row, at:upto].tolist(), at, self._tables[row], last) for row in of]
            )
        return logits

    def _forward(self, rows: list[Row]) -> Any:
        return self._stand.model.forward(rows, self._pages.memory())

    def _chosen(self, logits: Any, params: Sequence[SamplingParams], place: int) -> list[Choice]:
        chosen = []
        for one in choose(logits, params, [place] * len(params), draw=self._stand.draw):
            if not isinstance(one, Choice):
                raise RuntimeError(f"no token at position {place}: {one}")
            chosen.append(one)
        return chosen


def pages_of(requests: int, prompt: int, count: int) -> int:
    """Pages that `Requests` needs."""
    return requests * -(-(prompt + count) // PAGE_SIZE)


def natural(stand: Stand, requests: int, prompt: int) -> I32:
    """Prompts ``[requests, prompt]`` generated by a trained model itself, at temperature 1, from a passage's start."""
    with stand.local(pages_of(requests, 1, prompt)) as pages:
        first = np.zeros((requests, 1), np.int32)  # the token that starts a passage
        drawn = [replace(GREEDY, temperature=1.0, seed=row) for row in range(requests)]
        return Requests(stand, pages, first, prompt).run(Way("written", requests), drawn).tokens


def arbitrary(stand: Stand, requests: int, prompt: int) -> I32:
    """Prompts of arbitrary tokens."""
    draw = np.random.default_rng(0)
    return draw.integers(0, stand.model.config.vocab_size, (requests, prompt), np.int32)


def measure(stand: Stand, name: str, prompts: I32, count: int, batches: Sequence[int]) -> Iterator[Found]:
    """A row per way: the share of requests whose tokens differ from those alone."""
    with stand.local(pages_of(len(prompts), prompts.shape[1], count)) as pages:
        requests = Requests(stand, pages, prompts, count)
        alone = requests.run(ALONE)
        for way in (replace(ALONE, name="alone again"), *ways(batches, prompts.shape[1])):
            yield compared(f"{name}, {way.name}", alone, requests.run(way))


def compared(name: str, alone: Written, other: Written) -> Found:
    """The share of requests that differ, and the position of the first difference."""
    different = alone.tokens != other.tokens
    flipped = np.flatnonzero(different.any(axis=1))
    said = f"% of {len(alone.tokens)} requests of {alone.tokens.shape[1]} tokens"
    if len(flipped):
        first = different[flipped].argmax(axis=1)
        gaps = alone.gaps[flipped, first]
        near = float((alone.gaps <= gaps.max()).mean())
        said += (
            f"; first at {statistics.median(first.tolist()):g} (median); gap there {np.median(gaps):.4f}, at most "
            f"{gaps.max():.4f}, as {near:.2%} of all tokens have"
        )
    return Found("flips", name, 100 * len(flipped) / len(alone.tokens), "%", detail=said[2:])


def costs(having: Stand, lacking: Stand, name: str, batches: Sequence[int], keys: int) -> Iterator[Found]:
    """Rows for decode steps of `InvariantOps` and of the engine's own backend."""
    for batch in batches:
        took = []
        for stand in (having, lacking):
            with stand.local(steps.pages_of(batch, keys)) as pages:
                took.append(steps.decode_seconds(stand, pages, batch, keys)[0])
        detail = f"to a step as it is, {took[1] * 1e3:.2f} ms; {keys} keys a row"
        yield Found(
            "flips", f"{name}, invariant, decode of {batch}", took[0] * 1e3, "ms", took[0] / took[1], detail=detail
        )
