"""Copies between the memories that are attached, and who uses which of them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.kvcache.mover.memory import FileMemory, GpuMemory, Gpus, GpuStream, Memory, MemoryFault, opened
from services.kvcache.mover.orders import AttachFile, AttachGpu

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class PageEnd:
    """A page of a memory, as one end of a copy."""

    memory: Memory
    page: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.page_bytes

    @property
    def address(self) -> int:
        """Where it begins, in this process or on its GPU."""
        return self.memory.address(self.page)

    @property
    def gpu(self) -> GpuStream | None:
        """The stream of the GPU that it is on."""
        return self.memory.stream if isinstance(self.memory, GpuMemory) else None

    def view(self) -> memoryview:
        """Its bytes, if it is in host memory; to be released. Raises MemoryFault."""
        if not isinstance(self.memory, FileMemory):
            raise MemoryFault("it is not in host memory")
        return self.memory.view(self.page)


class BufferEnd:
    """The first ``size`` bytes of a private buffer, which is kept alive, as one end of a copy."""

    gpu = None

    def __init__(self, buffer: bytearray, size: int) -> None:
        self._first = ctypes.c_char.from_buffer(buffer)
        self.size = size

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(self._first)


End = PageEnd | BufferEnd


@dataclass(slots=True)
class _Attached:
    memory: Memory
    users: int = 0
    on_gone: Callable[[], None] | None = None


class Copies:
    """One thread attaches, begins copies and finishes them; others copy what they `hold`, at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: dict[int, _Attached] = {}
        self._gpus = Gpus()
        self._begun: dict[GpuStream, None] = {}

    def attach(self, order: AttachFile | AttachGpu) -> str:
        """Map a memory. Returns what is not as it should be, or nothing. Raises MemoryFault."""
        if order.memory in self._attached:
            raise MemoryFault(f"memory {order.memory} is attached")
        memory = opened(order, self._gpus)
        with self._lock:
            self._attached[order.memory] = _Attached(memory)
        return memory.detail

    def detach(self, number: int, on_gone: Callable[[], None]) -> None:
        """Unmap a memory once nobody holds it, and call ``on_gone``, on the thread that held it last."""
        self.finish()
        with self._lock:
            there = self._attached.get(number)
            if there is not None:
                there.on_gone = on_gone
        if there is None:
            on_gone()
        else:
            self._close_unused(number)

    def page(self, number: int, page: int) -> PageEnd:
        """A page of a memory. Raises MemoryFault."""
        there = self._attached.get(number)
        if there is None or there.on_gone is not None:
            raise MemoryFault(f"memory {number} is not attached")
        if page >= there.memory.pages:
            raise MemoryFault(f"page {page} of memory {number}, which has {there.memory.pages}")
        return PageEnd(there.memory, page)

    def hold(self, number: int) -> None:
        """Keep a memory mapped until `release`."""
        with self._lock:
            self._attached[number].users += 1

    def release(self, number: int) -> None:
        """Undo `hold`."""
        with self._lock:
            self._attached[number].users -= 1
        self._close_unused(number)

    def begin(self, target: End, source: End) -> None:
        """Copy; one from or to a GPU is over after `finish`. Raises MemoryFault; nothing is copied then."""
        if (stream := _copy(target, source)) is not None:
            self._begun[stream] = None

    def finish(self) -> None:
        """Wait for every copy that was begun."""
        for stream in self._begun:
            _finish(stream)
        self._begun.clear()

    def copy(self, target: End, source: End) -> None:
        """Copy, on any thread. Raises MemoryFault; nothing is copied then."""
        if (stream := _copy(target, source)) is not None:
            _finish(stream)

    def _close_unused(self, number: int) -> None:
        with self._lock:
            there = self._attached.get(number)
            if there is None or there.on_gone is None or there.users:
                return
            del self._attached[number]
        try:
            there.memory.close()
        except MemoryFault as error:
            _die("memory_not_detached", error)
        there.on_gone()


def _copy(target: End, source: End) -> GpuStream | None:
    if target.size != source.size:
        raise MemoryFault(f"a page of {source.size} bytes does not go into one of {target.size}")
    if target.gpu is not None and source.gpu is not None:
        raise MemoryFault("pages are copied from a GPU to host memory, or back")
    stream = target.gpu or source.gpu
    if stream is None:
        ctypes.memmove(target.address, source.address, target.size)  # lets other threads run
    else:
        stream.begin(target.address, source.address, target.size, to_device=target.gpu is not None)
    return stream


def _finish(stream: GpuStream) -> None:
    try:
        stream.finish()
    except MemoryFault as error:
        _die("copies_failed", error)


def _die(event: str, error: MemoryFault) -> None:
    """Nothing proves any more that this process does not touch a memory, except its end."""
    log.error(event, detail=str(error))
    os._exit(1)
