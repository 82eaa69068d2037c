"""Matrix products on the stand-in, as CuPy and as the product ask for them, against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.rocm.processes import Ended, Process, Refused

if TYPE_CHECKING:
    from tests.rocm.conftest import Starts

INVALID_VALUE, MAPPING_ERROR, EXECUTION_FAILED, NOT_SUPPORTED, INVALID_ENUM = 3, 4, 5, 7, 10
NOT_INITIALIZED = 1

#: Column-major `matrix`, `product` as NumPy has it, and `relative`, the error of what lies at ``c``.
PREPARE = """
import ctypes
import ml_dtypes
from cupy_backends.cuda.libs import cublas
from cupy.cuda import device

rng = np.random.default_rng(3)
TYPES = {"f4": (np.float32, 0), "f2": (np.float16, 2), "bf": (ml_dtypes.bfloat16, 14)}
one, half = np.ones(1, np.float32), np.full(1, 0.5, np.float32)
handle = device.get_cublas_handle()
library = ctypes.CDLL("libhipblas.so.3")
gemm_ex = library.hipblasGemmEx
pointer, number = ctypes.c_void_p, ctypes.c_int
each = [pointer, number, number]
gemm_ex.argtypes = [pointer, *[number] * 5, pointer, *each, *each, pointer, *each, number, number]

def matrix(rows, columns, lead, kind, batch=1):
    whole = rng.standard_normal((batch, columns, lead)).astype(TYPES[kind][0])
    return cp.asarray(whole.view(np.uint8)), whole[:, :, :rows].astype("f8").transpose(0, 2, 1)

def values(array, rows, columns, lead, kind, batch=1):
    return array.get().view(TYPES[kind][0]).reshape(batch, columns, lead)[:, :, :rows].astype("f8").transpose(0, 2, 1)

def turned(a, how):
    return a.transpose(0, 2, 1) if how else a

# m, n and k of no round number, and columns further apart than they are long.
m, n, k, batch = 37, 11, 70, 3
def operands(kind, ta, tb, out=None):
    global a, A, lda, b, B, ldb, c, C, ldc
    rows, columns = (k, m) if ta else (m, k)
    lda = rows + 3
    a, A = matrix(rows, columns, lda, kind, batch)
    rows, columns = (n, k) if tb else (k, n)
    ldb = rows + 1
    b, B = matrix(rows, columns, ldb, kind, batch)
    ldc = m + 2
    c, C = matrix(m, n, ldc, out or kind, batch)

def relative(ta, tb, alpha, beta, kind, batch=1):
    wanted = alpha * (turned(A, ta) @ turned(B, tb)) + beta * C
    found = values(c, m, n, ldc, kind, 3)
    # What lies outside of the product is as it was.
    untouched = (found[batch:] == C[batch:]).all()
    return np.linalg.norm(found[:batch] - wanted[:batch]) / np.linalg.norm(wanted[:batch]), untouched
