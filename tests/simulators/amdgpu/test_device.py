"""What the executor does not let pass: each is seen to be an error that says where."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.device import source
from tests import tools
from tests.kernels.device import amdgcn
from tests.simulators import amdgpu
from tests.simulators.amdgpu.code import encoding
from tests.simulators.amdgpu.wave import Snippets, State

TEXT = """#include "common.h"
// defines: NONE=1
RF_KERNEL copy(const float *x, float *y, i32 n) {
    i32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) y[at] = x[at];
}
RF_KERNEL spins(volatile float *y) {
    while (y[threadIdx.x] == 0.0f) {}
}
RF_KERNEL reverses(float *y, i32 from) {
    __shared__ float s[64];
    s[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[from - threadIdx.x];
}
RF_KERNEL ids(i32 *y) {
    i32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    i32 thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    y[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 10000 + thread;
}
RF_KERNEL dynamic(float *y) {
    RF_DYNAMIC_SHARED(float, s);
    s[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.fixture(params=amdgpu.GPUS)
def device(request: pytest.FixtureRequest) -> amdgpu.Amd:
    tools.need("g++", *amdgcn.TOOLS)
    return amdgpu.Amd(request.param, bound=50_000)


@pytest.fixture
def module(device: amdgpu.Amd) -> amdgpu.Module:
    return device.compile_text(source.inlined(TEXT, "test.hip"))


def test_a_launch(device: amdgpu.Amd, module: amdgpu.Module) -> None:
    """Blocks and threads of three extents, dynamic LDS; what was executed is counted."""
    y = device.empty(3 * 2 * 2 * 128, np.int32)
    module.launch("ids", (3, 2, 2), (32, 2, 2), [y])
    assert device.get(y).tolist() == [block * 10000 + thread for block in range(12) for thread in range(128)]
    values = np.arange(128, dtype=np.float32)
    z = device.array(values)
    module.launch("dynamic", 1, 128, [z], shared=512)
    assert np.array_equal(device.get(z), values[::-1])
    assert module.executed()["s_endpgm"] == (12 + 1) * 128 // device.wave


def test_beside_an_array(device: amdgpu.Amd, module: amdgpu.Module) -> None:
    x, y = device.array(np.ones(100, np.float32)), device.empty(100, np.float32)
    module.launch("copy", 2, 64, [x, y, np.int32(100)])
    assert np.array_equal(device.get(y), np.ones(100))
    told = r"copy on gfx\w+: block 1,0,0: 0x[0-9a-f]+: global_load_\w+ .*a load of 4 bytes at 0x[0-9a-f]+: an array"
    with pytest.raises(amdgpu.Fault, match=told + r" float32\[100\] of 400 bytes, at its byte 400"):
        module.launch("copy", 2, 64, [x, y, np.int32(101)])
    short = device.empty(99, np.float32)
    with pytest.raises(amdgpu.Fault, match=r"a store of 4 bytes .*of 396 bytes, at its byte 396"):
        module.launch("copy", 2, 64, [x, short, np.int32(100)])
    with pytest.raises(amdgpu.Fault, match="no array is there"):
        module.launch("copy", 2, 64, [None, y, np.int32(100)])


def test_a_freed_array_is_gone(device: amdgpu.Amd, module: amdgpu.Module) -> None:
    x, y = device.array(np.ones(64, np.float32)), device.empty(64, np.float32)
    device.memory.free(x.address)
    address, x.memory = x.address, amdgpu.Amd(device.gpu).memory
    x.address = x.memory.add(b"", "")
    again = device.array(np.ones(64, np.float32))
    assert again.address != address
    gone = device.array(np.ones(1, np.float32))
    kept, gone.address = gone.address, address
    with pytest.raises(amdgpu.Fault, match="no array is there"):
        module.launch("copy", 1, 64, [gone, y, np.int32(64)])
    gone.address = kept


def test_beside_the_lds(device: amdgpu.Amd, module: amdgpu.Module) -> None:
    y = device.array(np.arange(64, dtype=np.float32))
    module.launch("reverses", 1, 64, [y, np.int32(63)])
    assert device.get(y).tolist() == list(range(63, -1, -1))
    with pytest.raises(amdgpu.Fault, match=r"reverses on .*ds_(read|load)_b32.*LDS: 4 bytes at 256 of 256"):
        module.launch("reverses", 1, 64, [y, np.int32(64)])
    with pytest.raises(amdgpu.Fault, match="49408 bytes of LDS, more than 49152"):
        module.launch("reverses", 1, 64, [y, np.int32(63)], shared=48 * 1024)


def test_a_wave_that_does_not_end(device: amdgpu.Amd, module: amdgpu.Module) -> None:
    y = device.array(np.zeros(64, np.float32))
    told = r"spins on .*does not end: 50000 instructions of a wave, and it is in a loop of \d+ instructions from 0x"
    with pytest.raises(amdgpu.Fault, match=told) as error:
        module.launch("spins", 1, 64, [y])
    assert "load" in str(error.value).partition("EXEC")[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda x: [x, x], "2 arguments, and it takes 3"),
        (lambda x: [x, x, np.int64(1)], "argument 2: .*int64 for 4 bytes"),
        (lambda x: [x, np.int64(1), np.int32(1)], "argument 1: .*for a global_buffer"),
        (lambda x: [x, x, x], "argument 2: .*for a by_value"),
    ],
)
def test_arguments(
    device: amdgpu.Amd, module: amdgpu.Module, arguments: Callable[[object], list[object]], words: str
) -> None:
    with pytest.raises(amdgpu.Fault, match=words):
        module.launch("copy", 1, 64, arguments(device.array(np.ones(64, np.float32))))


def test_an_instruction_that_is_lacking_is_an_error() -> None:
    with pytest.raises(amdgpu.Fault, match=r"v_cubema_f32 v1, v2, v3, v4: the executor has no v_cubema_f32"):
        Snippets("gfx942", ["v_cubema_f32 v1, v2, v3, v4"])
    with pytest.raises(encoding.EncodingError, match="modifier 'cbsz:1'"):
        Snippets("gfx942", ["v_mfma_f32_32x32x4_2b_f16 a[0:31], v[0:1], v[2:3], a[0:31] cbsz:1"])


def test_both_halves_of_a_dual_instruction_read_before_either_writes() -> None:
    snippets, state = Snippets("gfx1100", ["v_dual_mov_b32 v1, v4 :: v_dual_mov_b32 v4, v1"]), State()
    state.s[126], state.v[1], state.v[4] = 0xFFFFFFFF, 11, 44
    after = snippets.run(0, state)
    assert (after.v[1, :32] == 44).all() and (after.v[4, :32] == 11).all()


def test_literals_of_64_bits() -> None:
    """The high half of a float; of whole numbers the low half, with a sign where the operand has one."""
    pieces = [
        "s_mov_b64 s[0:1], 0xd2511f53", "s_ashr_i64 s[0:1], 0xd2511f53, 4", "v_add_f64 v[0:1], v[2:3], 0x40240000",
        "v_cmp_lt_i64_e64 s0, 0xd2511f53, v[2:3]", "v_cmp_lt_u64_e64 s0, 0xd2511f53, v[2:3]",
    ]  # fmt: skip
    snippets, state = Snippets("gfx1201", pieces), State()
    state.s[126] = 0xFFFFFFFF
    after = [snippets.run(number, state) for number in range(len(pieces))]
    assert after[0].scalar64(0) == 0xD2511F53
    assert after[1].scalar64(0) == 0xFFFFFFFFFD2511F5
    assert (after[2].v[0:2, :32] == [[0], [0x40240000]]).all()
    assert (int(after[3].s[0]), int(after[4].s[0])) == (0xFFFFFFFF, 0)


def test_lanes_of_a_wmma_that_have_to_be_alike() -> None:
    snippets, state = Snippets("gfx1100", ["v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]"]), State()
    snippets.run(0, state)
    state.v[9, 3] = 1
    with pytest.raises(amdgpu.Fault, match="lane 3 and lane 19 hold different numbers"):
        snippets.run(0, state)
