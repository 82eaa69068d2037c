"""A model's steps on the stand-in as a GPU gets them: gathered inputs, steps made up to a few sizes, and replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rocm.processes import Process, Refused

PREPARED = """
from types import SimpleNamespace
import numpy as np
from kernels.linear import gemm
from kernels.device.recording import writing
from benchmarks.parts.shapes import RandomCheckpoint, TINY
from kernels import ops_numpy
from kernels.device import staging
from kernels.replay.graphs import Graphs
from kernels.replay.tapes import Tapes
from kernels.device.workspace import Workspace
from kernels.ops_cupy import CupyOps
from services.engine.model.batch import Row
from services.engine.model.decoder import Model

class Called:
    '''Calls what graphs would replay, and keeps its keys.'''
    def __init__(self):
        self.keys = []
    def run(self, key, compute):
        self.keys.append(key)
        return compute()

PAGE = 4
checkpoint = RandomCheckpoint.of(TINY)
plain = Model(RandomCheckpoint.of(TINY), ops_numpy)
geometry = plain.geometry(PAGE)
called = Called()
model = Model(checkpoint, CupyOps(0, "f32", "f32", PAGE, called), "f32")

def arenas(pages):
    from services.engine.pages.private import private_pages
    return private_pages(geometry, pages), cp.full((pages, geometry.page_bytes), 0xFF, cp.uint8)

def rows_of(lengths, width):
    return [
        Row([(at * 5 + r) % 100 for at in range(length)], 0, range(r * width, (r + 1) * width), True)
        for r, length in enumerate(lengths)
    ]

def taped(tapes):
    return Model(RandomCheckpoint.of(TINY), CupyOps(0, "f32", "f32", PAGE, tapes), "f32")

def compared(rows, host, device, model=model):
    expected = plain.forward(rows, host)
    found = cp.asnumpy(model.forward(rows, device))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found - expected).max() / np.abs(expected).max())
