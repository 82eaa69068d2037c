"""The memory of the stand-in's devices: what HIP allows, what it refuses, and that nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.rocm.processes import Ended, Process, Refused
from tests.simulators.rocm import standin

if TYPE_CHECKING:
    from tests.rocm.conftest import Starts

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_DEVICE, INVALID_HANDLE = 1, 2, 3, 101, 400
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = 1, 2, 3, 4
MiB = 1 << 20


def status(process: Process, statement: str) -> int | None:
    """The number that HIP refuses a statement with."""
    with pytest.raises(Refused) as refused:
        process.run(statement)
    return refused.value.status


@pytest.fixture
def buffer(one: Process) -> Iterator[Process]:
    """`one`, with 1000 bytes of device memory at ``p`` and 2000 of the host at ``h``."""
    one.run("rt.setDevice(0); p = rt.malloc(1000); host = np.zeros(2000, np.uint8); h = host.ctypes.data")
    yield one
    one.run("p and rt.free(p)")


def test_new_memory_is_poisoned(buffer: Process) -> None:
    buffer.run("rt.memcpy(h, p, 1000, 2)")
    assert buffer.get("(host[:1000] == 0xCD).all(), (host[1000:] == 0).all()") == (True, True)


def test_copies_and_fills_reach_what_they_name(buffer: Process) -> None:
    buffer.run("host[:] = np.arange(2000) % 251; rt.memcpy(p, h, 1000, 1); rt.memset(p + 10, 7, 20); host[:] = 0")
    buffer.run("q = rt.malloc(1000); rt.memcpyAsync(q, p, 1000, 3, 0); rt.memcpy(h, q, 1000, 2)")
    buffer.run("wanted = np.arange(1000) % 251; wanted[10:30] = 7")
    assert buffer.get("(host[:1000] == wanted).all()") is True


@pytest.mark.parametrize(
    "call",
    [
        "rt.memcpy(h, p, 1001, 2)",
        "rt.memcpy(p + 1, h, 1000, 1)",
        "rt.memcpy(p - 8, h, 8, 1)",  # neither is memory of a device
        "rt.memcpy(p, p + 600, 600, 3)",
        "rt.memcpyAsync(h, p + 500, 501, 4, 0)",
        "rt.memset(p, 0, 1001)",
        "rt.memset(p + 1000, 0, 1)",
        "rt.memset(h, 0, 8)",
        "rt.memcpy(0, p, 8, 2)",
        "rt.memcpyPeer(p, 1, p, 0, 8)",  # it is not memory of device 1
    ],
)
def test_a_copy_that_leaves_an_allocation_is_refused(buffer: Process, call: str) -> None:
    assert status(buffer, call) == INVALID_VALUE


def test_a_copy_between_devices(buffer: Process) -> None:
    buffer.run("rt.setDevice(1); q = rt.malloc(1000); rt.memset(q, 3, 1000); rt.memcpyPeer(p, 0, q, 1, 1000)")
    buffer.run("rt.memcpy(h, p, 1000, 2)")
    assert buffer.get("(host[:1000] == 3).all()") is True
    assert status(buffer, "rt.memcpyPeer(p, 0, q, 2, 8)") == INVALID_DEVICE


def test_only_the_beginning_is_freed_and_only_once(buffer: Process) -> None:
    assert status(buffer, "rt.free(p + 256)") == INVALID_VALUE
    assert status(buffer, "rt.free(h)") == INVALID_VALUE
    assert status(buffer, "rt.freeHost(p)") == INVALID_VALUE
    buffer.run("rt.free(p)")
    assert status(buffer, "rt.free(p)") == INVALID_VALUE
    assert status(buffer, "rt.memset(p, 0, 8)") == INVALID_VALUE
    buffer.run("p = 0")


def test_what_a_pointer_is(buffer: Process) -> None:
    buffer.run("pinned = rt.hostAlloc(64, 0); managed = rt.mallocManaged(64)")
    buffer.run("rt.setDevice(1); q = rt.malloc(64); rt.setDevice(0)")
    buffer.run("kinds = [rt.pointerGetAttributes(x) for x in (p + 8, q, pinned, managed, h)]")
    # HIP's are unregistered 0, host 1, device 2, managed 3. CuPy counts the first two one up, as older HIPs needed: it
    # takes pinned memory of the host for a device's.
    assert buffer.get("[(kind.type, kind.device) for kind in kinds]") == [(2, 0), (2, 1), (2, 0), (3, 0), (1, -2)]
    assert buffer.get("[kind.devicePointer - x for kind, x in zip(kinds, (p, q, pinned, managed))]") == [8, 0, 0, 0]


def test_a_device_has_so_much_memory_for_all_processes(start: Starts, elsewhere: str) -> None:
    one, other = start(HIPSTANDIN_MACHINE=elsewhere), start(HIPSTANDIN_MACHINE=elsewhere)
    assert one.get("rt.memGetInfo()") == (64 * MiB, 64 * MiB)
    other.run(f"q = rt.malloc({16 * MiB})")
    assert one.get("rt.memGetInfo()") == (48 * MiB, 64 * MiB)
    assert one.get("(rt.setDevice(1), rt.memGetInfo())[1]") == (64 * MiB, 64 * MiB)
    assert status(one, f"rt.setDevice(0); rt.malloc({56 * MiB})") == OUT_OF_MEMORY
    other.run("rt.free(q)")
    one.run(f"rt.malloc({56 * MiB})")


def test_cupys_pool_sees_the_end_of_memory(one: Process) -> None:
    one.run("a = cp.empty(40 << 20, np.uint8)")
    with pytest.raises(Refused) as refused:
        one.run("cp.empty(40 << 20, np.uint8)")
    assert refused.value.kind == "OutOfMemoryError"
    one.run("del a; cp.get_default_memory_pool().free_all_blocks()")


def test_memory_of_another_machine_is_none_of_this_one(start: Starts, elsewhere: str) -> None:
    there = start(HIPSTANDIN_MACHINE=elsewhere, HIPSTANDIN_DEVICES=1)
    there.run(f"p = rt.malloc({16 * MiB})")
    here = start()
    assert there.get("rt.memGetInfo()[0]") == 48 * MiB
    assert here.get("rt.memGetInfo()[0]") > 48 * MiB


def test_the_current_device_is_the_threads(one: Process) -> None:
    one.run("rt.setDevice(1)")
    assert one.get("(in_thread(rt.getDevice), rt.getDevice(), rt.getDeviceCount())") == (0, 1, 2)
    one.run("in_thread(lambda: rt.setDevice(1)); rt.setDevice(0)")
    assert status(one, "rt.setDevice(2)") == INVALID_DEVICE
    assert status(one, "rt.setDevice(-1)") == INVALID_DEVICE


def test_devices_are_told_apart_and_do_not_reach_each_other(one: Process) -> None:
    first, second = one.get("[rt.deviceGetPCIBusId(i) for i in (0, 1)]")
    assert first != second
    assert one.get("rt.deviceGetByPCIBusId(second)", second=second) == 1
    assert one.get("rt.deviceCanAccessPeer(0, 1)") == 0


def test_visible_devices_are_those_named_in_their_order(machine: dict[str, str], start: Starts) -> None:
    both, turned, none = start(), start(HIP_VISIBLE_DEVICES="1,0,7"), start(HIP_VISIBLE_DEVICES="")
    bus = "[rt.deviceGetPCIBusId(i) for i in range(rt.getDeviceCount())]"
    assert turned.get(bus) == both.get(bus)[::-1]
    with pytest.raises(Refused) as refused:
        none.get("rt.getDeviceCount()")
    assert refused.value.status == 100


def test_stale_streams_and_events_are_refused(one: Process) -> None:
    one.run("rt.setDevice(0); p = rt.malloc(64); s = rt.streamCreateWithFlags(1); e = rt.eventCreate()")
    one.run("rt.memsetAsync(p, 0, 64, s); rt.eventRecord(e, s); rt.streamWaitEvent(s, e); rt.eventSynchronize(e)")
    one.run("f = rt.eventCreate(); rt.eventRecord(f, 0); rt.streamSynchronize(s)")
    assert one.get("rt.eventElapsedTime(e, f) >= 0") is True
    one.run("unrecorded = rt.eventCreate(); untimed = rt.eventCreateWithFlags(2); rt.eventRecord(untimed, 0)")
    for stop in ("unrecorded", "untimed"):
        assert status(one, f"rt.eventElapsedTime(e, {stop})") == INVALID_HANDLE
    one.run("rt.setDevice(1); far = rt.streamCreate(); rt.setDevice(0)")
    assert status(one, "rt.eventRecord(e, far)") == INVALID_HANDLE
    one.run("rt.streamDestroy(s); rt.eventDestroy(e)")
    for call in (
        *("rt.streamSynchronize(s)", "rt.streamDestroy(s)", "rt.memsetAsync(p, 0, 8, s)", "rt.streamWaitEvent(0, e)"),
        *("rt.memcpyAsync(p, p, 8, 3, s)", "rt.eventRecord(f, s)", "rt.eventRecord(e, 0)", "rt.eventDestroy(e)"),
        "rt.eventSynchronize(e)",
    ):
        assert status(one, call) == INVALID_HANDLE, call
    assert one.get("(rt.eventQuery(e), rt.streamQuery(12345))") == (INVALID_HANDLE, INVALID_HANDLE)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("rt.mallocAsync(64, 0)", "RuntimeError"),
        ("cp.cuda.malloc_async(64)", "RuntimeError"),
        ("rt.ipcGetEventHandle(cp.cuda.Event().ptr)", "CUDARuntimeError"),
        ("rt.hostRegister(h, 64, 0)", "CUDARuntimeError"),
    ],
)
def test_what_cupy_does_not_offer_on_rocm_stays_refused(buffer: Process, call: str, kind: str) -> None:
    with pytest.raises(Refused) as refused:
        buffer.run(call)
    assert refused.value.kind == kind


def test_a_forked_child_cannot_use_hip(start: Starts) -> None:
    process = start()
    process.run(
        "import os\n"
        "p = rt.malloc(64)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        rt.malloc(64)\n"
        "    except rt.CUDARuntimeError as error:\n"
        "        os._exit(error.status)\n"
        "    os._exit(0)\n"
        "said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
    )
    assert process.get("said") == NOT_INITIALIZED
    process.run("rt.memset(p, 0, 64)")


def test_no_memory_outlives_its_process(start: Starts, elsewhere: str) -> None:
    first, second = start(HIPSTANDIN_MACHINE=elsewhere), start(HIPSTANDIN_MACHINE=elsewhere)
    for process in (first, second):
        process.run("kept = [rt.malloc(4096) for _ in range(3)]; a = cp.zeros(100)")
    assert len(standin.leftovers(elsewhere)) == 8
    assert first.close() == 0
    assert len(standin.leftovers(elsewhere)) == 4
    second.kill()
    # Whichever process begins next removes them, on any machine.
    start().run("rt.getDeviceCount()")
    assert standin.leftovers(elsewhere) == []


def test_a_kernel_that_leaves_memory_ends_its_process(start: Starts) -> None:
    process = start()
    process.run("code = 'extern \"C\" __global__ void past(int *p) { p[threadIdx.x + 1024] = 1; }'")
    process.run("f = cp.RawModule(code=code).get_function('past'); p = rt.malloc(4096)")
    with pytest.raises(Ended) as ended:
        process.run("f((1,), (64,), (np.intp(p),))")
    assert ended.value.status == -6
    assert "memory access fault: kernel past, in block (0,0,0), thread (0,0,0)" in ended.value.said


def test_host_memory_is_registered_once_and_unregistered_once(buffer: Process) -> None:
    """CuPy for ROCm has no call for it."""
    buffer.run(
        "import ctypes\n"
        "path = next(line.split()[-1] for line in open('/proc/self/maps') if '/libamdhip64.so' in line)\n"
        "hip = ctypes.CDLL(path)\n"
        "register = lambda at, size: hip.hipHostRegister(ctypes.c_void_p(at), ctypes.c_size_t(size), 0)\n"
        "unregister = lambda at: hip.hipHostUnregister(ctypes.c_void_p(at))"
    )
    already, unknown = 712, 713
    assert buffer.get("register(h, 1000), register(h, 1000), register(h - 8, 100), register(h + 999, 1)") == (
        *(0, already, already, already),
    )
    assert buffer.get("unregister(h + 1), unregister(p), unregister(h), unregister(h)") == (
        *(unknown, unknown, 0, unknown),
    )
    assert buffer.get("register(h, 0), register(0, 8), register(p, 8)") == (INVALID_VALUE, INVALID_VALUE, already)
