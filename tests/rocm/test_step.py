"""A model's steps on the stand-in as a GPU gets them: gathered inputs, steps made up to a few sizes, and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kernels.replay import driver
from tests.rocm.processes import Process, Refused

if TYPE_CHECKING:
    from tests.rocm.conftest import Starts

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


def test_steps_from_graphs_give_the_logits_of_the_step_itself(process: Process) -> None:
    process.run("graphs = Graphs(slab=1 << 18); replayed = taped(graphs); host, device = arenas(11 * 40)")
    process.run("lengths = [3, 150, 17, 1, 40, 9, 64, 2, 30, 5, 12]; rows = rows_of(lengths, 40)")
    assert process.get("compared(rows, host, device, replayed)") < 1e-4
    for count in (11, 10, 3, 11, 3, 10, 1, 1, 3, 11):
        process.run("nexts = [Row([7 + n], n, row.pages, True) for n, row in zip(lengths, rows)]")
        assert process.get("compared(nexts[:count], host, device, replayed)", count=count) < 1e-4
        process.run("lengths[:count] = [n + 1 for n in lengths[:count]]", count=count)
    # A graph launches what the library and our kernels were given, with no call of either.
    recorded, count = process.get("(graphs.recorded, graphs.replayed)")
    assert recorded == 3 and count >= 3
    with pytest.raises(Refused, match="int8 pages do not support replayed steps"):
        process.run("CupyOps(0, 'f32', 'int8', 4, called)")


#: A function of x that is queued on the current stream, and what it gives.
GRAPHED = """
told = []
graphs = Graphs(2, 1 << 18, refused=told.append)
x, w = cp.ones((1, 64), np.float32), cp.ones((32, 64), np.float32)
ran = []
def product(n, between=lambda: None):
    def compute():
        ran.append(n)
        out = cp.ndarray((1, 32), np.float32)
        gemm.linear(x, w, out)
        between()
        return out
    return float(graphs.run(n, compute).sum())
