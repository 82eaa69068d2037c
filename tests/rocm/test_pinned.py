"""Small arrays through pinned memory on the stand-in: each arrives as it was, whatever has gone the same way since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rocm.processes import Process


@pytest.fixture(scope="module")
def process(machine: dict[str, str]) -> Iterator[Process]:
    started = Process(machine)
    started.run("import numpy as np; from kernels.device.pinned import Pinned; pinned = Pinned(256)")
    yield started
    started.kill()


def test_arrays_arrive_and_come_back(process: Process) -> None:
    process.run(
        "given = [np.arange(n, dtype=kind) + at\n"
        "         for at in range(5) for n, kind in ((1, np.int32), (7, np.uint8), (9, np.uint64), (40, np.float32))]"
    )
    # More in all than there is room for, so that it is used again and again.
    process.run("there = [pinned.array(values) for values in given]")
    assert process.get("all(np.array_equal(cp.asnumpy(a), b) and a.dtype == b.dtype for a, b in zip(there, given))")
    process.run("back = [pinned.get(array) for array in there]")
    assert process.get("all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(back, given))")


def test_arrays_keep_their_shapes_and_what_is_larger_goes_too(process: Process) -> None:
    for shape in ((3, 4), (65, 2), (0, 5), (1,)):
        process.run("values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)", shape=shape)
        process.run("there = pinned.array(values); back = pinned.get(there)")
        assert process.get("(there.shape, back.shape)") == (shape, shape)
        assert process.get("np.array_equal(back, values)")


def test_what_came_back_is_not_written_to_by_what_comes_next(process: Process) -> None:
    process.run("first = pinned.get(pinned.array(np.full(4, 7))); second = pinned.get(pinned.array(np.full(4, 9)))")
    assert process.get("first.tolist() + second.tolist()") == [7] * 4 + [9] * 4


def test_what_is_fetched_is_what_was_there_and_waits_in_a_buffer_of_its_own(process: Process) -> None:
    process.run("there = [pinned.array(np.full(4, 7 + n)) for n in range(3)]")
    process.run("waits = [pinned.fetch(array) for array in there]")  # all in flight at once
    process.run("for array in there: array.fill(0)")  # queued later
    assert process.get("[wait().tolist() for wait in waits[::-1]]") == [[9] * 4, [8] * 4, [7] * 4]
    process.run("first = pinned.fetch(pinned.array(np.full(4, 1)))(); pinned.fetch(pinned.array(np.full(4, 2)))()")
    assert process.get("first.tolist()") == [1] * 4  # the buffer is used again, what came back is not
    assert process.get("len(pinned._fetched[32])") == 3
