"""Kernels on the stand-in: compiled and launched by CuPy's RawModule, and the mistakes that are noticed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kernels.device import source
from tests.kernels.device import amdgcn
from tests.rocm.processes import Process, Refused
from tests.simulators.amdgpu.code import objectfile
from tests.simulators.amdgpu.device import toolchain as amdgpu_toolchain
from tests.simulators.rocm import standin

if TYPE_CHECKING:
    from tests.rocm.conftest import Starts

ROOT = Path(__file__).parents[2]
INVALID_VALUE, INVALID_CONFIGURATION, INVALID_IMAGE, INVALID_CONTEXT, INVALID_HANDLE = 1, 9, 200, 201, 400
NOT_FOUND, LAUNCH_FAILURE, NOT_SUPPORTED = 500, 719, 801

SOURCE = r"""
#include "common.h"
// defines: RF_TYPE=F32|F16|BF16 SCALE=1..

// y[row] = SCALE times the sum of x[row, columns], by one block.
RF_KERNEL sums(const RF_TYPE::Bits *x, float *y, i32 columns) {
    __shared__ float scratch[32];
    float sum = 0.0f;
    x += (i64)blockIdx.x * columns;
    for (i32 i = (i32)threadIdx.x; i < columns; i += (i32)blockDim.x) sum += RF_TYPE::load(x[i]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) y[blockIdx.x] = SCALE * sum;
}

