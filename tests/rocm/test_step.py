"""A model's steps on the stand-in as a GPU gets them: gathered inputs, and steps made up to a few sizes for graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rocm.processes import Process, Refused

PREPARED = """
from types import SimpleNamespace
import numpy as np
from benchmarks.shapes import RandomCheckpoint, TINY
from kernels import ops_numpy, staging
from kernels.graphs import Graphs, Workspace
from kernels.ops_cupy import CupyOps
from services.engine.batch import Row
from services.engine.model import Model

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
    from services.engine.arena import page_bytes_of, private_pages
    return private_pages(geometry, pages), cp.full((pages, page_bytes_of(geometry)), 0xFF, cp.uint8)

def rows_of(lengths, width):
    return [
        Row([(at * 5 + r) % 100 for at in range(length)], 0, range(r * width, (r + 1) * width), True)
        for r, length in enumerate(lengths)
    ]

def compared(rows, host, device):
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


def test_a_workspace_gives_memory_again_and_none_away(process: Process) -> None:
    process.run("space = Workspace(1 << 20)")
    process.run("with cp.cuda.using_allocator(space.malloc):\n    a = cp.empty(1000); b = cp.empty(1000)")
    assert process.get("a.data.ptr != b.data.ptr and a.data.ptr % 512 == 0")
    process.run("first = a.data.ptr; del a\nwith cp.cuda.using_allocator(space.malloc):\n    c = cp.empty(999)")
    assert process.get("c.data.ptr == first")
    assert process.get("space.held_bytes") == 1 << 20


def test_rocm_has_no_graphs(process: Process) -> None:
    with pytest.raises(Refused, match="not on ROCm"):
        process.run("Graphs()")
    with pytest.raises(Refused, match="kv_dtype is int8; with graphs"):
        process.run("CupyOps(0, 'f32', 'int8', 4, called)")
    with pytest.raises(Refused, match=r"InvalidConfiguration: --graphs on: .*not on ROCm"):
        process.run("from services.engine.backend import on_gpu; on_gpu(0, 'f32', None, 4, True)")