"""
#: Rounding of the result; sums are in float.
CLOSE = {"f4": 1e-6, "f2": 4e-4, "bf": 3e-3}


@pytest.fixture(scope="module")
def blas(one: Process) -> Iterator[Process]:
    """A process that has run `PREPARE` on device 0."""
    one.run("rt.setDevice(0)")
    one.run(PREPARE)
    yield one


def status(process: Process, statement: str) -> int | None:
    """The number that hipBLAS refuses a statement with."""
    with pytest.raises(Refused) as refused:
        process.run(statement)
    return refused.value.status


def check(blas: Process, ta: int, tb: int, kind: str, alpha: float = 1.0, beta: float = 0.5, batch: int = 1) -> None:
    """The product at ``c`` is right, and nothing else was written."""
    error, untouched = blas.get(f"relative({ta}, {tb}, {alpha}, {beta}, {kind!r}, {batch})")
    assert error < CLOSE[kind]
    assert untouched is True


@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1])
@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_cupys_gemm_ex(blas: Process, kind: str, ta: int, tb: int) -> None:
    blas.run(f"operands({kind!r}, {ta}, {tb}); t = TYPES[{kind!r}][1]")
    blas.run(
        f"cublas.gemmEx(handle, {ta}, {tb}, m, n, k, one.ctypes.data, a.data.ptr, t, lda, b.data.ptr, t, ldb,"
        " half.ctypes.data, c.data.ptr, t, ldc, rt.CUDA_R_32F, -1)"
    )
    check(blas, ta, tb, kind)


@pytest.mark.parametrize("kind", ["f4", "f2"])
def test_cupys_batches(blas: Process, kind: str) -> None:
    blas.run(f"operands({kind!r}, 1, 0); t = TYPES[{kind!r}][1]")
    blas.run(
        "cublas.gemmStridedBatchedEx(handle, 1, 0, m, n, k, one.ctypes.data, a.data.ptr, t, lda, lda * m, b.data.ptr,"
        " t, ldb, ldb * n, half.ctypes.data, c.data.ptr, t, ldc, ldc * n, batch, rt.CUDA_R_32F, -1)"
    )
    check(blas, 1, 0, kind, batch=3)


def test_cupys_sgemm_and_matmul(blas: Process) -> None:
    blas.run("operands('f4', 0, 1)")
    blas.run(
        "cublas.sgemm(handle, 0, 1, m, n, k, half.ctypes.data, a.data.ptr, lda, b.data.ptr, ldb, half.ctypes.data,"
        " c.data.ptr, ldc)"
    )
    check(blas, 0, 1, "f4", alpha=0.5)
    for shapes in (((5, 9), (9, 4)), ((2, 5, 9), (2, 9, 4))):
        blas.run("x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)", shapes=shapes)
        assert blas.get("np.allclose((cp.asarray(x) @ cp.asarray(y)).get(), x @ y, atol=1e-5)") is True


@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize(("kind", "out"), [("bf", "bf"), ("bf", "f4"), ("f2", "f4"), ("f2", "f2"), ("f4", "f4")])
def test_hipblas_itself(blas: Process, ta: int, kind: str, out: str) -> None:
    blas.run(f"operands({kind!r}, {ta}, 0, {out!r}); t, u = TYPES[{kind!r}][1], TYPES[{out!r}][1]")
    blas.run(
        f"status = gemm_ex(handle, 111 + {ta}, 111, m, n, k, one.ctypes.data, a.data.ptr, t, lda, b.data.ptr, t, ldb,"
        " half.ctypes.data, c.data.ptr, u, ldc, 2, 160)"
    )
    assert blas.get("status") == 0
    check(blas, ta, 0, out)


def test_what_c_held_does_not_count_with_a_beta_of_zero(blas: Process) -> None:
    blas.run("operands('f4', 0, 0); zero = np.zeros(1, np.float32); c = cp.asarray(np.full(c.shape, 255, np.uint8))")
    blas.run(
        "status = gemm_ex(handle, 111, 111, m, n, k, one.ctypes.data, a.data.ptr, 0, lda, b.data.ptr, 0, ldb,"
        " zero.ctypes.data, c.data.ptr, 0, ldc, 2, 160)"
    )
    assert blas.get("status, np.allclose(values(c, m, n, ldc, 'f4', 3)[0], A[0] @ B[0], atol=1e-4)") == (0, True)


def test_an_element_is_the_same_in_whatever_company(blas: Process) -> None:
    blas.run("x, w = (cp.asarray(rng.standard_normal((rows, 256)).astype(np.float32)) for rows in (40, 300))")
    blas.run("from kernels.linear import gemm; all_rows = cp.empty((40, 300), np.float32); gemm.linear(x, w, all_rows)")
    for first, last in ((0, 1), (7, 12), (39, 40)):
        blas.run(f"some = cp.empty(({last - first}, 300), np.float32); gemm.linear(x[{first}:{last}], w, some)")
        assert blas.get(f"(some.get() == all_rows.get()[{first}:{last}]).all()") is True


def test_factors_on_the_device(blas: Process) -> None:
    blas.run("operands('f4', 0, 0); factors = cp.asarray(np.array([1, 0.5], np.float32)); f = factors.data.ptr")
    call = (
        "status = gemm_ex(handle, 111, 111, m, n, k, {alpha}, a.data.ptr, 0, lda, b.data.ptr, 0, ldb, f + 4,"
        " c.data.ptr, 0, ldc, 2, 160)"
    )
    blas.run("cublas.setPointerMode(handle, 1)")
    blas.run(call.format(alpha="one.ctypes.data"))
    assert blas.get("status") == MAPPING_ERROR
    blas.run(call.format(alpha="f"))
    assert blas.get("status, cublas.getPointerMode(handle)") == (0, 1)
    blas.run("cublas.setPointerMode(handle, 0)")
    check(blas, 0, 0, "f4")


#: Whole allocations of their own: CuPy's pool rounds up.
ATTEMPT = """
def attempt(mistake):
    rt.setDevice(0)
    space = dict(globals(), m=37, n=11, k=70, t=2, u=2, lda=37, ldb=70, ldc=37, alpha=one.ctypes.data, h=handle)
    space.update(a_operation=111, algorithm=160, compute=2)
    for name, elements in (("a_at", 37 * 70), ("b_at", 70 * 11), ("c_at", 37 * 11)):
        space[name] = rt.malloc(2 * elements)
    own = [space[name] for name in ("a_at", "b_at", "c_at")]
    exec(mistake, space)
    status = eval(
        "gemm_ex(h, a_operation, 111, m, n, k, alpha, a_at, t, lda, b_at, t, ldb, half.ctypes.data, c_at, u, ldc,"
        " compute, algorithm)",
        space,
    )
    rt.setDevice(0)
    for pointer in own:
        rt.free(pointer)
    return status
