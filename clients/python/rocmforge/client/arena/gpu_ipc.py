"""GPU memory shared between two processes: the HIP or CUDA runtime calls needed for it, through CuPy.

CuPy is imported only when a runtime is loaded. Memory comes from the runtime's own ``malloc`` and not from CuPy's pool:
an IPC handle names a whole allocation, and HIP and CUDA differ on the address that a handle to a block inside one opens
(HIP adds the block's offset, CUDA does not).

Every call first makes its device current on the calling thread, so any thread may call. Within a process, handles are
opened and closed one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from rocmforge.client.errors import GpuError, InvalidConfiguration

#: Bytes of an IPC handle, of HIP and of CUDA alike.
HANDLE_BYTES = 64

_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1  # the only flag, and required by HIP
_TO_DEVICE, _TO_HOST = 1, 2

#: The usual cause of an ipcOpenMemHandle status; the runtimes' own messages do not help.
_OPEN_HINTS = {
    17: "the exporter's socket was not found: both processes must share a network namespace",
    201: "the exporter has this process's id: it is this process, which cannot open its own handle, or a process in "
    "another pid namespace; daemon and engine must be two processes that share the pid, ipc and network namespaces",
}

_opening = threading.Lock()


class Runtime:
    """The GPUs of this process, through ``cupy.cuda.runtime`` or a module with the same functions."""

    def __init__(self, api: Any) -> None:
        self.api = api

    @classmethod
    def load(cls) -> Runtime:
        """Import CuPy. Raises InvalidConfiguration, saying what to install, if it or its libraries are missing."""
        try:
            import cupy
        except ModuleNotFoundError as error:
            raise InvalidConfiguration(
                f"GPU memory requires CuPy, but {error.name} is not installed: "
                "pip install -c constraints.txt -e '.[rocm]' for ROCm 7, -e '.[cuda]' for CUDA 13"
            ) from error
        except ImportError as error:
            raise InvalidConfiguration(
                f"CuPy is installed but cannot be imported: {_first_line(error)}; is the runtime it was built for "
                "installed (ROCm 7 for cupy-rocm-7-0), and its library directory in LD_LIBRARY_PATH?"
            ) from error
        return cls(cupy.cuda.runtime)

    @property
    def is_hip(self) -> bool:
        """Whether the runtime is HIP (ROCm), not CUDA."""
        return bool(self.api.is_hip)

    def count(self) -> int:
        """The number of GPUs visible to this process. Raises InvalidConfiguration if there are none, or no driver."""
        try:
            found = int(self.api.getDeviceCount())
        except self.api.CUDARuntimeError as error:
            raise InvalidConfiguration(
                f"no usable GPU: {_first_line(error)}; run `rocmforge doctor kvcache` to find the cause"
            ) from error
        if not found:
            raise InvalidConfiguration("no usable GPU: the runtime finds none")
        return found

    def gpu(self, ordinal: int) -> Gpu:
        """The GPU with this ordinal. Raises InvalidConfiguration if it is out of range."""
        count = self.count()
        if not 0 <= ordinal < count:
            raise InvalidConfiguration(f"GPU {ordinal}: out of range; there are {count}, numbered from 0")
        return Gpu(self, ordinal)


class Gpu:
    """One GPU. Pointers are device addresses as integers; every method raises GpuError if a runtime call fails."""

    def __init__(self, runtime: Runtime, ordinal: int) -> None:
        self.ordinal = ordinal
        self.runtime = runtime
        self._api = runtime.api
        with self._calling("deviceGetPCIBusId"):
            bus_id = self._api.deviceGetPCIBusId(ordinal)
        #: Its PCI bus id: the same in every process, however HIP_VISIBLE_DEVICES renumbers the ordinals.
        self.id = (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).strip("\0 ").lower()

    def __repr__(self) -> str:
        return f"<GPU {self.ordinal}, {self.id}>"

    def use(self) -> None:
        """Make this the current device of the calling thread."""
        with self._calling("setDevice"):
            self._api.setDevice(self.ordinal)

    def memory(self) -> tuple[int, int]:
        """Free bytes and total bytes."""
        self.use()
        with self._calling("memGetInfo"):
            free, total = self._api.memGetInfo()
        return int(free), int(total)

    def total_memory(self) -> int:
        """Total bytes. Unlike ``memory``, this creates no context on the GPU, which would itself use memory."""
        with self._calling("getDeviceProperties"):
            return int(self._api.getDeviceProperties(self.ordinal)["totalGlobalMem"])

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes, uninitialized. Raises MemoryError if the GPU is out of memory."""
        self.use()
        try:
            return int(self._api.malloc(size))
        except self._api.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise MemoryError(f"GPU {self.ordinal}: out of memory allocating {size} bytes") from error
            raise self._failed("malloc", error) from error

    def free(self, pointer: int) -> None:
        """Free an allocation of ``allocate``."""
        self.use()
        with self._calling("free"):
            self._api.free(pointer)

    def export(self, pointer: int) -> bytes:
        """The IPC handle of a whole allocation, 64 bytes."""
        self.use()
        with self._calling("ipcGetMemHandle"):
            return bytes(self._api.ipcGetMemHandle(pointer))

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Raises GpuError, with a hint at the cause if it is known."""
        if len(handle) != HANDLE_BYTES:
            raise GpuError(f"an IPC handle has {HANDLE_BYTES} bytes; this one has {len(handle)}")
        with _opening:
            self.use()
            try:
                return int(self._api.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
            except self._api.CUDARuntimeError as error:
                raise self._failed("ipcOpenMemHandle", error, _OPEN_HINTS.get(error.status, "")) from error

    def close(self, pointer: int) -> None:
        """Unmap memory mapped by ``open``, which must no longer be in use."""
        with _opening:
            self.use()
            with self._calling("ipcCloseMemHandle"):
                self._api.ipcCloseMemHandle(pointer)

    def write(self, pointer: int, data: bytes) -> None:
        """Copy bytes to the device; returns when they have arrived."""
        self.use()
        buffer = ctypes.create_string_buffer(data, len(data))
        with self._calling("memcpy"):
            self._api.memcpy(pointer, ctypes.addressof(buffer), len(data), _TO_DEVICE)
            # A copy from pageable memory may return before its last bytes have arrived.
            self._api.deviceSynchronize()

    def zero(self, pointer: int, size: int) -> None:
        """Set bytes on the device to zero; they are by the time ``synchronize`` returns."""
        self.use()
        with self._calling("memset"):
            self._api.memset(pointer, 0, size)

    def read(self, pointer: int, size: int) -> bytes:
        """Copy bytes from the device."""
        self.use()
        buffer = ctypes.create_string_buffer(size)
        with self._calling("memcpy"):
            self._api.memcpy(ctypes.addressof(buffer), pointer, size, _TO_HOST)
        return buffer.raw

    def synchronize(self) -> None:
        """Wait until all work of this process on the device has finished."""
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
    """The first line of an error; CuPy appends long explanations to some."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()