// What the threads of a block see of each other through dynamic shared memory.
RF_KERNEL turned(float *x) {
    RF_DYNAMIC_SHARED(float, all);
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

RF_KERNEL never_written(float *x) {
    RF_DYNAMIC_SHARED(float, all);
    x[threadIdx.x] = all[threadIdx.x];
}

RF_KERNEL divergent(i32 some) {
    if ((i32)threadIdx.x < some) __syncthreads();
}

RF_KERNEL __launch_bounds__(128) small(i32 *x) { x[blockIdx.x] = (i32)blockDim.x; }
"""


def status(process: Process, statement: str) -> int | None:
    """The number that HIP refuses a statement with."""
    with pytest.raises(Refused) as refused:
        process.run(statement)
    return refused.value.status


def prepared(process: Process) -> Process:
    """A process with `SOURCE` as ``text``, and ``load(**defines)`` to compile it for the current device."""
    process.run("from kernels.device import source; text = source.inlined(text, 'test.hip')", text=SOURCE)
    process.run(
        "def load(**defines):\n"
        "    wave = rt.getDeviceProperties(rt.getDevice())['warpSize']\n"
        "    given = {'RF_WAVE': wave, 'RF_TYPE': 'F32', 'SCALE': 1, **defines}\n"
        "    return cp.RawModule(code=text, options=('-std=c++17', *(f'-D{n}={v}' for n, v in given.items())))\n"
    )
    return process


@pytest.fixture(scope="module")
def wave64(one: Process) -> Process:
    """A process whose waves have 64 lanes, with `SOURCE` loaded as ``m``."""
    prepared(one).run("m = load()")
    return one


@pytest.fixture(scope="module")
def wave32() -> Iterator[Process]:
    """The same with 32."""
    process = Process(standin.environment(wave=32))
    prepared(process).run("m = load()")
    yield process
    process.kill()


@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_kernel_computes_what_numpy_does(request: pytest.FixtureRequest, wave: int, kind: str) -> None:
    process: Process = request.getfixturevalue(f"wave{wave}")
    dtype = {"F32": "np.float32", "F16": "np.float16", "BF16": "ml_dtypes.bfloat16"}[kind]
    process.run(f"import ml_dtypes; x = np.random.default_rng(1).standard_normal((3, 1000)).astype({dtype})")
    process.run("y = cp.empty(3, np.float32); d = cp.asarray(x.view(np.uint8))")
    process.run(f"load(RF_TYPE={kind!r}, SCALE=3).get_function('sums')((3,), (256,), (d, y, np.int32(1000)))")
    assert process.get("np.allclose(y.get(), 3 * x.astype('f8').sum(1), rtol=1e-5, atol=1e-4)") is True


def test_what_a_gpu_says_it_is(wave64: Process, wave32: Process) -> None:
    names = "[rt.getDeviceProperties(0)[name] for name in ('warpSize', 'gcnArchName', 'major', 'maxThreadsPerBlock')]"
    assert wave64.get(names) == [64, b"gfx942:sramecc+:xnack-", 9, 1024]
    assert wave32.get(names) == [32, b"gfx1100", 11, 1024]
    assert wave64.get("cp.cuda.Device().compute_capability") == "94"


def test_threads_meet_at_a_barrier(wave64: Process) -> None:
    wave64.run("x = cp.asarray(np.arange(192, dtype=np.float32))")
    wave64.run("m.get_function('turned')((1,), (192,), (x,), shared_mem=192 * 4)")
    assert wave64.get("(x.get() == np.arange(192)[::-1]).all()") is True


def test_shared_memory_begins_as_nan(wave64: Process) -> None:
    wave64.run("x = cp.zeros(64, np.float32); f = m.get_function('turned'); g = m.get_function('never_written')")
    wave64.run("f((1,), (64,), (x,), shared_mem=256); g((1,), (64,), (x,), shared_mem=256)")
    assert wave64.get("np.isnan(x.get()).all()") is True


def test_a_source_that_does_not_compile_says_why(wave64: Process) -> None:
    with pytest.raises(Refused) as refused:
        wave64.run("load(SCALE='no_such_name').compile()")
    assert refused.value.kind == "CompileException"
    assert re.search(r"test\.hip:\d+:\d+: error: .*", str(refused.value))
    assert "‘no_such_name’" in str(refused.value) or "'no_such_name'" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("('-DRF_WAVE=32', '-DRF_TYPE=F32', '-DSCALE=1')", "the waves of this device have 64 lanes"),
        ("('-DRF_TYPE=F32', '-DSCALE=1', '--use_fast_math')", "unknown option: --use_fast_math"),
    ],
)
def test_options_that_the_device_would_not_take(wave64: Process, options: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        wave64.run(f"cp.RawModule(code=text, options={options}).compile()")


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        ("small((1,), (192,), (x,))", INVALID_CONFIGURATION),  # more than its launch bounds
        ("sums((1,), (96,), (x, x, np.int32(1)))", INVALID_CONFIGURATION),  # it asks waves, and has half a one
        ("small((1,), (0,), (x,))", INVALID_CONFIGURATION),
        ("small((1, 65537), (64,), (x,))", INVALID_CONFIGURATION),
        ("small((2**31 - 1,), (64,), (x,))", INVALID_CONFIGURATION),  # 2**37 threads: AMD's count in 32 bits
        ("small((1,), (64,), (x,), shared_mem=65537)", INVALID_VALUE),
        ("m.get_function('divergent')((1,), (64,), (np.int32(3),))", LAUNCH_FAILURE),
    ],
)
def test_launches_that_a_gpu_refuses_or_does_not_survive(wave64: Process, launch: str, number: int) -> None:
    wave64.run("x = cp.zeros(64, np.int32); small, sums = m.get_function('small'), m.get_function('sums')")
    assert status(wave64, launch) == number
    wave64.run("small((2,), (64,), (x,))")
    assert wave64.get("x[:2].get().tolist()") == [64, 64]


def test_a_module_is_its_devices_and_so_is_a_stream(wave64: Process) -> None:
    wave64.run("rt.setDevice(0); f = m.get_function('small').kernel; x = cp.zeros(64, np.int32)")
    wave64.run("rt.setDevice(1); s = cp.cuda.ExternalStream(rt.streamCreate()); y = cp.zeros(64, np.int32)")
    assert status(wave64, "f((1,), (64,), (x,))") == INVALID_CONTEXT
    wave64.run("rt.setDevice(0)")
    assert status(wave64, "f((1,), (64,), (x,), stream=s)") == INVALID_HANDLE
    wave64.run("rt.setDevice(1); load().get_function('small')((1,), (64,), (y,), stream=s)")
    assert wave64.get("int(y[0]), (rt.setDevice(0), None)[1]") == (64, None)


def test_what_is_not_there(wave64: Process) -> None:
    assert status(wave64, "m.get_function('no_such_kernel')") == NOT_FOUND
    assert status(wave64, "cp.cuda.function.Module().load(b'no code object, but long enough for one')") == INVALID_IMAGE


def test_a_second_process_compiles_nothing(start: Starts, wave64: Process) -> None:
    # Both caches are there: CuPy's, and the compiler's own, which CuPy asks for an empty kernel in every process.
    process = prepared(start(CXX="/bin/false"))
    process.run("x = cp.zeros(8, np.int32); load().get_function('small')((1,), (64,), (x,))")
    assert process.get("int(x[0])") == 64
    with pytest.raises(Refused, match="CompileException"):
        process.run("load(SCALE=12345).compile()")


def test_cupys_own_kernels(one: Process) -> None:
    one.run("rt.setDevice(0); a = np.random.default_rng(2).standard_normal((6, 50)).astype(np.float32)")
    one.run("d = cp.asarray(a)")
    assert one.get("(cp.add(d, d.T.reshape(6, 50)).get() == a + a.T.reshape(6, 50)).all()") is True
    assert one.get("np.allclose(d.sum(axis=1).get(), a.sum(axis=1), atol=1e-5)") is True
    assert one.get("(d.astype(np.float16).get() == a.astype(np.float16)).all()") is True
    one.run("import ml_dtypes; bfloat = ml_dtypes.bfloat16")
    assert one.get("(d.astype(bfloat).get() == a.astype(bfloat)).all()") is True


# Not all of them: what is tested here is the way to a GPU, which is the same for all.
@pytest.mark.parametrize(("wave", "files"), [(64, ["norm", "pages"]), (32, ["norm"])])
def test_the_projects_kernels_pass_their_tests_through_cupy(wave: int, files: list[str]) -> None:
    environment = standin.environment(wave=wave, memory=256 << 20)
    paths = [f"tests/kernels/hip/test_{name}.py" for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cupy", *paths]
    done = subprocess.run(command, cwd=ROOT, env={**environment, "CI": "true"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


# --- occupancy --------------------------------------------------------------------------------------------------------

ASKED = """
from kernels.device import module, occupancy
asked = occupancy.of_device()
def fits(name, kernel, threads, shared, assumed, **defines):
    return asked.blocks(module.load(name, defines), kernel, threads, shared, assumed)
"""
DECODE = {"RF_TYPE": "BF16", "RF_KV": "BF16", "RF_HEAD_DIM": 128, "RF_GROUP": 4, "RF_PAGE_SIZE": 16, "RF_ROWS": 16}
MATRIX_DECODE = {**DECODE, "RF_MATRIX": 2, "RF_BLOCKS": 4}


@pytest.mark.needs(*amdgcn.TOOLS)
@pytest.mark.parametrize(("wave", "gpu", "registers", "most"), [(64, "gfx942", 4 * 512, 32), (32, "gfx1100", 3072, 32)])
def test_the_occupancy_query_answers_from_the_code_object(wave: int, gpu: str, registers: int, most: int) -> None:
    """By the descriptors, which give registers as they are allocated; the stand-in goes by the metadata."""
    process = Process(standin.environment(wave=wave, occupancy=True))
    try:
        process.run(ASKED)
        cases: list[tuple[str, str, int, int, dict[str, Any]]] = [
            ("attention_decode", "attention_decode", 4 * wave, 0, MATRIX_DECODE),
            ("gemv", "norm_gemv", 256, 0, {"RF_TYPE": "BF16", "RF_ROWS": 1}),
            ("gemv", "norm_gemv", 256, 32 << 10, {"RF_TYPE": "BF16", "RF_ROWS": 1}),
        ]
        for name, kernel, threads, shared, defines in cases:
            found = process.get(f"fits({name!r}, {kernel!r}, {threads}, {shared}, 99, **{defines})")
            given = {key: str(value) for key, value in defines.items()}
            of = objectfile.read(amdgpu_toolchain().code(source.read(name), given, gpu).read_bytes()).kernels[kernel]
            each = of.vectors + of.accumulators if wave == 64 else -(-of.vectors // 24) * 24
            waves = min(most, registers // (4 if wave == 64 else 2) // each * (4 if wave == 64 else 2))
            lds = of.shared_bytes + shared
            assert found == min(waves // (threads // wave), 65536 // lds if lds else 99), (name, kernel, shared)
        assert process.get("asked.refused") == ""
    finally:
        process.kill()


def test_without_an_answer_plans_assume_and_say_why(wave64: Process) -> None:
    wave64.run(ASKED)
    assert wave64.get("fits('pages', 'copy_pages', 256, 0, 5)") == 5
    assert wave64.get("asked.refused").endswith(f"MaxActiveBlocksPerMultiprocessor: status {NOT_SUPPORTED}")


def test_a_refused_query_says_why(wave64: Process) -> None:
    """A function that is gone, and more threads than the kernel may have."""
    wave64.run(ASKED + "from kernels.device.occupancy import OccupancyError\ntried = []\n")
    wave64.run(
        "for handle, threads in ((12345, 64), (m.get_function('small').kernel.ptr, 256)):\n"
        "    try: asked._query(handle, threads, 0)\n"
        "    except OccupancyError as error: tried.append(str(error).split()[-1])\n"
    )
    assert wave64.get("tried") == [str(INVALID_HANDLE), str(INVALID_VALUE)]
