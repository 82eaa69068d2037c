"""Matrix products on a GPU: cuBLAS or hipBLAS, with CuPy's handle on CuPy's current stream.

Matrices are CuPy arrays, float32, float16, or uint16 that holds the bits of bfloat16; sums are in float32. CuPy's own
``gemmEx`` is used on CUDA alone: for ROCm it aborts the process when a matrix is bfloat16, or when the type of the sum
is named the way CUDA names it. There ``hipblasGemmEx`` is called directly, of the library that CuPy has loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

#: cudaDataType and hipDataType, which agree, by an array's dtype.
_DATA_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, np.dtype(np.uint16): 14}

_CUDA_OP_N, _CUDA_OP_T, _CUDA_COMPUTE_32F, _CUDA_ALGO = 0, 1, 68, -1
_HIP_OP_N, _HIP_OP_T, _HIP_COMPUTE_32F, _HIP_ALGO = 111, 112, 2, 160

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


class GemmError(Exception):
    """A product that the library refused; the message has its status."""


def linear(x: Any, weight: Any, out: Any) -> None:
    """``out[n, outputs] = x[n, inputs] @ weight[outputs, inputs].T``, all C-contiguous and on the current device.

    ``x`` and ``weight`` have one dtype, ``out`` that or float32. Raises ValueError for shapes, dtypes or strides that
    do not fit, GemmError when the library fails. Returns before the product is there.
    """
    n, inputs = x.shape
    outputs = weight.shape[0]
    if weight.shape[1] != inputs or out.shape != (n, outputs):
        raise ValueError(f"x {x.shape}, weight {weight.shape} and out {out.shape} do not fit each other")
    for array in (x, weight, out):
        if not array.flags.c_contiguous:
            raise ValueError("a matrix is not C-contiguous")
    if x.dtype != weight.dtype or out.dtype not in (x.dtype, np.float32):
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype} and out {out.dtype}")
    if n == 0 or outputs == 0:
        return
    # Column by column, as these libraries read: out.T [outputs, n] = weight [outputs, inputs] @ x.T [inputs, n].
    _product()(
        outputs,
        n,
        inputs,
        weight.data.ptr,
        _DATA_TYPES[weight.dtype],
        inputs,
        x.data.ptr,
        _DATA_TYPES[x.dtype],
        inputs,
        out.data.ptr,
        _DATA_TYPES[out.dtype],
        outputs,
    )


#: m, n, k; pointer, type and leading dimension of each of the three matrices.
_Product = Callable[[int, int, int, int, int, int, int, int, int, int, int, int], None]


@functools.cache
def _product() -> _Product:
    """``out = weight.T @ x`` of column-major matrices."""
    import cupy

    return _on_hip() if cupy.cuda.runtime.is_hip else _on_cuda()


def _on_cuda() -> _Product:
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    one, zero = _ONE.ctypes.data, _ZERO.ctypes.data

    def product(
        m: int,
        n: int,
        k: int,
        a: int,
        a_type: int,
        lda: int,
        b: int,
        b_type: int,
        ldb: int,
        c: int,
        c_type: int,
        ldc: int,
    ) -> None:
        handle = device.get_cublas_handle()
        try:
            cublas.gemmEx(
                handle, _CUDA_OP_T, _CUDA_OP_N, m, n, k, one, a, a_type, lda, b, b_type, ldb, zero, c, c_type, ldc,
                _CUDA_COMPUTE_32F, _CUDA_ALGO,
            )  # fmt: skip
        except cublas.CUBLASError as error:
            raise GemmError(f"cublasGemmEx of {m} x {k} with {k} x {n}: {error}") from error

    return product


def _on_hip() -> _Product:
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    gemm_ex = _hipblas().hipblasGemmEx
    pointer, number = ctypes.c_void_p, ctypes.c_int
    matrix = [pointer, number, number]
    gemm_ex.restype = number
    gemm_ex.argtypes = [
        pointer, number, number, number, number, number, pointer, *matrix, *matrix, pointer, *matrix, number, number,
    ]  # fmt: skip
    one, zero = _ONE.ctypes.data, _ZERO.ctypes.data

    def product(
        m: int,
        n: int,
        k: int,
        a: int,
        a_type: int,
        lda: int,
        b: int,
        b_type: int,
        ldb: int,
        c: int,
        c_type: int,
        ldc: int,
    ) -> None:
        handle = device.get_cublas_handle()
        cublas.setStream(handle, cupy.cuda.get_current_stream().ptr)
        status = gemm_ex(
            handle, _HIP_OP_T, _HIP_OP_N, m, n, k, one, a, a_type, lda, b, b_type, ldb, zero, c, c_type, ldc,
            _HIP_COMPUTE_32F, _HIP_ALGO,
        )  # fmt: skip
        if status:
            raise GemmError(f"hipblasGemmEx of {m} x {k} with {k} x {n}: status {status}")

    return product


def _hipblas() -> Any:
    """The hipBLAS that CuPy has loaded: a handle belongs to its library."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if "libhipblas.so" in path:
                return ctypes.CDLL(f"/{path}")
    raise GemmError("CuPy has loaded no libhipblas.so: its ROCm libraries are not what it was built for")