"""


# Kernels are compiled by g++ on the first run.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def process(machine: dict[str, str]) -> Iterator[Process]:
    started = Process(machine)
    started.run(PREPARED)
    yield started
    started.kill()


def test_steps_made_up_to_a_size_give_the_logits_of_the_step_itself(process: Process) -> None:
    process.run("host, device = arenas(11 * 40)")
    process.run("lengths = [3, 150, 17, 1, 40, 9, 64, 2, 30, 5, 12]; rows = rows_of(lengths, 40)")
    assert process.get("compared(rows, host, device)") < 1e-4
    assert process.get("called.keys") == []  # a step of prompts comes once
    process.run("nexts = [Row([7 + r], n, row.pages, True) for r, (n, row) in enumerate(zip(lengths, rows))]")
    for count in (11, 1, 3, 10):
        assert process.get("compared(nexts[:count], host, device)", count=count) < 1e-4
    # A few rows are multiplied by a kernel of ours, more by the library.
    assert process.get("sorted(dict(key[1:])['RF_ROWS'] for key in model._ops._modules if key[0] == 'gemv')") == [1, 4]
    # 10 and 11 rows are of one size, and all else about them too; of pages that are other ones nothing is shared.
    assert process.get("called.keys[0] == called.keys[3]") and process.get("len(set(called.keys))") == 3
    assert process.get("bool((device[-36:] == 0xFF).all())")  # rows that make up the number write nowhere
    process.run("moved = device.copy(); compared(nexts, host, moved)")
    assert process.get("len(set(called.keys))") == 4


def test_a_step_that_staging_has_no_room_for(process: Process) -> None:
    process.run("host, device = arenas(12); rows = rows_of([9, 20], 6)")
    process.run("model._ops._staging = staging.Staging(16)")
    assert process.get("compared(rows, host, device)") < 1e-4
    assert not process.get("model._ops._staging.whole")
    assert process.get("compared(rows, host, device)") < 1e-4  # it has grown by then
    assert process.get("model._ops._staging.whole")


def test_steps_from_tapes_give_the_logits_of_the_step_itself(process: Process) -> None:
    process.run("tapes = Tapes(); played = taped(tapes); host, device = arenas(11 * 40)")
    process.run("lengths = [3, 150, 17, 1, 40, 9, 64, 2, 30, 5, 12]; rows = rows_of(lengths, 40)")
    assert process.get("compared(rows, host, device, played)") < 1e-4
    assert process.get("(tapes.recorded, tapes.replayed)") == (0, 0)  # a step of prompts comes once
    for count in (11, 10, 3, 11, 3, 10, 1, 1, 3, 11):
        # Each time other tokens at other positions, and in between a prompt, which is not replayed.
        process.run("nexts = [Row([7 + n], n, row.pages, True) for n, row in zip(lengths, rows)]")
        assert process.get("compared(nexts[:count], host, device, played)", count=count) < 1e-4
        process.run("lengths[:count] = [n + 1 for n in lengths[:count]]", count=count)
        assert process.get("compared([Row(range(5, 25), 0, rows[5].pages, True)], host, device, played)") < 1e-4
    recorded, replayed = process.get("(tapes.recorded, tapes.replayed)")
    assert recorded == 3 and replayed >= 3  # a step that came once is not recorded
    process.run("moved = device.copy()")
    for _ in range(2):
        assert process.get("compared(nexts, host, moved, played)") < 1e-4
    assert process.get("tapes.recorded") == recorded + 1


def test_the_last_tokens_of_prompts_come_again(process: Process) -> None:
    """What is left of prompts whose other tokens were found in the cache, alone and beside rows that decode."""
    process.run("called.keys.clear(); model._ops._staging = None; tapes = Tapes(); played = taped(tapes)")
    process.run("host, device = arenas(9 * 40)")
    process.run("lengths = [30, 140, 17, 1, 40, 9, 64, 5, 12]; rows = rows_of(lengths, 40)")
    assert process.get("compared(rows, host, device, played)") < 1e-4
    process.run(
        "def tails(counts, wants):\n"
        "    each = enumerate(zip(counts, wants))\n"
        "    return [Row([7 + i + k for k in range(n)], lengths[i], rows[i].pages, w) for i, (n, w) in each]\n"
        "def behind(counts):\n"
        "    return [Row([3], lengths[i] + n, rows[i].pages, 1) for i, n in enumerate(counts)]"
    )
    keys = {}
    for counts, wants in (
        ([16], [1]),
        ([16, 1, 1], [1, 1, 1]),
        ([16, 3, 9], [1, 1, 1]),
        ([15, 4, 9], [1, 1, 1]),
        ([1, 1, 12, 1], [1, 1, 5, 1]),  # the log probabilities of a prompt's tokens
        ([4, 5], [4, 5]),
        ([4, 5], [0, 1]),
        ([6, 2], [0, 0]),
        ([6, 2], [6, 2]),
        ([16] * 8, [1] * 8),
    ):
        process.run("step = tails(counts, wants)", counts=counts, wants=wants)
        for _ in range(3):
            assert not any(wants) or process.get("compared(step, host, device, played)") < 1e-4
            process.run("played.states(step, device)")
        # What comes next is wrong if they wrote K and V elsewhere, or others than NumPy does.
        process.run("plain.states(step, host)")
        assert process.get("compared(behind(counts), host, device, played)", counts=counts) < 1e-4
        process.run("model.states(step, device)")
        keys[str((counts, wants))] = process.get("hash(called.keys.pop())")
    recorded, replayed = process.get("(tapes.recorded, tapes.replayed)")
    assert recorded >= 9 and replayed >= 20
    assert keys["([16, 3, 9], [1, 1, 1])"] == keys["([15, 4, 9], [1, 1, 1])"]
    assert len(set(keys.values())) == len(keys) - 1
    for counts in ([17, 1], [16] * 8 + [1]):
        process.run("model.states(tails(counts, [1] * 9), device)", counts=counts)
        assert process.get("called.keys") == []


def test_a_tape_is_a_models_a_streams_and_a_threads(process: Process) -> None:
    process.run("tapes = Tapes(); played = taped(tapes); host, device = arenas(12)")
    process.run("rows = rows_of([9, 20], 6); compared(rows, host, device, played)")
    process.run("ones = [Row([3], n, row.pages, True) for n, row in zip([9, 20], rows)]")
    process.run("def twice():\n    return max(compared(ones, host, device, played) for _ in range(2))")
    for recorded, replayed in ((1, 0), (1, 2)):
        assert process.get("twice()") < 1e-4
        assert process.get("(tapes.recorded, tapes.replayed)") == (recorded, replayed)
    process.run("with cp.cuda.Stream(non_blocking=True):\n    far = twice()")
    assert process.get("far") < 1e-4 and process.get("tapes.recorded") == 2
    assert process.get("in_thread(twice)") < 1e-4
    assert process.get("tapes.recorded") == 3
    # Another model on the same backend has other weights.
    process.run(
        "other = Model(checkpoint, played._ops, 'f32'); other._norm = other._norm * 2; other.forward(ones, device)"
    )
    process.run("mine, its = (cp.asnumpy(m.forward(ones, device)) for m in (played, other))")
    assert process.get("float(np.abs(its - 2 * mine).max() / np.abs(mine).max())") < 1e-4
    assert process.get("(tapes.recorded, tapes.replayed)") == (4, 3)


def test_tapes_that_are_kept_and_what_fails(process: Process) -> None:
    process.run("tapes = Tapes(kept=2)")
    process.run("x, w = cp.ones((1, 64), np.float32), cp.ones((32, 64), np.float32)")
    process.run(
        "def product(n):\n"
        "    def compute():\n"
        "        out = cp.ndarray((1, 32), np.float32)\n"
        "        gemm.linear(x, w, out)\n"
        "        return out\n"
        "    return float(tapes.run(n, compute).sum())"
    )
    for number in (1, 2, 1, 2, 1, 3, 4, 5, 6, 1):
        assert process.get("product(number)", number=number) == 64 * 32
    assert process.get("(tapes.recorded, tapes.replayed)") == (2, 2)  # what came once put nothing out
    for number in (3, 1, 2):
        assert process.get("product(number)", number=number) == 64 * 32
    assert process.get("(tapes.recorded, tapes.replayed)") == (3, 3)  # 2 had gone for 3
    process.run("x *= 2")
    assert process.get("product(1)") == 2 * 64 * 32
    process.run("tapes.run(9, lambda: None)")
    for _ in range(2):
        with pytest.raises(Refused, match="KeyError"):
            process.run("tapes.run(9, lambda: {}['none'])")
    assert process.get("(writing.tape, tapes.run(9, lambda: 5))") == (None, 5)


def test_a_workspace_gives_memory_again_and_none_away(process: Process) -> None:
    process.run("space = Workspace(1 << 20)")
    process.run("with cp.cuda.using_allocator(space.malloc):\n    a = cp.empty(1000); b = cp.empty(1000)")
    assert process.get("a.data.ptr != b.data.ptr and a.data.ptr % 512 == 0")
    process.run("first = a.data.ptr; del a\nwith cp.cuda.using_allocator(space.malloc):\n    c = cp.empty(999)")
    assert process.get("c.data.ptr == first")
    assert process.get("[slab.nbytes for slab in space._slabs]") == [1 << 20]


def test_rocm_has_no_graphs(process: Process) -> None:
    with pytest.raises(Refused, match="not on ROCm"):
        process.run("Graphs()")
    with pytest.raises(Refused, match="int8 pages do not support replayed steps"):
        process.run("CupyOps(0, 'f32', 'int8', 4, called)")
    with pytest.raises(Refused, match=r"InvalidConfiguration: --replay graphs: .*not on ROCm"):
        process.run("from services.engine.model.backend import on_gpu; on_gpu(0, 'f32', None, 4, 'graphs')")


def test_a_step_takes_the_tokens_that_the_one_before_drew(process: Process) -> None:
    process.run("host, device = arenas(40)")
    process.run("rows = rows_of([6, 3, 9], 8); compared(rows, host, device)")
    # What the sampler drew: a batch's rows in another order, and words behind them.
    process.run("drawn = cp.asarray(np.array([11, 22, 33, 44, -9, -9, -9, -9], np.int32))")
    process.run("known = [Row([t], n, row.pages, True) for t, n, row in zip((33, 5, 11), (6, 3, 9), rows)]")
    process.run("pending = [Row(t, n, row.pages, True) for t, n, row in zip(((-3,), (5,), (-1,)), (6, 3, 9), rows)]")
    for replays in ("called", "Tapes()"):
        process.run(f"other = taped({replays})")
        for _ in range(3):  # queued, recorded, replayed
            process.run(
                "expected = plain.forward(known, host); found = cp.asnumpy(other.forward(pending, device, drawn))"
            )
            assert process.get("float(np.abs(found - expected).max() / np.abs(expected).max())") < 1e-4
    with pytest.raises(Refused, match="has a token outside"):
        process.run("model.forward(pending, device)")