"""


def test_graphs_that_are_kept(process: Process) -> None:
    process.run(GRAPHED)
    for number in (1, 2, 1, 2, 1, 3, 4, 5, 6, 1, 3, 1, 2, 2, 2):
        assert process.get("product(number)", number=number) == 64 * 32
    assert process.get("(graphs.recorded, graphs.replayed, told)") == (4, 4, [])  # 2 had gone for 3, and 3 for 2
    process.run("x *= 2; calls = len(ran)")
    assert process.get("(product(1), len(ran) - calls)") == (2 * 64 * 32, 0)


@pytest.mark.parametrize(
    ("function", "status"),
    [
        ("hipStreamBeginCapture", 999),
        ("hipStreamEndCapture", 999),
        ("hipGraphInstantiateWithFlags", 999),
        ("hipGraphDestroy", 999),
    ],
)
def test_a_capture_that_fails_leaves_the_step_right(start: Starts, function: str, status: int) -> None:
    """Once: the work is queued as it is, the reason is told, and the stream is as before."""
    process = start(HIPSTANDIN_FAIL=function)
    process.run(PREPARED + GRAPHED)
    for _ in range(4):
        assert process.get("product(1)") == 64 * 32
    assert process.get("told") == [f"{function}: status {status}"]
    assert process.get("(graphs.recorded, graphs.replayed)") == (0, 0)
    # It is not captured any more: another capture of it is none too many.
    process.run("again = Graphs(slab=1 << 18); again._stream = graphs._stream; graphs = again")
    for _ in range(3):
        assert process.get("product(1)") == 64 * 32
    assert process.get("(graphs.recorded, graphs.replayed)") == (1, 1)


@pytest.mark.parametrize("function", ["hipGraphLaunch", "hipGraphExecDestroy"])
def test_a_graph_that_cannot_be_launched_or_freed_is_an_error(start: Starts, function: str) -> None:
    process = start(HIPSTANDIN_FAIL=function)
    process.run(PREPARED + GRAPHED)
    with pytest.raises(Refused, match=f"GraphError: {function}: status 999"):
        process.run("[product(n) for n in (1, 1, 2, 2, 3, 3)]")
    assert process.get("told") == []


def test_what_cannot_be_captured_is_queued_as_it_is(process: Process) -> None:
    """A copy or a wait amid a step ends its capture; an error of the step itself stays one."""
    stream = "cp.cuda.get_current_stream()"
    copies = f"lambda: rt.memcpyAsync(x.data.ptr, x.data.ptr, 4, 3, {stream}.ptr)"
    for between in (copies, f"lambda: {stream}.synchronize()"):
        process.run(GRAPHED)
        for _ in range(3):
            assert process.get(f"product(1, {between})") == 64 * 32
        [reason] = process.get("told")
        assert "StreamCapture" in reason or "status 901" in reason, reason
        assert process.get("product(2)") == process.get("product(2)") == 64 * 32
        assert process.get("graphs.recorded") == 0
    process.run(GRAPHED)
    process.run("product(1)")
    with pytest.raises(Refused, match="KeyError"):
        process.run("product(1, lambda: {}['none'])")
    assert process.get("told") == []
    assert process.get("[product(1) for _ in range(2)]") == [64 * 32] * 2
    assert process.get("(graphs.recorded, graphs.replayed)") == (1, 1)


def test_graphs_of_another_runtime_and_of_none() -> None:
    """CUDA's driver has the same functions, with the same arguments, under other names."""
    calls: list[tuple[str, Any]] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("cu"):
                raise AttributeError(name)

            class Call:
                def __call__(self, *arguments: Any) -> int:
                    calls.append((name, [one for one in arguments if isinstance(one, int)]))
                    if name in ("cuStreamEndCapture", "cuGraphInstantiateWithFlags"):
                        place = arguments[1] if name == "cuStreamEndCapture" else arguments[0]
                        place._obj.value = 70 + len(calls)
                    return 0

            return Call()

    cuda = driver.Driver(Library(), hip=False)
    cuda.begin(5)
    graph = cuda.end(5)
    executable = cuda.instantiate(graph)
    cuda.destroy(graph)
    cuda.launch(executable, 6)
    cuda.destroy_executable(executable)
    assert calls == [
        ("cuStreamBeginCapture_v2", [5, driver.RELAXED]), ("cuStreamEndCapture", [5]),
        ("cuGraphInstantiateWithFlags", [72, 0]), ("cuGraphDestroy", [72]), ("cuGraphLaunch", [73, 6]),
        ("cuGraphExecDestroy", [73]),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="the runtime has no hipStreamBeginCapture"):
        driver.Driver(Library(), hip=True)


def test_a_step_takes_the_tokens_that_the_one_before_drew(process: Process) -> None:
    process.run("host, device = arenas(40)")
    process.run("rows = rows_of([6, 3, 9], 8); compared(rows, host, device)")
    # What the sampler drew: a batch's rows in another order, and words behind them.
    process.run("drawn = cp.asarray(np.array([11, 22, 33, 44, -9, -9, -9, -9], np.int32))")
    process.run("known = [Row([t], n, row.pages, True) for t, n, row in zip((33, 5, 11), (6, 3, 9), rows)]")
    process.run("pending = [Row(t, n, row.pages, True) for t, n, row in zip(((-3,), (5,), (-1,)), (6, 3, 9), rows)]")
    for replays in ("called", "Tapes()", "Graphs(slab=1 << 18)"):
        process.run(f"other = taped({replays})")
        for _ in range(3):  # queued, recorded, replayed
            process.run(
                "expected = plain.forward(known, host); found = cp.asnumpy(other.forward(pending, device, drawn))"
            )
            assert process.get("float(np.abs(found - expected).max() / np.abs(expected).max())") < 1e-4
    with pytest.raises(Refused, match="has a token outside"):
        process.run("model.forward(pending, device)")
