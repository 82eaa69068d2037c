"""The CPU executor itself: what kernels get right there, and every mistake that it is there to find."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest

from kernels.device import source
from tests.kernels import devices
from tests.simulators.cpu import executor
from tests.simulators.cpu.executor import Cpu, KernelError, Module

pytestmark = pytest.mark.needs("g++")

KERNELS = r"""
// defines: COUNT=1..
#include "common.h"
#ifndef COUNT
#define COUNT 32
#endif

RF_KERNEL sums(const float *x, float *y, i32 n) {
    __shared__ float scratch[32];
    float sum = 0.0f;
    for (i32 i = threadIdx.x; i < n; i += blockDim.x) sum += x[(i64)blockIdx.x * n + i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

RF_KERNEL places(i32 *out) {
    i32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    i32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * (i32)(blockDim.x * blockDim.y * blockDim.z) + thread] =
        threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z +
        1000 * blockIdx.x + 10000 * blockIdx.y + 100000 * blockIdx.z;
}

RF_KERNEL lanes(const i32 *x, i32 *out) {
    i32 mine = x[threadIdx.x], n = blockDim.x;
    out[threadIdx.x] = shuffle_xor(mine, 1);
    out[n + threadIdx.x] = shuffle(mine, 3);
    out[2 * n + threadIdx.x] = shuffle_down(mine, 2);
    out[3 * n + threadIdx.x] = shuffle_up(mine, 2);
    out[4 * n + threadIdx.x] = __popcll(ballot(mine > 0));
    sync_wave();
}

RF_KERNEL atomics(i32 *counts, float *total, i32 *order) {
    atomicAdd(&counts[0], 1);
    atomicMax(&counts[1], (i32)threadIdx.x);
    atomicMin(&counts[2], (i32)threadIdx.x);
    if (atomicCAS(&counts[3], 0, 1) == 0) atomicExch(&counts[4], 7);
    atomicOr(&counts[5], 1 << (threadIdx.x % 8));
    atomicAdd(total, 0.5f);
    if (threadIdx.x == 0) order[atomicAdd(&counts[6], 1)] = blockIdx.x;
}

template <int size> RF_INLINE float *of_template() {
    __shared__ float room[size];
    return room;
}
// Each block tells what it finds in shared memory, and writes there.
RF_KERNEL finds(float *out) {
    __shared__ float fixed[COUNT];
    RF_DYNAMIC_SHARED(float, dynamic);
    i32 i = threadIdx.x;
    out[(blockIdx.x * 3 + 0) * blockDim.x + i] = fixed[i % COUNT];
    out[(blockIdx.x * 3 + 1) * blockDim.x + i] = dynamic[i];
    out[(blockIdx.x * 3 + 2) * blockDim.x + i] = of_template<8>()[i % 8];
    __syncthreads();
    fixed[i % COUNT] = dynamic[i] = of_template<8>()[i % 8] = 1.0f;
}
RF_KERNEL never_written(float *out) {
    __shared__ float never[4];
    out[threadIdx.x] = never[threadIdx.x % 4];
}

// --- mistakes ---

RF_KERNEL reverse_without_barrier(const float *x, float *y) {
    __shared__ float s[1024];
    s[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x % 2) y[threadIdx.x] = s[threadIdx.x - 1];
    else y[threadIdx.x] = s[threadIdx.x];
}
RF_KERNEL barrier_in_a_branch(float *y) {
    if (threadIdx.x < 32) __syncthreads();
    y[threadIdx.x] = 1.0f;
}
RF_KERNEL two_barriers(float *y) {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();
    y[threadIdx.x] = 1.0f;
}
RF_KERNEL early_return(float *y) {
    if (threadIdx.x >= 100) return;
    __syncthreads();
    y[threadIdx.x] = 1.0f;
}
RF_KERNEL shuffle_in_a_branch(float *y) {
    float value = 1.0f;
    if (threadIdx.x % 2) value = shuffle_xor(value, 2);
    y[threadIdx.x] = value;
}
RF_KERNEL shuffle_beside_barrier(float *y) {
    if (threadIdx.x % 2) y[threadIdx.x] = shuffle_xor(1.0f, 2);
    else __syncthreads();
}
RF_KERNEL sum_of_32(const float *x, float *y) {
    float sum = x[threadIdx.x];
    for (int mask = 16; mask > 0; mask >>= 1) sum += shuffle_xor(sum, mask);
    y[threadIdx.x] = sum;
}
RF_KERNEL stores(float *y, i64 at) { y[at + threadIdx.x] = 1.0f; }
RF_KERNEL loads(const float *x, float *y, i64 at) { y[threadIdx.x] = x[at + threadIdx.x]; }
RF_KERNEL stores_shared(float *y, i32 at, i32 through_pointer) {
    __shared__ float s[64];
    float *p = s;
    if (through_pointer) p[at + (i32)threadIdx.x] = 1.0f;
    else s[at + (i32)threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}
RF_KERNEL stores_dynamic(float *y, i32 at) {
    RF_DYNAMIC_SHARED(float, s);
    s[at + (i32)threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}
RF_KERNEL misaligned(const float *x, float *y) {
    Pack<F32, 4> four = *(const Pack<F32, 4> *)(x + 1);
    y[threadIdx.x] = four.bits[threadIdx.x % 4];
}
RF_KERNEL much_shared(float *y) {
    __shared__ float s[10 * 1024];
    s[threadIdx.x] = 1.0f;
    y[threadIdx.x] = s[threadIdx.x];
}
RF_KERNEL __launch_bounds__(2 * RF_WAVE) bounded(float *y) { y[threadIdx.x] = 1.0f; }
RF_KERNEL divides(i32 *y, i32 by) { y[threadIdx.x] = 7 / by; }
RF_INLINE float deep(float *y, i32 n) {
    volatile float room[1024];
    room[n % 1024] = y[0];
    return n ? deep(y, n - 1) + room[n % 1024] : 0.0f;
}
RF_KERNEL recurses(float *y, i32 n) { y[threadIdx.x] = deep(y, n); }
RF_KERNEL many(i8 *a, u16 b, i32 c, u64 d, float e) { a[0] = (i8)(b + c + (i32)d + (i32)e); }
"""

TEXT = source.inlined(KERNELS, "bad.hip")


def compiled(cpu: Cpu, **defines: int) -> Module:
    return cpu.compile_text(TEXT, defines, "bad.hip")


CPUS = {name: cast(Cpu, devices.DEVICES[name]()) for name in devices.NAMES if name.startswith("cpu")}
CPUS["ucontext"] = Cpu(64, ucontext=True)
CPUS["ucontext-sanitised"] = Cpu(64, ucontext=True, sanitised=True)


@pytest.fixture(params=CPUS)
def cpu(request: pytest.FixtureRequest) -> Any:
    return CPUS[request.param]


@pytest.fixture(params=["cpu-w64", "cpu-w64-sanitised"])
def plain_or_sanitised(request: pytest.FixtureRequest) -> Any:
    return CPUS[request.param]


def new(cpu: Cpu, *shape: int, dtype: Any = np.float32) -> Any:
    return cpu.empty(shape, dtype)


# --- what is right ---------------------------------------------------------------------------------------------------


def test_block_sum(cpu: Cpu) -> None:
    x = np.random.default_rng(0).standard_normal((9, 1000)).astype(np.float32)
    for block in (64, 128, 512):
        out = new(cpu, 9)
        compiled(cpu).launch("sums", 9, block, [cpu.array(x), out, np.int32(1000)])
        np.testing.assert_allclose(cpu.get(out), x.sum(axis=1, dtype=np.float64), rtol=1e-4, atol=1e-4)


def test_every_thread_of_every_block_has_its_place(cpu: Cpu) -> None:
    out = new(cpu, 4, 3, 2, 2, 4, 8, dtype=np.int32)
    compiled(cpu).launch("places", (2, 3, 4), (8, 4, 2), [out])
    digits = np.indices((4, 3, 2, 2, 4, 8))
    assert np.array_equal(cpu.get(out), np.tensordot([100000, 10000, 1000, 100, 10, 1], digits, 1))


def test_lanes_see_each_other(cpu: Cpu) -> None:
    x = np.random.default_rng(0).integers(-50, 50, 128).astype(np.int32)
    out = new(cpu, 5, 128, dtype=np.int32)
    compiled(cpu).launch("lanes", 1, 128, [cpu.array(x), out])
    waves, lane = x.reshape(-1, cpu.wave), np.arange(cpu.wave)
    down, up = np.where(lane + 2 < cpu.wave, lane + 2, lane), np.where(lane >= 2, lane - 2, lane)
    positive = np.repeat((waves > 0).sum(axis=1), cpu.wave)
    expected = [waves[:, lane ^ 1], waves[:, lane * 0 + 3], waves[:, down], waves[:, up], positive]
    assert np.array_equal(cpu.get(out), [part.reshape(-1) for part in expected])


def test_atomics(cpu: Cpu) -> None:
    counts, total, order = cpu.array(np.array([0, 0, 99, 0, 0, 0, 0], np.int32)), cpu.array(np.zeros(1, np.float32)), 0
    order = new(cpu, 16, dtype=np.int32)
    compiled(cpu).launch("atomics", 16, 128, [counts, total, order])
    assert cpu.get(counts).tolist() == [16 * 128, 127, 0, 1, 7, 255, 16]
    assert cpu.get(total)[0] == 16 * 128 / 2
    assert sorted(cpu.get(order)) == list(range(16))
    # Blocks are taken in another order too, and each time another.
    permuted = cpu in (CPUS["cpu-w64-permuted"], CPUS["cpu-w32-permuted"])
    assert (cpu.get(order).tolist() != list(range(16))) == permuted


def test_shared_memory_is_nan_when_a_block_begins(cpu: Cpu) -> None:
    out = cpu.array(np.zeros((3, 3, 64), np.float32))
    compiled(cpu).launch("finds", 3, 64, [out], shared=64 * 4)
    assert np.isnan(cpu.get(out)).all()
    out = cpu.array(np.zeros(64, np.float32))
    compiled(cpu).launch("never_written", 1, 64, [out])
    assert np.isnan(cpu.get(out)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16", np.int8, np.int32, np.int64, np.uint8])
def test_new_memory_is_poisoned(dtype: Any) -> None:
    cpu = CPUS["cpu-w64"]
    found = cpu.get(cpu.empty((2, 3), dtype))
    assert found.shape == (2, 3) and found.dtype == np.dtype(dtype)
    if found.dtype.kind in "iu":
        assert found.tobytes() == b"\xcd" * found.nbytes
    else:
        assert np.isnan(found.astype(np.float32)).all()


def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(CPUS["cpu-w64"])
    monkeypatch.setattr(executor, "_run", lambda *_: pytest.fail("compiled again"))
    compiled(Cpu(64))


# --- what a GPU does not allow ---------------------------------------------------------------------------------------


PUNNED = """#include "common.h"
RF_KERNEL halves(i32 *y) {
    Pack<BF16, 2> two;
    (*(AS *)two.bits)WORD = y[threadIdx.x];
    y[threadIdx.x] = two.bits[0] | two.bits[1] << 16;
}
"""


def punned(access: str, word: str) -> str:
    return source.inlined(PUNNED.replace("AS", access).replace("WORD", word), "bad.hip")


@pytest.mark.parametrize("name", ["cpu-w64", "cpu-w64-sanitised", "cpu-w64-optimised"])
def test_numbers_of_one_type_are_not_accessed_as_another(name: str) -> None:
    """It may be right at one level of optimisation and wrong at the next, so it does not compile at any."""
    cpu = CPUS[name]
    with pytest.raises(KernelError, match=r"bad.hip:4:\d+: error: dereferencing type-punned pointer"):
        cpu.compile_text(punned("u32", ""), {}, "bad.hip")
    y = cpu.array(np.arange(64, dtype=np.int32) << 10)
    cpu.compile_text(punned("Registers<1>", ".of[0]"), {}, "bad.hip").launch("halves", 1, 64, [y])
    assert cpu.get(y).tolist() == [i << 10 for i in range(64)]


def test_a_cpu_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="sanitised and optimised"):
        Cpu(64, sanitised=True, optimised=True)
    with pytest.raises(ValueError, match="wave=64: must be 32 for gfx11"):
        Cpu(64, gfx11=True)


def test_a_missing_barrier_shows_in_permuted_order() -> None:
    """In order of the threads this kernel gives the right values, by luck."""
    x = np.arange(256, dtype=np.float32)
    for name, right in (("cpu-w64", True), ("cpu-w64-permuted", False), ("cpu-w32-permuted", False)):
        cpu = CPUS[name]
        y = new(cpu, 256)
        compiled(cpu).launch("reverse_without_barrier", 1, 256, [cpu.array(x), y])
        assert np.array_equal(cpu.get(y), x - x % 2) == right, name


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("barrier_in_a_branch", r"divergent barrier: .*has ended.*__syncthreads in bad.hip:\d+"),
        ("two_barriers", r"divergent barrier: .*__syncthreads in bad.hip:\d+; .*__syncthreads in bad.hip:\d+"),
        ("early_return", r"divergent barrier: .*has ended.*__syncthreads in bad.hip:\d+"),
        ("shuffle_in_a_branch", r"divergent wave operation: .*has ended.*shuffle_xor in bad.hip:\d+"),
        ("shuffle_beside_barrier", r"divergent wave operation: .*__syncthreads.*shuffle_xor in bad.hip:\d+"),
    ],
)
def test_threads_that_do_not_meet(cpu: Cpu, kernel: str, message: str) -> None:
    y = new(cpu, 128)
    with pytest.raises(KernelError, match=rf"bad.hip: {kernel}: block \(0,0,0\): {message}"):
        compiled(cpu).launch(kernel, 1, 128, [y])
    # ... and the device goes on.
    compiled(cpu).launch("bounded", 1, 64, [y])
    assert (cpu.get(y)[:64] == 1).all()


def test_a_reduction_over_32_lanes_is_wrong_where_a_wave_has_64() -> None:
    x = np.arange(128, dtype=np.float32)
    for name, right in (("cpu-w32", True), ("cpu-w64", False)):
        cpu = CPUS[name]
        y = new(cpu, 128)
        compiled(cpu).launch("sum_of_32", 1, 128, [cpu.array(x), y])
        assert np.array_equal(cpu.get(y), np.repeat(x.reshape(-1, cpu.wave).sum(axis=1), cpu.wave)) == right, name


@pytest.mark.parametrize("at", [65, 80, 1 << 20, -64, -(1 << 20)])
def test_memory_out_of_bounds(plain_or_sanitised: Cpu, at: int) -> None:
    """Of 129 floats, at 4 bytes past the end as well as far off."""
    cpu = plain_or_sanitised
    x, y = new(cpu, 129), new(cpu, 129)
    compiled(cpu).launch("stores", 1, 64, [y, np.int64(64)])
    compiled(cpu).launch("loads", 1, 64, [x, y, np.int64(64)])
    message = "AddressSanitizer" if cpu.sanitised else "out of bounds|outside the memory of argument 0"
    with pytest.raises(KernelError, match=rf"bad.hip: stores: [^$]*({message})"):
        compiled(cpu).launch("stores", 1, 64, [y, np.int64(at)])
        compiled(cpu).launch("stores", 1, 64, [y, np.int64(at + 1)])


def test_a_load_out_of_bounds(plain_or_sanitised: Cpu) -> None:
    cpu = plain_or_sanitised
    x, y = new(cpu, 128), new(cpu, 64)
    message = r"oads.*bad.hip:\d+" if cpu.sanitised else "0 bytes past the end of argument 0"
    with pytest.raises(KernelError, match=rf"bad.hip: loads: [^$]*{message}"):
        compiled(cpu).launch("loads", 1, 64, [x, y, np.int64(65)])


def test_after_a_fault_arrays_are_gone_and_the_device_goes_on(plain_or_sanitised: Cpu) -> None:
    cpu = plain_or_sanitised
    y = new(cpu, 64)
    with pytest.raises(KernelError, match=r"bad\.hip: stores"):
        compiled(cpu).launch("stores", 1, 64, [y, np.int64(1 << 40)])
    with pytest.raises(KernelError, match="before a kernel's fault"):
        cpu.get(y)
    y = new(cpu, 64)
    compiled(cpu).launch("stores", 1, 64, [y, np.int64(0)])
    assert (cpu.get(y) == 1).all()


@pytest.mark.parametrize("at", [1, 65, -4])
def test_shared_memory_out_of_bounds(plain_or_sanitised: Cpu, at: int) -> None:
    cpu = plain_or_sanitised
    if cpu.sanitised:
        errors = [r"bad.hip:\d+:\d+: runtime error: index -?\d+ out of bounds"]
        errors.append(
            r"(AddressSanitizer: global-buffer-overflow[^$]*bad.hip:\d+|bad.hip:\d+:\d+:.*insufficient space)"
        )
        for through_pointer, message in enumerate(errors):
            with pytest.raises(KernelError, match=message):
                compiled(cpu).launch("stores_shared", 1, 64, [new(cpu, 64), np.int32(at), np.int32(through_pointer)])
    message = r"AddressSanitizer[^$]*bad.hip:\d+" if cpu.sanitised else "shared memory|out of bounds"
    with pytest.raises(KernelError, match=message):
        compiled(cpu).launch("stores_dynamic", 1, 64, [new(cpu, 64), np.int32(at)], shared=64 * 4)


def test_a_vector_that_is_not_aligned() -> None:
    cpu = CPUS["cpu-w64-sanitised"]
    with pytest.raises(KernelError, match=r"bad.hip:\d+:\d+: runtime error: .*misaligned address"):
        compiled(cpu).launch("misaligned", 1, 64, [new(cpu, 64), new(cpu, 64)])


def test_too_much_shared_memory(cpu: Cpu) -> None:
    y = new(cpu, 64)
    compiled(cpu).launch("much_shared", 1, 64, [y], shared=8 * 1024)
    with pytest.raises(KernelError, match="uses 40960 bytes of static and 8193 of dynamic"):
        compiled(cpu).launch("much_shared", 1, 64, [y], shared=8 * 1024 + 1)


def test_faults_are_named() -> None:
    cpu = CPUS["cpu-w64"]
    with pytest.raises(KernelError, match=r"in block \(0,0,0\), thread \(0,0,0\): an integer was divided by zero"):
        compiled(cpu).launch("divides", 1, 64, [new(cpu, 64, dtype=np.int32), np.int32(0)])
    with pytest.raises(KernelError, match="the stack of a thread overflowed"):
        compiled(cpu).launch("recurses", 1, 64, [new(cpu, 64), np.int32(1000)])


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "arguments", "message"),
    [
        ("nothing", 1, 64, [], "no such kernel"),
        ("bounded", 1, 128, [np.int64(0)], "argument 0 is an integer of 8 bytes, the kernel takes a pointer"),
        ("bounded", 1, 256, [None], "a block of 256 threads: 1 to 128 are allowed"),
        ("bounded", 1, 96, [None], "a block of 96 threads is not a whole number of waves of 64"),
        ("bounded", 0, 64, [None], "a grid is at least 1"),
        ("bounded", (1, 65536), 64, [None], "at most 65535"),
        ("many", 1, 64, [None], "takes 5 arguments, 1 given"),
        ("bounded", 1, 64, [None, None, None], "takes 1 arguments, 3 given"),
        ("stores", 1, 64, [None, np.int32(0)], "argument 1 is an integer of 4 bytes, .* takes an integer of 8 bytes"),
        ("stores", 1, 64, [None, np.float64(0)], "argument 1 is a float of 8 bytes, .* takes an integer of 8 bytes"),
    ],
)
def test_a_launch_that_cannot_be(kernel: str, grid: Any, block: int, arguments: list[Any], message: str) -> None:
    with pytest.raises(KernelError, match=f"bad.hip: {kernel}: .*{message}"):
        compiled(CPUS["cpu-w64"]).launch(kernel, grid, block, arguments)


def test_arguments_arrive_with_their_own_widths() -> None:
    cpu = CPUS["cpu-w64"]
    out = cpu.array(np.zeros(1, np.int8))
    values = [np.uint16(60000), np.int32(-60001), np.uint64(1 << 40 | 5), np.float32(9.5)]
    compiled(cpu).launch("many", 1, 64, [out, *values])
    assert cpu.get(out)[0] == 60000 - 60001 + 5 + 9
    with pytest.raises(TypeError, match="array of the device, None or a NumPy scalar"):
        compiled(cpu).launch("many", 1, 64, [out, 1, 2, 3, 4])


def test_arrays_of_another_device_are_refused() -> None:
    x = CPUS["cpu-w32"].empty(64, np.float32)
    with pytest.raises(KernelError, match="another device"):
        compiled(CPUS["cpu-w64"]).launch("bounded", 1, 64, [x])


def test_a_source_that_does_not_compile_tells_its_own_lines() -> None:
    text = source.inlined(
        '// A comment.\n#include "common.h"\nRF_KERNEL bad(float *y) {\n    y[0] = no_such_name;\n}\n', "x.hip"
    )
    with pytest.raises(KernelError, match=r"does not compile:[^$]*x.hip:4:.*no_such_name"):
        CPUS["cpu-w64"].compile_text(text, {}, "x.hip")


def test_defines_reach_the_source() -> None:
    cpu = CPUS["cpu-w64"]
    with pytest.raises(KernelError, match="uses 49312 bytes"):
        compiled(cpu, COUNT=12 * 1024 + 32).launch("finds", 1, 64, [new(cpu, 192)], shared=256)
    with pytest.raises(ValueError, match=re.escape("bad.hip: COUNTS=3: no such define; it has COUNT")):
        compiled(cpu, COUNTS=3)


def test_a_launch_that_is_interrupted_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Cpu(64)
    y = new(cpu, 64)
    worker = cpu._running
    assert worker is not None

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        worker, "_from", type("Pipe", (), {"readline": staticmethod(interrupted), "close": lambda _: 0})()
    )
    with pytest.raises(KeyboardInterrupt):
        compiled(cpu).launch("bounded", 1, 64, [y])
    assert worker._process.returncode == -9
    new(cpu, 64)
    cpu.close()
