"""Every kernel compiles for AMD's GPUs, and its code keeps to what they have: registers, shared memory, lanes.

And to what the executor of machine code knows, what loops with barriers must be like, and what is meant to be fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels.device import source
from tests import tools
from tests.kernels import devices
from tests.kernels.device import amdgcn, hiprtc, machine_code
from tests.kernels.device.amdgcn import Kernel, Toolchain
from tests.kernels.sampling.test_hang import without_barrier
from tests.simulators import amdgpu
from tests.simulators.amdgpu.code import mnemonics

MOST_SHARED = 48 * 1024
VARIANTS = [
    pytest.param(name, number, defines, id=f"{name}-{number}")
    for name in source.names()
    for number, defines in enumerate(source.variants(source.read(name), f"{name}.hip"))
]


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    """Return clang for AMD's GPUs."""
    tools.need(*amdgcn.TOOLS)
    return Toolchain(tmp_path_factory.mktemp("amdgcn"))


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Return threads that wait for as many compilers as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield threads


def faults(kernel: Kernel, gpu: str) -> list[str]:
    """The faults of a kernel's code."""
    found = []
    if kernel.wave != amdgcn.WAVES[gpu]:
        found.append(f"waves of {kernel.wave} lanes")
    if kernel.spilled:
        found.append(f"{kernel.spilled} registers spilled")
    if kernel.private_bytes:
        found.append(f"{kernel.private_bytes} bytes of private memory: an array that no registers can hold")
    if kernel.shared_bytes > MOST_SHARED:
        found.append(f"{kernel.shared_bytes} bytes of shared memory, more than {MOST_SHARED}")
    return [f"{gpu}: {kernel.name}: {fault}" for fault in found]


def in_turn(number: int) -> list[str]:
    """One GPU with waves of 64 lanes and one with 32."""
    wide = [gpu for gpu, wave in amdgcn.WAVES.items() if wave == 64]
    narrow = [gpu for gpu, wave in amdgcn.WAVES.items() if wave == 32]
    return [wide[number % len(wide)], narrow[number % len(narrow)]]


@pytest.mark.parametrize(("name", "number", "defines"), VARIANTS)
def test_every_variant_compiles_for_amd(
    toolchain: Toolchain, pool: ThreadPoolExecutor, name: str, number: int, defines: dict[str, str]
) -> None:
    """The first variant of a kernel for every GPU, the others for two that take turns."""
    text = source.read(name)
    gpus = list(amdgcn.WAVES) if number == 0 else in_turn(number)
    compiled = pool.map(lambda gpu: toolchain.compile(text, defines, gpu), gpus)
    found = []
    for gpu, kernels in zip(gpus, compiled, strict=True):
        assert kernels, f"{gpu}: no kernel"
        found += [fault for kernel in kernels for fault in faults(kernel, gpu)]
        if gpu in machine_code.GPUS:
            found += machine_code.faults(name, toolchain.code(text, defines, gpu))
    assert found == []


def test_every_source_says_what_must_compile() -> None:
    assert [name for name in source.names() if not source.variants(source.read(name), f"{name}.hip")] == []


@pytest.mark.needs("hip", "llvm")
@pytest.mark.parametrize("gpu", hiprtc.GPUS)
@pytest.mark.parametrize("name", source.names())
def test_hiprtc_compiles_every_source(name: str, gpu: str) -> None:
    """HIPRTC has types and functions of its own, and no headers; CuPy compiles with it."""
    text = source.read(name)
    assert machine_code.of_instructions(amdgpu.hiprtc().code(text, source.variants(text, f"{name}.hip")[0], gpu)) == []


# --- these tests can fail --------------------------------------------------------------------------------------------

BAD = """#include "common.h"
RF_KERNEL spills(const float *x, float *y, i32 n) {
    float values[2000];
    for (int i = 0; i < 2000; i++) values[i] = x[i * 64 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 2000; i++) y[i * 64 + threadIdx.x] = values[(i * 7 + n) % 2000];
}
RF_KERNEL __launch_bounds__(1024) crowded(const float *x, float *y) {
    float values[200];
#pragma unroll
    for (int i = 0; i < 200; i++) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 200; i++) y[i * 1024 + threadIdx.x] = values[i] * values[(i + 77) % 200];
}
RF_KERNEL hoards(float *y) {
    __shared__ float s[13 * 1024];
    s[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x + 1];
}
"""


