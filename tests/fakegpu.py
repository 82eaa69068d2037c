"""The calls of ``cupy.cuda.runtime`` that rocmforge.client.arena.gpu_ipc makes, over memory of this process,
with HIP's rules.

One ``Machine`` is the GPUs of a host; each ``FakeRuntime`` on it is one process's view of them. Two processes map the
same bytes, so what one writes the other reads. A device address that nothing maps is an error, not a crash.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

from rocmforge.client.arena.gpu_ipc import HANDLE_BYTES, Gpu, Runtime

INVALID_VALUE, OUT_OF_MEMORY, INVALID_POINTER, NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT = 1, 2, 17, 100, 101, 201
NAMES = {1: "InvalidValue", 2: "OutOfMemory", 17: "InvalidDevicePointer", 100: "NoDevice", 101: "InvalidDevice"}


class CUDARuntimeError(RuntimeError):
    """As CuPy's own."""

    def __init__(self, status: int) -> None:
        super().__init__(f"hipError{NAMES.get(status, status)}: hipError{NAMES.get(status, status)}\n\nlong advice")
        self.status = status


@dataclass(eq=False)
class Block:
    """An allocation: its bytes, in real memory, and who made it where."""

    device: int
    owner: int
    buffer: Any
    freed: bool = False

    @property
    def address(self) -> int:
        return ctypes.addressof(self.buffer)

    @property
    def size(self) -> int:
        return len(self.buffer)


@dataclass
class Machine:
    """GPUs by bus id. ``total`` bytes each."""

    ids: list[str] = field(default_factory=lambda: ["0000:03:00.0", "0000:83:00.0"])
    total: int = 1 << 20
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pids = itertools.count(100)

    def process(self, **options: Any) -> FakeRuntime:
        """A new process."""
        return FakeRuntime(self, next(self._pids), **options)

    def used(self, device: int) -> int:
        return sum(block.size for block in self.blocks if block.device == device and not block.freed)


class FakeRuntime:
    """One process's ``cupy.cuda.runtime``. ``visible`` are the machine's devices in its order; ``fail`` maps the name
    of a function to the status that it fails with.
    """

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, machine: Machine, pid: int, *, visible: list[int] | None = None, is_hip: bool = True) -> None:
        self.machine = machine
        self.pid = pid
        self.is_hip = is_hip
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.mapped: dict[int, tuple[Block, int]] = {}  # address -> block, times opened
        self._visible = list(range(len(machine.ids))) if visible is None else visible
        self._device = 0

    def runtime(self) -> Runtime:
        return Runtime(self)

    def gpu(self, ordinal: int = 0) -> Gpu:
        return Runtime(self).gpu(ordinal)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise CUDARuntimeError(self.fail[name])

    def getDeviceCount(self) -> int:
        self._called("getDeviceCount")
        if not self._visible:
            raise CUDARuntimeError(NO_DEVICE)
        return len(self._visible)

    def setDevice(self, ordinal: int) -> None:
        self._called("setDevice")
        if ordinal >= len(self._visible):
            raise CUDARuntimeError(INVALID_DEVICE)
        self._device = self._visible[ordinal]

    def deviceGetPCIBusId(self, ordinal: int) -> str:
        self._called("deviceGetPCIBusId")
        return self.machine.ids[self._visible[ordinal]].upper()

    def memGetInfo(self) -> tuple[int, int]:
        self._called("memGetInfo")
        return self.machine.total - self.machine.used(self._device), self.machine.total

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        self._called("getDeviceProperties")
        return {"totalGlobalMem": self.machine.total}

    def malloc(self, size: int) -> int:
        self._called("malloc")
        if self.machine.used(self._device) + size > self.machine.total:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        block = Block(self._device, self.pid, (ctypes.c_ubyte * size)(*[0xCD] * size))
        self.machine.blocks.append(block)
        return block.address

    def free(self, pointer: int) -> None:
        self._called("free")
        for block in self.machine.blocks:
            if block.address == pointer and block.owner == self.pid and not block.freed:
                block.freed = True
                return
        raise CUDARuntimeError(INVALID_VALUE)

    def memcpy(self, target: int, source: int, size: int, kind: int) -> None:
        self._called("memcpy")
        on_device = target if kind == 1 else source
        if not any(b.address <= on_device and on_device + size <= b.address + b.size for b in self._reachable()):
            raise CUDARuntimeError(INVALID_VALUE)
        ctypes.memmove(target, source, size)

    def memset(self, pointer: int, value: int, size: int) -> None:
        self._called("memset")
        if not any(b.address <= pointer and pointer + size <= b.address + b.size for b in self._reachable()):
            raise CUDARuntimeError(INVALID_VALUE)
        ctypes.memset(pointer, value, size)

    def _reachable(self) -> list[Block]:
        own = [block for block in self.machine.blocks if block.owner == self.pid and not block.freed]
        return own + [block for block, _ in self.mapped.values()]

    def deviceSynchronize(self) -> None:
        self._called("deviceSynchronize")

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        self._called("ipcGetMemHandle")
        for at, block in enumerate(self.machine.blocks):
            if block.address == pointer and block.owner == self.pid and not block.freed:
                return at.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")
        raise CUDARuntimeError(INVALID_VALUE)

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        self._called("ipcOpenMemHandle")
        at = int.from_bytes(handle[:8], "little")
        if flags != 1 or at >= len(self.machine.blocks):
            raise CUDARuntimeError(INVALID_VALUE)
        block = self.machine.blocks[at]
        if block.owner == self.pid:
            raise CUDARuntimeError(INVALID_CONTEXT)
        if block.freed or block.device != self._device:
            raise CUDARuntimeError(INVALID_POINTER)
        self.mapped[block.address] = (block, self.mapped.get(block.address, (block, 0))[1] + 1)
        return block.address

    def ipcCloseMemHandle(self, pointer: int) -> None:
        self._called("ipcCloseMemHandle")
        block, count = self.mapped.pop(pointer, (None, 0))
        if block is None:
            raise CUDARuntimeError(INVALID_VALUE)
        if count > 1:
            self.mapped[pointer] = (block, count - 1)
