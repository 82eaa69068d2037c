"""Matrix products on a GPU: cuBLAS or hipBLAS, on CuPy's current stream.

Matrices are CuPy arrays: float32, float16, or uint16 holding the bits of bfloat16; accumulation is in float32. This
module calls the libraries that CuPy has loaded directly: on ROCm, CuPy's own ``gemmEx`` aborts the process for a
bfloat16 matrix, or for CUDA's name of the compute type; on CUDA it cannot be captured into a graph.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.device.libraries import LibraryError, loaded
from kernels.device.recording import writing

#: cudaDataType and hipDataType, which agree, by an array's dtype.
_DATA_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, np.dtype(np.uint16): 14}

_CUDA_OP_N, _CUDA_OP_T, _CUDA_COMPUTE_32F, _CUDA_ALGO = 0, 1, 68, -1
_HIP_OP_N, _HIP_OP_T, _HIP_COMPUTE_32F, _HIP_ALGO = 111, 112, 2, 160

#: What cuBLAS takes by itself on a GPU of this size.
_WORKSPACE_BYTES = 32 << 20

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)
_ONE_AT, _ZERO_AT = _ONE.ctypes.data, _ZERO.ctypes.data


class GemmError(Exception):
    """The library failed to compute a product; the message has its status."""


def linear(x: Any, weight: Any, out: Any) -> None:
    """``out[n, outputs] = x[n, inputs] @ weight[outputs, inputs].T``, all C-contiguous and on the current device.

    ``x`` and ``weight`` have one dtype, ``out`` that or float32. Raises ValueError for shapes, dtypes or strides that
    do not match, GemmError if the library fails. Asynchronous: returns before the product is computed.
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
    library = _library()
    # Column by column, as these libraries read: out.T [outputs, n] = weight [outputs, inputs] @ x.T [inputs, n].
    arguments = (
        library.handle(), *library.operations, outputs, n, inputs, _ONE_AT,
        weight.data.ptr, _DATA_TYPES[weight.dtype], inputs,
        x.data.ptr, _DATA_TYPES[x.dtype], inputs,
        _ZERO_AT, out.data.ptr, _DATA_TYPES[out.dtype], outputs,
        *library.how,
    )  # fmt: skip
    status = library.gemm_ex(*arguments)
    if status:
        raise GemmError(f"{library.name} of {outputs} x {inputs} with {inputs} x {n}: status {status}")
    if writing.tape is not None:
        writing.tape.product(library.gemm_ex, arguments)


def handle() -> int:
    """The library handle of this thread and the current device, set to the current stream.

    Raises GemmError.
    """
    return _library().handle()


@dataclass(frozen=True, slots=True)
class _Library:
    """cuBLAS or hipBLAS: ``handle`` is `handle`; ``operations`` transposed and not; ``how`` type and algorithm."""

    name: str
    gemm_ex: Any
    handle: Callable[[], int]
    operations: tuple[int, int]
    how: tuple[int, int]


@functools.cache
def _library() -> _Library:
    import cupy

    try:
        return _hipblas() if cupy.cuda.runtime.is_hip else _cublas()
    except LibraryError as error:
        raise GemmError(str(error)) from error


class _Cublas:
    """A separate handle on the device that was current when it was created.

    CuPy's calls reject a stream that is being captured. Captured work must also find its workspace at the same address,
    so the workspace is set explicitly, again after setting a stream, which would reset it.
    """

    def __init__(self, library: Any) -> None:
        import cupy

        self._library = library
        self._handle = ctypes.c_void_p()
        self._checked("cublasCreate", library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._workspace = cupy.get_default_memory_pool().malloc(_WORKSPACE_BYTES)
        self._stream: int | None = None
        self.value = int(self._handle.value or 0)

    def follow(self, stream: int) -> None:
        """Run subsequent products on a stream."""
        if stream != self._stream:
            self._checked("cublasSetStream", self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))
            workspace = ctypes.c_void_p(self._workspace.ptr), ctypes.c_size_t(_WORKSPACE_BYTES)
            self._checked("cublasSetWorkspace", self._library.cublasSetWorkspace_v2(self._handle, *workspace))
            self._stream = stream

    @staticmethod
    def _checked(function: str, status: int) -> None:
        if status:
            raise GemmError(f"{function}: status {status}")


def _cublas() -> _Library:
    import cupy
    from cupy.cuda import device

    device.get_cublas_handle()  # makes CuPy load the library
    library = loaded("libcublas.so")
    stream_of, device_of = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice
    handles: dict[tuple[int, int], _Cublas] = {}  # a handle may be used by one thread at a time

    def handle() -> int:
        key = threading.get_ident(), device_of()
        cublas = handles.get(key)
        if cublas is None:
            cublas = handles[key] = _Cublas(library)
        cublas.follow(stream_of().ptr)
        return cublas.value

    operations, how = (_CUDA_OP_T, _CUDA_OP_N), (_CUDA_COMPUTE_32F, _CUDA_ALGO)
    return _Library("cublasGemmEx", _declared(library.cublasGemmEx), handle, operations, how)


def _hipblas() -> _Library:
    import cupy
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    library = loaded("libhipblas.so")

    def handle() -> int:
        found = int(device.get_cublas_handle())
        cublas.setStream(found, cupy.cuda.get_current_stream().ptr)
        return found

    operations, how = (_HIP_OP_T, _HIP_OP_N), (_HIP_COMPUTE_32F, _HIP_ALGO)
    return _Library("hipblasGemmEx", _declared(library.hipblasGemmEx), handle, operations, how)


def _declared(gemm_ex: Any) -> Any:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    matrix = [pointer, number, number]
    gemm_ex.restype = number
    gemm_ex.argtypes = [
        pointer, number, number, number, number, number, pointer, *matrix, *matrix, pointer, *matrix, number, number,
    ]  # fmt: skip
    return gemm_ex