def test_faults_are_found(toolchain: Toolchain) -> None:
    for gpu, other in (("gfx942", "gfx1100"), ("gfx1100", "gfx942")):
        kernels = toolchain.compile(source.inlined(BAD, "bad.hip"), {}, gpu)
        assert {kernel.name for kernel in kernels} == {"spills", "crowded", "hoards"}
        found = {kernel.name: " ".join(faults(kernel, gpu)) for kernel in kernels}
        assert "private memory" in found["spills"]
        assert "spilled" in found["crowded"]
        assert "53248 bytes of shared memory" in found["hoards"]
        assert all("lanes" in faults(kernel, other)[0] for kernel in kernels)


def test_the_sampler_that_hung_is_found(toolchain: Toolchain) -> None:
    """Without its last barrier the loop of `narrow` is an inner one on AMD, which only one thread leaves."""
    text = without_barrier(source.read("sampling"))
    for gpu in machine_code.GPUS:
        found = machine_code.faults("sampling", toolchain.code(text, {"RF_TYPE": "F32"}, gpu))
        assert any("sample_tokens: the loop at" in fault and "one by one" in fault for fault in found), (gpu, found)


FLAT = """#include "common.h"
// defines: NONE=1
RF_KERNEL waits(const float *x, float *y, i32 n) {
    __shared__ float s[64];
    const float *from = nullptr;
    for (int i = 0; i < n; i++) {
        if (!from) s[threadIdx.x] = y[threadIdx.x], from = x;
        y[i] += from[threadIdx.x + i] + s[63 - threadIdx.x];
    }
}
"""


def test_what_machine_code_must_not_be_is_found(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = dict(mnemonics.listed())
    monkeypatch.setattr(
        mnemonics, "listed", lambda: {name: gpus for name, gpus in listed.items() if "global_store" not in name}
    )
    for gpu in machine_code.GPUS:
        path = toolchain.code(source.inlined(FLAT, "flat.hip"), {}, gpu)
        # One more than there can be, also of RDNA 2's two thirds.
        monkeypatch.setitem(machine_code.WAVES_PER_SIMD, "flat", (9, 26))
        found = machine_code.faults("flat", path)
        for words in ("flat_load_", "waves per SIMD, of", "is not in mnemonics.txt"):
            assert any(words in fault for fault in found), (words, found)


@pytest.mark.parametrize("device", machine_code.GPUS)
@pytest.mark.parametrize(("name", "number", "defines"), VARIANTS)
def test_machine_code(toolchain: Toolchain, device: str, name: str, number: int, defines: dict[str, str]) -> None:
    """Every variant for every GPU: what the tests above leave to turns."""
    assert machine_code.faults(name, toolchain.code(source.read(name), defines, device)) == []


@pytest.mark.needs("hip", "llvm")
@pytest.mark.parametrize("device", [name for name in devices.MACHINES if name.endswith("-hiprtc")])
@pytest.mark.parametrize(("name", "number", "defines"), VARIANTS)
def test_machine_code_of_hiprtc(device: str, name: str, number: int, defines: dict[str, str]) -> None:
    """Not the registers: HIP 5.2 allocates them otherwise than the compilers of the ROCm that CuPy is for."""
    code = amdgpu.hiprtc().code(source.read(name), defines, device.removesuffix("-hiprtc"))
    assert machine_code.of_instructions(code) == []


@pytest.mark.needs("hip", "llvm")
@pytest.mark.parametrize("gpu", hiprtc.GPUS)
def test_the_sampler_that_hung_is_found_by_hiprtc(gpu: str) -> None:
    code = amdgpu.hiprtc().code(without_barrier(source.read("sampling")), {"RF_TYPE": "F32"}, gpu)
    found = machine_code.of_instructions(code)
    assert any("sample_tokens: the loop at" in fault and "one by one" in fault for fault in found), found


def test_what_does_not_compile_is_told(toolchain: Toolchain) -> None:
    text = source.inlined('#include "common.h"\nRF_KERNEL bad(float *y) { y[0] = nothing; }\n', "bad.hip")
    with pytest.raises(amdgcn.CompileError, match=r"bad\.hip:2:.*nothing"):
        toolchain.compile(text, {}, "gfx942")
    done = hiprtc.run(text, hiprtc.GPUS[0])
    assert done.returncode == 1 and b"nothing" in done.stderr
