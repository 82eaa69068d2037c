"""The devices that tests of kernels run on: CPUs that execute as a GPU does, AMD's machine code, a GPU if there is one.

Take the fixture ``device``; a test that takes it runs once on each of `NAMES`, and on those of `MACHINES` that
conftest.py selects. Every device offers::

    module = device.compile("norm", {"RF_TYPE": "BF16"})        # kernels/hip/norm.hip; RF_WAVE is the device's own
    module.launch("rms_norm", grid, block, args, shared=0)      # extents: int or tuple; waits for the kernel
    array = device.array(values)                                # a copy
    array = device.empty(shape, dtype)                          # NaN, or bytes 0xCD for integers
    values = device.get(array)
    device.wave                                                 # 32 or 64

Arguments are arrays of the device, None for a null pointer, or ``np.int32``, ``np.int64``, ``np.float32``: exactly the
kernel's types, which a CPU device checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kernels.device import module
from tests import tools
from tests.kernels.device import amdgcn, hiprtc
from tests.simulators import amdgpu
from tests.simulators.cpu.executor import Cpu, Extent, poisoned


class Launches(Protocol):
    """A compiled source."""

    def launch(self, name: str, grid: Extent, block: Extent, args: Sequence[Any], shared: int = 0) -> None: ...


class Device(Protocol):
    """What a test of a kernel needs of a device; see the module's own text."""

    @property
    def wave(self) -> int: ...
    def compile(self, name: str, defines: Mapping[str, str | int] | None = None) -> Launches: ...
    def array(self, values: ArrayLike) -> Any: ...
    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any: ...
    def get(self, array: Any) -> NDArray[Any]: ...


class Gpu:
    """CuPy's current device. Arrays of bfloat16 are kept as bytes, which every CuPy can."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self.wave = module.wave(cupy.cuda.Device().id)

    def compile(self, name: str, defines: Mapping[str, str | int] | None = None) -> Launches:
        return _Waiting(self._cupy, module.load(name, defines))

    def array(self, values: ArrayLike) -> Any:
        host = np.asarray(values)
        memory = self._cupy.asarray(np.ascontiguousarray(host).reshape(-1).view(np.uint8))
        return _GpuArray(memory, host.shape, host.dtype)

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return self.array(poisoned(shape, dtype))

    def get(self, array: Any) -> NDArray[Any]:
        return self._cupy.asnumpy(array.memory).view(array.dtype).reshape(array.shape)


class _GpuArray:
    def __init__(self, memory: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = dtype


class _Waiting:
    """A module whose launches are over when they return: an error belongs to the launch that made it."""

    def __init__(self, cupy: Any, loaded: module.Module) -> None:
        self._cupy = cupy
        self._loaded = loaded

    def launch(self, name: str, grid: Extent, block: Extent, args: Sequence[Any], shared: int = 0) -> None:
        arguments = [argument.memory if isinstance(argument, _GpuArray) else argument for argument in args]
        self._loaded.launch(name, grid, block, arguments, shared)
        self._cupy.cuda.get_current_stream().synchronize()


def _gpu() -> Device:
    try:
        import cupy
    except ImportError as error:
        pytest.skip(f"no GPU: {error}")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    if not count:
        pytest.skip("no GPU: CuPy finds none")
    return Gpu()


#: By name. Permuted order finds a missing barrier, the sanitised build what is read or written beside an array, the
#: optimised one what is right for as long as a compiler leaves it alone.
DEVICES: dict[str, Callable[[], Device]] = {
    "cpu-w64": lambda: Cpu(64),
    "cpu-w32": lambda: Cpu(32),
    "cpu-w64-permuted": lambda: Cpu(64, permuted=True),
    "cpu-w32-permuted": lambda: Cpu(32, permuted=True),
    "cpu-w64-sanitised": lambda: Cpu(64, sanitised=True),
    "cpu-w64-optimised": lambda: Cpu(64, optimised=True),
    "cpu-w32-optimised": lambda: Cpu(32, optimised=True),
    "cpu-gfx11": lambda: Cpu(32, permuted=True, gfx11=True),
    "cupy": _gpu,
    **{gpu: functools.partial(amdgpu.Amd, gpu) for gpu in amdgpu.GPUS},
    **{f"{gpu}-hiprtc": functools.partial(amdgpu.Amd, gpu, compiler=amdgpu.hiprtc) for gpu in hiprtc.GPUS},
}
#: Those that execute what clang makes for AMD's GPUs, and what HIPRTC does.
MACHINES = [*amdgpu.GPUS, *(f"{gpu}-hiprtc" for gpu in hiprtc.GPUS)]
#: Those that every test of a kernel runs on: the others are for matrix units.
NAMES = [name for name in DEVICES if name not in ("cpu-w32-optimised", "cpu-gfx11", *MACHINES)]


def get(name: str) -> Device:
    """Return the device of that name, the same one every time; skips the test for want of a GPU or a compiler."""
    if name.startswith("cpu"):
        tools.need("g++")
    if name in MACHINES:
        tools.need("g++", *(["hip", "llvm"] if name.endswith("-hiprtc") else amdgcn.TOOLS))
    return _made(name)


@functools.cache
def _made(name: str) -> Device:
    return DEVICES[name]()
