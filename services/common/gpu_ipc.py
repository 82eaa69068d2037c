"""GPU memory that two processes share: the few calls of the HIP or CUDA runtime that it takes, through CuPy.

Shared by both services. CuPy is imported when a runtime is first asked for, and never without. Everything here is raw:
``malloc`` of the runtime and not CuPy's pool, since an IPC handle names a whole allocation, and where a pool's block
lies in one differs between HIP (which adds the offset) and CUDA (which does not).

Every call makes its device the current one of the calling thread first, so any thread may make it. Handles are opened
and closed one at a time in a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from services.common.errors import GpuError, InvalidConfiguration

#: Bytes of an IPC handle, of HIP and of CUDA alike.
HANDLE_BYTES = 64

_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1  # the only flag there is, and HIP refuses to open without it
_TO_DEVICE, _TO_HOST = 1, 2

#: What a status of ipcOpenMemHandle usually means: the runtimes' own texts lead nowhere.
_OPEN_HINTS = {
    17: "the exporter's socket was not found: both processes need the same network namespace",
    201: "the exporter has this process's id: it is this process, which cannot open its own handle, or one of another "
    "pid namespace; daemon and engine must be two processes that share the pid, ipc and network namespaces",
}

_opening = threading.Lock()


class Runtime:
    """The GPUs of this process, over ``cupy.cuda.runtime`` or anything with the same functions."""

    def __init__(self, api: Any) -> None:
        self.api = api

    @classmethod
    def load(cls) -> Runtime:
        """Raises InvalidConfiguration, saying what to install, when CuPy or what it needs is not there."""
        try:
            import cupy
        except ModuleNotFoundError as error:
            raise InvalidConfiguration(
                f"GPU memory needs CuPy, and {error.name} is not installed: "
                "pip install -c constraints.txt -e '.[rocm]' for ROCm 7, -e '.[cuda]' for CUDA 13"
            ) from error
        except ImportError as error:
            raise InvalidConfiguration(
                f"CuPy is installed and cannot be imported: {_first_line(error)}; is the runtime it was built for "
                "installed (ROCm 7 for cupy-rocm-7-0), and its folder of libraries in LD_LIBRARY_PATH?"
            ) from error
        return cls(cupy.cuda.runtime)

    @property
    def is_hip(self) -> bool:
        """ROCm; CUDA otherwise."""
        return bool(self.api.is_hip)

    def count(self) -> int:
        """GPUs that this process may use. Raises InvalidConfiguration when there is none, or no driver."""
        try:
            found = int(self.api.getDeviceCount())
        except self.api.CUDARuntimeError as error:
            raise InvalidConfiguration(
                f"no GPU can be used: {_first_line(error)}; `python -m services.kvcache doctor` looks for the cause"
            ) from error
        if not found:
            raise InvalidConfiguration("no GPU can be used: the runtime finds none")
        return found

    def gpu(self, ordinal: int) -> Gpu:
        """One of them. Raises InvalidConfiguration when there are not so many."""
        count = self.count()
        if not 0 <= ordinal < count:
            raise InvalidConfiguration(f"GPU {ordinal}: there are {count}, numbered from 0")
        return Gpu(self, ordinal)


class Gpu:
    """One GPU. Pointers are device addresses as integers; every method raises GpuError when the runtime fails."""

    def __init__(self, runtime: Runtime, ordinal: int) -> None:
        self.ordinal = ordinal
        self.runtime = runtime
        self._api = runtime.api
        with self._calling("deviceGetPCIBusId"):
            bus_id = self._api.deviceGetPCIBusId(ordinal)
        #: Its PCI bus id: the same in every process, whatever HIP_VISIBLE_DEVICES makes of the ordinals.
        self.id = (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).strip("\0 ").lower()

    def __repr__(self) -> str:
        return f"<GPU {self.ordinal}, {self.id}>"

    def use(self) -> None:
        """Make it the current device of this thread."""
        with self._calling("setDevice"):
            self._api.setDevice(self.ordinal)

    def memory(self) -> tuple[int, int]:
        """Bytes free, and bytes in all."""
        self.use()
        with self._calling("memGetInfo"):
            free, total = self._api.memGetInfo()
        return int(free), int(total)

    def total_memory(self) -> int:
        """Bytes in all. Unlike ``memory`` it makes no context on the GPU, which takes some of them."""
        with self._calling("getDeviceProperties"):
            return int(self._api.getDeviceProperties(self.ordinal)["totalGlobalMem"])

    def allocate(self, size: int) -> int:
        """``size`` bytes with whatever is in them. Raises MemoryError when there is no room."""
        self.use()
        try:
            return int(self._api.malloc(size))
        except self._api.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise MemoryError(f"GPU {self.ordinal}: no room for {size} bytes") from error
            raise self._failed("malloc", error) from error

    def free(self, pointer: int) -> None:
        """Give back what ``allocate`` gave."""
        self.use()
        with self._calling("free"):
            self._api.free(pointer)

    def export(self, pointer: int) -> bytes:
        """The IPC handle of a whole allocation, 64 bytes."""
        self.use()
        with self._calling("ipcGetMemHandle"):
            return bytes(self._api.ipcGetMemHandle(pointer))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Raises GpuError with a hint at the cause where one is known."""
        if len(handle) != HANDLE_BYTES:
            raise GpuError(f"an IPC handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        with _opening:
            self.use()
            try:
                return int(self._api.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
            except self._api.CUDARuntimeError as error:
                raise self._failed("ipcOpenMemHandle", error, _OPEN_HINTS.get(error.status, "")) from error

    def close(self, pointer: int) -> None:
        """Unmap what ``open`` mapped. Nothing may use it any more."""
        with _opening:
            self.use()
            with self._calling("ipcCloseMemHandle"):
                self._api.ipcCloseMemHandle(pointer)

    def write(self, pointer: int, data: bytes) -> None:
        """Copy bytes to the device, and wait until they are there."""
        self.use()
        buffer = ctypes.create_string_buffer(data, len(data))
        with self._calling("memcpy"):
            self._api.memcpy(pointer, ctypes.addressof(buffer), len(data), _TO_DEVICE)
            # A copy from pageable memory may return before the last of it has arrived.
            self._api.deviceSynchronize()

    def read(self, pointer: int, size: int) -> bytes:
        """Copy bytes from the device."""
        self.use()
        buffer = ctypes.create_string_buffer(size)
        with self._calling("memcpy"):
            self._api.memcpy(ctypes.addressof(buffer), pointer, size, _TO_HOST)
        return buffer.raw

    def synchronize(self) -> None:
        """Wait until nothing of this process runs on it."""
        self.use()
        with self._calling("deviceSynchronize"):
            self._api.deviceSynchronize()

    @contextlib.contextmanager
    def _calling(self, function: str) -> Iterator[None]:
        try:
            yield
        except self._api.CUDARuntimeError as error:
            raise self._failed(function, error) from error

    def _failed(self, function: str, error: Exception, hint: str = "") -> GpuError:
        status = getattr(error, "status", "")
        text = f"GPU {self.ordinal}: {function}: {_first_line(error)}"
        return GpuError(f"{text} ({hint})" if hint else text, function=function, status=status)


def _first_line(error: Exception) -> str:
    """CuPy explains some errors at length, behind an empty line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
