"""Memory that the mover copies from and to: files it maps, and allocations of GPUs that it opens."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import Any

from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from rocmforge.client.transport.paths import open_file
from services.common.errors import GpuError, ServiceError
from services.kvcache.mover.orders import AttachFile, AttachGpu

_TO_DEVICE, _TO_HOST = 1, 2


class MemoryFault(Exception):
    """A memory cannot be used, or a copy failed. The message is one line."""


class GpuStream:
    """One stream of a GPU: copies run in the order in which they were begun. Any thread may call."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._api: Any = gpu.runtime.api
        self._lock = threading.Lock()
        with self._calling("stream"):
            gpu.use()
            self._stream = self._api.streamCreateWithFlags(1)  # non-blocking: it waits for no other stream

    def begin(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        """Begin a copy between the device and host memory, which stays as it is until `finish` returns."""
        with self._lock, self._calling("memcpyAsync"):
            self.gpu.use()
            self._api.memcpyAsync(target, source, size, _TO_DEVICE if to_device else _TO_HOST, self._stream)

    def finish(self) -> None:
        """Wait for all copies that were begun."""
        with self._calling("streamSynchronize"):
            self.gpu.use()
            self._api.streamSynchronize(self._stream)

    def pin(self, address: int, size: int) -> None:
        """Register host memory, so that the GPU copies it at full speed and meanwhile."""
        with self._calling("hostRegister"):
            self.gpu.use()
            if self.gpu.runtime.is_hip:
                _hip("hipHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(0))
            else:
                self._api.hostRegister(address, size, 0)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._calling("hostUnregister"):
            self.gpu.use()
            if self.gpu.runtime.is_hip:
                _hip("hipHostUnregister", ctypes.c_void_p(address))
            else:
                self._api.hostUnregister(address)

    @contextlib.contextmanager
    def _calling(self, function: str) -> Any:
        try:
            yield
        except ServiceError as error:
            raise MemoryFault(error.message) from error
        except self._api.CUDARuntimeError as error:
            raise MemoryFault(f"GPU {self.gpu.ordinal}: {function}: {str(error).splitlines()[0]}") from error


def _hip(name: str, *arguments: Any) -> None:
    """Call HIP itself, where CuPy for ROCm only says that it does not know. Raises MemoryFault."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            # The one that CuPy has loaded: another would have devices and memory of its own.
            path = next(line.split(maxsplit=5)[5].strip() for line in maps if "/libamdhip64.so" in line)
        status = getattr(ctypes.CDLL(path), name)(*arguments)
    except (StopIteration, OSError, AttributeError) as error:
        raise MemoryFault(f"{name} is not there: {error}") from error
    if status:
        raise MemoryFault(f"{name}: error {status}")


class FileMemory:
    """A file of this user's, or root's, mapped shared, and pinned for ``stream``'s GPU if it can be.

    ``detail`` says why it is not.
    """

    def __init__(self, order: AttachFile, stream: GpuStream | None) -> None:
        self.page_bytes, self.pages = order.page_bytes, order.pages
        self.detail = ""
        self._pinned_by: GpuStream | None = None
        size = order.page_bytes * order.pages
        try:
            file = open_file(Path(order.path))
            try:
                self._map = mmap.mmap(file, size)  # refuses a shorter file: access past its end would raise SIGBUS
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise MemoryFault(f"{order.path} cannot be mapped: {error}") from error
        self._first = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._first)
        if stream is not None:
            try:
                stream.pin(self._address, size)
                self._pinned_by = stream
            except MemoryFault as error:
                self.detail = f"not pinned, copies are slower: {error}"

    def address(self, page: int) -> int:
        """Where a page begins."""
        return self._address + page * self.page_bytes

    def view(self, page: int) -> memoryview:
        """The bytes of a page; released before `close`."""
        return memoryview(self._map)[page * self.page_bytes : (page + 1) * self.page_bytes]

    def close(self) -> None:
        """Unmap. Raises MemoryFault if the GPU still has it registered; it stays mapped then."""
        if self._pinned_by is not None:
            self._pinned_by.finish()
            self._pinned_by.unpin(self._address)
        del self._first
        self._map.close()


class GpuMemory:
    """An allocation of a GPU, opened by its IPC handle."""

    detail = ""

    def __init__(self, order: AttachGpu, stream: GpuStream) -> None:
        self.page_bytes, self.pages = order.page_bytes, order.pages
        self.stream = stream
        gpu = stream.gpu
        if order.device_id.lower() != gpu.id:
            raise MemoryFault(f"GPU {order.device} is {order.device_id} to the daemon and {gpu.id} to the mover")
        try:
            self._pointer = gpu.open(order.handle)
        except GpuError as error:
            raise MemoryFault(error.message) from error

    def address(self, page: int) -> int:
        """Where a page begins, on the device."""
        return self._pointer + page * self.page_bytes

    def close(self) -> None:
        """Unmap, after all copies. Raises MemoryFault if that failed."""
        try:
            self.stream.finish()
            self.stream.gpu.close(self._pointer)
        except GpuError as error:
            raise MemoryFault(error.message) from error


Memory = FileMemory | GpuMemory


class Gpus:
    """The streams of the GPUs that memories are on; CuPy is imported with the first."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._streams: dict[int, GpuStream] = {}

    def stream(self, ordinal: int) -> GpuStream:
        """The stream of a GPU. Raises MemoryFault without CuPy, or without that GPU."""
        try:
            if self._runtime is None:
                self._runtime = Runtime.load()
            if ordinal not in self._streams:
                self._streams[ordinal] = GpuStream(self._runtime.gpu(ordinal))
        except ServiceError as error:
            raise MemoryFault(error.message) from error
        return self._streams[ordinal]


def opened(order: AttachFile | AttachGpu, gpus: Gpus) -> Memory:
    """Map what an order says. Raises MemoryFault."""
    if isinstance(order, AttachGpu):
        return GpuMemory(order, gpus.stream(order.device))
    return FileMemory(order, None if order.pin_for is None else gpus.stream(order.pin_for))
