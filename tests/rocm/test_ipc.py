"""Device memory in another process, through CuPy: each rule of HIP's handles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.rocm.processes import Process, Refused

if TYPE_CHECKING:
    from tests.rocm.conftest import Starts

INVALID_VALUE, INVALID_DEVICE_POINTER, INVALID_CONTEXT = 1, 17, 201
BYTES = 8192


def status(process: Process, expression: str, **names: object) -> int | None:
    """The number that HIP refuses an expression with."""
    with pytest.raises(Refused) as refused:
        process.get(expression, **names)
    return refused.value.status


@pytest.fixture
def handle(one: Process, other: Process) -> Iterator[bytes]:
    """Of memory at ``p`` in `one`, on device 0, which is the current one of both."""
    other.run("rt.setDevice(0)")
    one.run(f"rt.setDevice(0); p = rt.malloc({BYTES}); rt.memset(p, 1, {BYTES})")
    yield one.get("rt.ipcGetMemHandle(p)")
    one.run("p and rt.free(p)")


def byte(process: Process, pointer: str, offset: int) -> int:
    """A byte of device memory."""
    process.run(f"b = np.zeros(1, np.uint8); rt.memcpy(b.ctypes.data, {pointer} + {offset}, 1, 2)")
    return int(process.get("b[0]"))


def test_both_processes_see_what_either_writes(one: Process, other: Process, handle: bytes) -> None:
    assert len(handle) == 64
    other.run("q = rt.ipcOpenMemHandle(handle)", handle=handle)
    assert byte(other, "q", BYTES - 1) == 1
    other.run("rt.memset(q + 100, 2, 1)")
    assert (byte(one, "p", 99), byte(one, "p", 100)) == (1, 2)
    one.run("rt.memset(p + 200, 3, 1)")
    assert byte(other, "q", 200) == 3
    other.run("rt.ipcCloseMemHandle(q)")


def test_a_kernel_writes_what_the_other_process_owns(one: Process, other: Process, handle: bytes) -> None:
    other.run("q = rt.ipcOpenMemHandle(handle)", handle=handle)
    other.run("code = 'extern \"C\" __global__ void fill(char *x) { x[threadIdx.x] = (char)threadIdx.x; }'")
    other.run("cp.RawModule(code=code).get_function('fill')((1,), (128,), (np.intp(q),)); rt.deviceSynchronize()")
    assert [byte(one, "p", at) for at in (0, 1, 127, 128)] == [0, 1, 127, 1]
    other.run("rt.ipcCloseMemHandle(q)")


def test_not_in_the_process_it_is_of(one: Process, handle: bytes) -> None:
    with pytest.raises(Refused, match="hipErrorInvalidContext: invalid device context") as refused:
        one.run("rt.ipcOpenMemHandle(handle)", handle=handle)
    assert refused.value.status == INVALID_CONTEXT


def test_opened_again_it_is_the_same_pointer_until_closed_as_often(one: Process, other: Process, handle: bytes) -> None:
    other.run("q = rt.ipcOpenMemHandle(handle); again = rt.ipcOpenMemHandle(handle)", handle=handle)
    assert other.get("q == again") is True
    other.run("rt.ipcCloseMemHandle(q)")
    assert byte(other, "q", 0) == 1
    other.run("rt.ipcCloseMemHandle(q)")
    assert status(other, "rt.ipcCloseMemHandle(q)") == INVALID_VALUE
    assert status(other, "rt.memset(q, 0, 1)") == INVALID_VALUE


def test_the_middle_of_an_allocation_comes_out_as_it(one: Process, other: Process, handle: bytes) -> None:
    one.run("rt.memset(p + 4200, 9, 1)")
    middle = one.get("rt.ipcGetMemHandle(p + 4200)")
    other.run("q = rt.ipcOpenMemHandle(handle)", handle=middle)
    assert byte(other, "q", 0) == 9
    assert byte(other, "q", -1) == 1  # the whole allocation is there
    other.run("rt.ipcCloseMemHandle(q)")


def test_what_was_not_opened_is_not_closed_nor_freed_what_was(one: Process, other: Process, handle: bytes) -> None:
    other.run("q = rt.ipcOpenMemHandle(handle); own = rt.malloc(64)", handle=handle)
    assert status(other, "rt.ipcCloseMemHandle(own)") == INVALID_VALUE
    assert status(other, "rt.ipcCloseMemHandle(0)") == INVALID_VALUE
    assert status(one, "rt.ipcCloseMemHandle(p)") == INVALID_VALUE
    assert status(other, "rt.free(q)") == INVALID_VALUE
    assert status(other, "rt.ipcGetMemHandle(q)") == INVALID_VALUE
    other.run("rt.ipcCloseMemHandle(q); rt.free(own)")


def test_only_memory_of_the_current_device_has_a_handle(one: Process, handle: bytes) -> None:
    one.run("pinned = rt.hostAlloc(64, 0); managed = rt.mallocManaged(64); host = np.zeros(8)")
    for pointer in ("pinned", "managed", "host.ctypes.data", "0", f"p + {BYTES}"):
        assert status(one, f"rt.ipcGetMemHandle({pointer})") == INVALID_VALUE, pointer
    assert status(one, "(rt.setDevice(1), rt.ipcGetMemHandle(p))") == INVALID_VALUE


@pytest.mark.parametrize("flags", [0, 2, 3])
def test_flags_are_one(other: Process, handle: bytes, flags: int) -> None:
    assert status(other, "rt.ipcOpenMemHandle(handle, flags)", handle=handle, flags=flags) == INVALID_VALUE


def test_a_handle_that_is_none(other: Process, handle: bytes) -> None:
    assert status(other, "rt.ipcOpenMemHandle(bytes(64))") == INVALID_VALUE
    assert status(other, "rt.ipcOpenMemHandle(handle)", handle=b"x" + handle[1:]) == INVALID_VALUE


def test_a_handle_of_another_device(one: Process, other: Process, handle: bytes) -> None:
    second = one.get("(rt.setDevice(1), rt.ipcGetMemHandle(rt.malloc(64)))[1]")
    assert status(other, "rt.ipcOpenMemHandle(handle)", handle=second) == INVALID_DEVICE_POINTER
    other.run("rt.setDevice(1); q = rt.ipcOpenMemHandle(handle)", handle=second)
    assert other.get("rt.pointerGetAttributes(q).device") == 1


def test_a_handle_holds_the_ordinal_that_its_device_has_in_its_process(start: Starts) -> None:
    one, narrow, turned = start(), start(HIP_VISIBLE_DEVICES="1"), start(HIP_VISIBLE_DEVICES="1,0")
    second = one.get("(rt.setDevice(1), rt.ipcGetMemHandle(rt.malloc(64)))[1]")
    # It sees the device, as its only one, and so has none of that ordinal.
    assert status(narrow, "rt.ipcOpenMemHandle(handle)", handle=second) == INVALID_VALUE
    assert status(turned, "(rt.setDevice(1), rt.ipcOpenMemHandle(handle))", handle=second) == INVALID_DEVICE_POINTER
    assert turned.get("(rt.setDevice(0), rt.ipcOpenMemHandle(handle))[1] > 0", handle=second) is True


def test_freed_or_of_a_dead_process_it_opens_no_more_but_stays_where_it_is_open(other: Process, start: Starts) -> None:
    owner, running = start(), start()
    owner.run("p, freed = rt.malloc(64), rt.malloc(64); rt.memset(p, 5, 64)")
    handle, gone = owner.get("rt.ipcGetMemHandle(p)"), owner.get("rt.ipcGetMemHandle(freed)")
    owner.run("rt.free(freed)")
    other.run("rt.setDevice(0)")
    assert status(other, "rt.ipcOpenMemHandle(handle)", handle=gone) == INVALID_DEVICE_POINTER
    other.run("q = rt.ipcOpenMemHandle(handle)", handle=handle)
    owner.kill()
    # Its memory is still there for a moment, but nobody hands it over.
    for process in (running, start()):
        assert status(process, "rt.ipcOpenMemHandle(handle)", handle=handle) == INVALID_DEVICE_POINTER
    assert byte(other, "q", 63) == 5
    other.run("rt.ipcCloseMemHandle(q)")
    assert status(other, "rt.ipcOpenMemHandle(handle)", handle=handle) == INVALID_DEVICE_POINTER


def test_not_on_another_machine(start: Starts, handle: bytes, elsewhere: str) -> None:
    there = start(HIPSTANDIN_MACHINE=elsewhere)
    assert status(there, "rt.ipcOpenMemHandle(handle)", handle=handle) == INVALID_DEVICE_POINTER
