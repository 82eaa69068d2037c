"""Replayed steps on a GPU: the same tokens as without, whatever batch a graph or a tape was made with."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.parts.shapes import TINY, RandomCheckpoint
from kernels.ops_cupy import CupyOps
from kernels.replay.graphs import Graphs
from kernels.replay.tapes import Tapes
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from tests.gpus import gpu_or_skip

PAGE, WIDTH = 16, 60


def steps(model: Model, batches: list[int], start: int) -> list[list[int]]:
    """The likeliest tokens of a run of steps, each of so many rows, every one of which continues."""
    import cupy

    pages = cupy.full((max(batches) * WIDTH, model.geometry(PAGE, "bf16").page_bytes), 0xFF, cupy.uint8)
    tables = [range(row * WIDTH, (row + 1) * WIDTH) for row in range(max(batches))]
    prompts = [[(at * 3 + row) % 1000 for at in range(start + row)] for row in range(max(batches))]
    logits = model.forward([Row(p, 0, t, True) for p, t in zip(prompts, tables, strict=True)], pages)
    tokens = [[int(token)] for token in logits.argmax(axis=1).get()]
    ends = [len(prompt) for prompt in prompts]
    for count in batches:
        rows = [Row(tokens[r][-1:], ends[r], tables[r], True) for r in range(count)]
        for row, token in enumerate(model.forward(rows, pages).argmax(axis=1).get()):
            tokens[row].append(int(token))
            ends[row] += 1
    return tokens


# Batches of one size class are replayed as one; some go and are made anew.
BATCHES = [12] * 9 + [9] * 4 + [1] * 6 + [5, 3] * 5 + [2] * 3 + [12] * 5


#: Tokens of the last chunks of three prompts, a step each; whoever has one decodes.
TAILS = [[16, 1, 1], [16, 3, 9], [13, 4, 9]] * 8


def model_of(replays: Any) -> Model:
    return Model(RandomCheckpoint.of(TINY), CupyOps(0, "bf16", "bf16", PAGE, replays), "bf16")


def tails(model: Model) -> Any:
    """The logits ``[steps, 3, vocab_size]`` of `TAILS`, each after what is in the pages by then."""
    import cupy

    pages = cupy.full((3 * WIDTH, model.geometry(PAGE, "bf16").page_bytes), 0xFF, cupy.uint8)
    tables = [range(row * WIDTH, (row + 1) * WIDTH) for row in range(3)]
    ends, found = [200, 333, 48], []
    model.forward([Row([at % 1000 for at in range(n)], 0, t, True) for n, t in zip(ends, tables, strict=True)], pages)
    for counts in TAILS:
        rows = [
            Row([(7 * end + at) % 1000 for at in range(count)], end, table, True)
            for count, end, table in zip(counts, ends, tables, strict=True)
        ]
        found.append(model.forward(rows, pages).get())
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
    return np.stack(found)


def farthest(replays: Any) -> float:
    """The largest ||logits - theirs|| / ||theirs|| of a row of `TAILS`, to those of steps that are not replayed."""
    mine, theirs = (tails(model_of(given)) for given in (replays, None))
    return float((np.linalg.norm(mine - theirs, axis=2) / np.linalg.norm(theirs, axis=2)).max())


def same_share(replays: Any) -> float:
    """The share of tokens before any difference from those of steps that are not replayed."""
    mine, theirs = (steps(model_of(given), BATCHES, 200) for given in (None, replays))
    # Products of another number of rows may round otherwise: a near tie may fall the other way, and then all after it.
    same = [
        len(one) if one == other else int(np.argmin([a == b for a, b in zip(one, other, strict=True)]))
        for one, other in zip(mine, theirs, strict=True)
    ]
    return sum(same) / sum(map(len, mine))


def check(kind: type[Graphs] | type[Tapes]) -> None:
    replays = kind(kept=6)
    assert same_share(replays) >= 0.9
    assert replays.recorded >= 4 and replays.replayed >= 15
    replays = kind()
    assert farthest(replays) < 0.03
    assert replays.recorded >= 2 and replays.replayed >= 4


def test_graphs_give_the_same_tokens_as_without() -> None:
    gpu_or_skip()
    check(Graphs)


def test_tapes_give_the_same_tokens_as_without() -> None:
    gpu_or_skip()
    check(Tapes)