"""
#: One change to a call that is right, and the status it gets. A, of 37 x 70 elements, ends with its allocation.
MISTAKES = {
    "a_operation = 0": INVALID_ENUM,
    "algorithm = -1": INVALID_ENUM,
    "compute = 0": NOT_SUPPORTED,
    "t = 14; u = 2": NOT_SUPPORTED,
    "t = 1": NOT_SUPPORTED,
    "m = -1": INVALID_VALUE,
    "lda = m - 1": INVALID_VALUE,
    "ldb = k - 1": INVALID_VALUE,
    "ldc = m - 1": INVALID_VALUE,
    "b_at = 0": INVALID_VALUE,
    "alpha = 0": INVALID_VALUE,
    "a_at += 2": MAPPING_ERROR,
    "lda += 1": MAPPING_ERROR,
    "k += 1; ldb += 1": MAPPING_ERROR,
    "b_at = host.ctypes.data": MAPPING_ERROR,
    "h = 12345": NOT_INITIALIZED,
    "rt.setDevice(1)": EXECUTION_FAILED,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(blas: Process, mistake: str) -> None:
    blas.run("host = np.zeros((100, 100), np.float16)")
    blas.run(ATTEMPT)
    assert blas.get("attempt('')") == 0
    assert blas.get(f"attempt({mistake!r})") == MISTAKES[mistake]


def test_stale_and_foreign_streams(blas: Process) -> None:
    blas.run("h = cublas.create(); s = rt.streamCreate(); cublas.setStream(h, s)")
    blas.run("rt.setDevice(1); far = rt.streamCreate(); rt.setDevice(0)")
    blas.run("gone = rt.streamCreate(); rt.streamDestroy(gone)")
    assert blas.get("cublas.getStream(h) == s") is True
    assert status(blas, "cublas.setStream(h, far)") == INVALID_VALUE
    assert status(blas, "cublas.setStream(h, gone)") == INVALID_VALUE
    blas.run("cublas.destroy(h)")
    assert status(blas, "cublas.setStream(h, s)") == NOT_INITIALIZED


# --- traps of the wheel itself, which the product goes around --------------------------------------------------------

CALL = """
from cupy_backends.cuda.libs import cublas
x, one = cp.zeros(64, np.uint8), np.ones(1, np.float32)
p, q, handle = x.data.ptr, one.ctypes.data, cp.cuda.device.get_cublas_handle()
cublas.gemmEx(handle, 0, 0, 4, 4, 4, q, p, {t}, 4, p, {t}, 4, q, p, {t}, 4, {compute}, {algo})
"""


@pytest.mark.parametrize(
    ("t", "compute", "said"),
    [
        ("rt.CUDA_R_16BF", "rt.CUDA_R_32F", "unrecognized type"),
        ("rt.CUDA_R_16F", "cublas.CUBLAS_COMPUTE_32F", "unsupported cudaDataType_t"),
    ],
)
def test_cupys_gemm_ex_aborts(start: Starts, t: str, compute: str, said: str) -> None:
    with pytest.raises(Ended) as ended:
        start().run(CALL.format(t=t, compute=compute, algo=-1))
    assert ended.value.status == -6
    assert said in ended.value.said


def test_cupy_refuses_all_algorithms_but_the_default_and_every_math_mode(blas: Process) -> None:
    assert status(blas, CALL.format(t="rt.CUDA_R_16F", compute="rt.CUDA_R_32F", algo=99)) == NOT_SUPPORTED
    assert status(blas, "cublas.setMathMode(handle, 0)") == NOT_SUPPORTED
