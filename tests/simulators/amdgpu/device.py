"""A GPU of AMD's that is none: it loads code objects and executes their instructions, wave by wave.

`Amd` is a device as those of tests/kernels/devices.py are. Nothing but the machine code says what a kernel does; what a
GPU leaves undefined is an error where it can be seen: an access beside an array, registers that the descriptor does not
ask for, an instruction that the executor lacks, a wave that does not end. Registers and LDS begin as NaN.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from kernels.device import source
from tests.kernels.device.amdgcn import CODE, WAVES, Toolchain
from tests.kernels.device.hiprtc import Hiprtc
from tests.simulators.amdgpu.code import disassembly, encoding, objectfile
from tests.simulators.amdgpu.code.disassembly import Instruction
from tests.simulators.amdgpu.code.objectfile import Kernel
from tests.simulators.amdgpu.library import Fault, Launch, checked, executor
from tests.simulators.cpu.executor import poisoned

Extent: TypeAlias = int | tuple[int, ...]

GPUS = ("gfx942", "gfx90a", "gfx1030", "gfx1100", "gfx1201")
#: Of static and dynamic LDS together: what the project's kernels may use, less than any of these GPUs has.
MOST_SHARED = 48 * 1024
#: Instructions that a wave may execute in a launch: many times what any launch of the tests takes.
BOUND = 20_000_000


class Memory:
    """The arrays of a device."""

    def __init__(self) -> None:
        self._library = executor()
        self._handle = self._library.executor_memory()

    def __del__(self) -> None:
        self._library.executor_memory_end(self._handle)
        self._handle = None  # garbage of a cycle goes in any order: an array may come later

    @property
    def handle(self) -> int:
        """The executor's own."""
        return int(self._handle)

    def add(self, data: bytes, name: str, writable: bool = True) -> int:
        """Return the address of a copy of ``data``; ``name`` is for errors."""
        address = ctypes.c_uint64()
        checked(self._library.executor_new(self._handle, len(data), name.encode(), writable, ctypes.byref(address)))
        self.write(address.value, data)
        return address.value

    def write(self, address: int, data: bytes) -> None:
        """Overwrite the first bytes of the array at ``address``."""
        ctypes.memmove(self._library.executor_data(self._handle, address), data, len(data))

    def read(self, address: int, count: int) -> bytes:
        """Return the first ``count`` bytes of the array at ``address``."""
        return ctypes.string_at(self._library.executor_data(self._handle, address), count)

    def free(self, address: int) -> None:
        """Take an array away: any access to it is an error from here on."""
        if self._handle is not None:
            self._library.executor_free(self._handle, address)


class Array:
    """Memory of a device, freed with this object."""

    def __init__(self, memory: Memory, values: NDArray[Any]) -> None:
        self.shape, self.dtype = values.shape, values.dtype
        self.memory = memory
        self.address = memory.add(
            np.ascontiguousarray(values).tobytes(), f"an array {values.dtype}{list(values.shape)}"
        )

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self.memory.free(self.address)

    def values(self) -> NDArray[Any]:
        """Return a copy of what is there."""
        data = self.memory.read(self.address, math.prod(self.shape) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(self.shape).copy()


class Module:
    """One code object, loaded."""

    def __init__(self, device: Amd, path: Path, file: str) -> None:
        self._device, self._file = device, file
        self.code = objectfile.read(path.read_bytes())
        self.instructions = disassembly.disassembled(path)
        self._library = executor()
        self._base = device.memory.add(self.code.image, f"the code of {file}", writable=False)
        program = ctypes.c_void_p()
        text = encoding.encoded(self.instructions, self.code.gpu)
        checked(self._library.executor_program(text.encode(), self._base, ctypes.byref(program)))
        self._program = program
        for kernel in self.code.kernels.values():
            _check_registers(kernel, self.of_kernel(kernel.name))

    def __del__(self) -> None:
        if hasattr(self, "_program"):
            self._library.executor_program_end(self._program)

    def of_kernel(self, name: str) -> list[Instruction]:
        """Return the instructions of a kernel."""
        kernel = self.code.kernels[name]
        return [one for one in self.instructions if kernel.entry <= one.pc < kernel.entry + kernel.size]

    def executed(self) -> Counter[str]:
        """Return how often waves have executed each mnemonic since the module was loaded."""
        counts = (ctypes.c_uint64 * len(self.instructions))()
        self._library.executor_counts(self._program, counts)
        found: Counter[str] = Counter()
        for one, count in zip(self.instructions, counts, strict=True):
            found[one.mnemonic] += count
        return found

    def launch(self, name: str, grid: Extent, block: Extent, args: Sequence[Any], shared: int = 0) -> None:
        """Run kernel ``name`` and return when it has ended.

        ``args`` are arrays, None for a null pointer, or NumPy scalars of exactly the kernel's widths; ``shared`` is the
        bytes of dynamic LDS. Raises Fault, which names the kernel, the instruction and, if it is about memory, the
        address.
        """
        kernel = self.code.kernels.get(name)
        if kernel is None:
            raise Fault(f"{self._file}: no kernel {name}; it has {', '.join(self.code.kernels)}")
        memory, what = self._device.memory, f"{self._file}: {name} on {self.code.gpu}"
        if kernel.shared_bytes + shared > MOST_SHARED:
            raise Fault(f"{what}: {kernel.shared_bytes + shared} bytes of LDS, more than {MOST_SHARED}")
        grid, block = _three(grid), _three(block)
        if min(*grid, *block) < 1 or math.prod(block) > 1024:
            raise Fault(f"{what}: a grid of {grid} and a block of {block}")
        arguments = memory.add(_arguments(kernel, args, grid, block, shared, what), "the arguments", writable=False)
        packet = memory.add(_packet(kernel, grid, block, shared, arguments), "the dispatch packet", writable=False)
        launch = Launch(
            arguments=arguments, packet=packet, bound=self._device.bound, entry=kernel.entry, grid=grid, block=block,
            shared_bytes=kernel.shared_bytes + shared, private_bytes=kernel.private_bytes, lanes=kernel.lanes,
            vectors=kernel.vectors, accumulators=kernel.accumulators, properties=kernel.properties,
            user_scalars=kernel.user_scalars, ids=kernel.ids, private_offset=kernel.private_offset,
            ids_in_traps=self.code.gpu.startswith("gfx12"), threads_apart=self.code.gpu == "gfx1030",
            seed=self._device.next_seed(),            whole_barriers=self._device.whole_barriers,
        )  # fmt: skip
        try:
            checked(self._library.executor_launch(self._program, memory.handle, ctypes.byref(launch)))
        except Fault as error:
            raise Fault(f"{what}: {error}") from None
        finally:
            memory.free(packet)
            memory.free(arguments)


class Amd:
    """A device of one of `GPUS`: compiles sources, loads code objects, holds arrays, launches kernels.

    Blocks run in a random order, and the waves of a block by turns of random length: ``seed`` says which. ``bound`` is
    the instructions that a wave may execute in a launch. A barrier that not all threads of a block reach is an error,
    as the language has it; without ``whole_barriers`` it is what a GPU makes of it: waves are counted, not lanes.
    ``compiler`` makes the code objects, by default clang.
    """

    def __init__(
        self,
        gpu: str,
        *,
        seed: int = 1,
        bound: int = BOUND,
        whole_barriers: bool = True,
        compiler: Callable[[], Toolchain | Hiprtc] | None = None,
    ) -> None:
        if gpu not in GPUS:
            raise ValueError(f"gpu={gpu!r}: must be one of {', '.join(GPUS)}")
        self.gpu = gpu
        self.wave = WAVES[gpu]
        self.bound, self.whole_barriers = bound, whole_barriers
        self.memory = Memory()
        self._seed = seed
        self._compiler = compiler or toolchain

    def compile(self, name: str, defines: Mapping[str, str | int] | None = None) -> Module:
        """Compile kernels/``name``.hip; raises `amdgcn.CompileError`, or Fault for an instruction it lacks."""
        return self.compile_text(source.read(name), defines, f"{name}.hip")

    def compile_text(self, text: str, defines: Mapping[str, str | int] | None = None, file: str = "test.hip") -> Module:
        """Compile a text that has its common.h already (`source.inlined`)."""
        return self.load(self._compiler().code(text, source.checked(text, defines or {}, file), self.gpu), file)

    def load(self, path: Path, file: str) -> Module:
        """Load the code object at ``path``; ``file`` is what errors call it."""
        module = Module(self, path, file)
        if module.code.gpu != self.gpu:
            raise Fault(f"{file}: a code object for {module.code.gpu}, on {self.gpu}")
        return module

    def array(self, values: ArrayLike) -> Array:
        """Copy ``values`` to the device."""
        return Array(self.memory, np.asarray(values))

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return memory that holds NaN, or the byte 0xCD for integers."""
        return Array(self.memory, poisoned(shape, dtype))

    def get(self, array: Array) -> NDArray[Any]:
        """Copy an array to the host."""
        return array.values()

    def fetch(self, array: Array) -> Callable[[], NDArray[Any]]:
        """Copy an array to the host when the function is called; each launch is over when it returns."""
        return lambda: self.get(array)

    def next_seed(self) -> int:
        """Return the number that the next launch's order comes of."""
        self._seed += 1
        return self._seed


@functools.cache
def toolchain() -> Toolchain:
    """Return clang for AMD's GPUs; its folder goes with the process."""
    folder = tempfile.TemporaryDirectory()
    made = Toolchain(Path(folder.name))
    made.keep = folder  # type: ignore[attr-defined]
    return made


@functools.cache
def hiprtc() -> Hiprtc:
    """Return AMD's own compiler."""
    return Hiprtc(CODE)


def _check_registers(kernel: Kernel, instructions: Sequence[Instruction]) -> None:
    """Raise Fault if an instruction names a register that the descriptor does not ask for."""
    for one in instructions:
        for text in (*one.operands, *(one.second.operands if one.second else ())):
            for kind, last in encoding.registers(text):
                most = {"v": kernel.vectors, "a": kernel.accumulators, "s": 106}[kind]
                if last >= most:
                    raise Fault(
                        f"{kernel.name}: 0x{one.pc:x}: {one}: {kind}{last}, of {most} that the descriptor asks for"
                    )


def _arguments(
    kernel: Kernel, args: Sequence[Any], grid: tuple[int, ...], block: tuple[int, ...], shared: int, what: str
) -> bytes:
    """The bytes of a kernel's arguments as the loader lays them out."""
    data = bytearray(kernel.arguments_bytes)
    hidden = {
        "hidden_grid_dims": 1 + (grid[1] * block[1] > 1 or grid[2] * block[2] > 1) + (grid[2] * block[2] > 1),
        "hidden_dynamic_lds_size": shared,
        "hidden_none": 0,
    }
    for number, axis in enumerate("xyz"):
        hidden[f"hidden_block_count_{axis}"] = grid[number]
        hidden[f"hidden_group_size_{axis}"] = block[number]
        hidden[f"hidden_remainder_{axis}"] = 0
        hidden[f"hidden_global_offset_{axis}"] = 0
    wanted = [one for one in kernel.arguments if not one.kind.startswith("hidden_")]
    if len(wanted) != len(args):
        raise Fault(f"{what}: {len(args)} arguments, and it takes {len(wanted)}")
    for number, (one, value) in enumerate(zip(wanted, args, strict=True)):
        data[one.offset : one.offset + one.size] = _argument(one, value, f"{what}: argument {number}")
    for one in kernel.arguments:
        if one.kind in hidden:
            data[one.offset : one.offset + one.size] = hidden[one.kind].to_bytes(one.size, "little")
        elif one.kind.startswith("hidden_"):
            raise Fault(f"{what}: it takes {one.kind}, which is not here")
    return bytes(data)


def _argument(one: objectfile.Argument, value: Any, what: str) -> bytes:
    pointer = one.kind in ("global_buffer", "dynamic_shared_pointer")
    if pointer != (value is None or isinstance(value, Array)):
        raise Fault(f"{what}: {value!r} for a {one.kind} of {one.size} bytes")
    if pointer:
        return struct.pack("<Q", 0 if value is None else value.address)
    if not isinstance(value, np.integer | np.floating) or value.nbytes != one.size:
        raise Fault(f"{what}: {value!r} of {type(value).__name__} for {one.size} bytes")
    return value.tobytes()


def _packet(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], shared: int, arguments: int) -> bytes:
    threads = [one * each for one, each in zip(grid, block, strict=True)]
    head = struct.pack("<HHHHHH", 0, 3, *block, 0)
    sizes = struct.pack("<IIIII", *threads, kernel.private_bytes, kernel.shared_bytes + shared)
    return head + sizes + struct.pack("<QQQQ", 0, arguments, 0, 0)


def _three(extent: Extent) -> tuple[int, int, int]:
    x, y, z = (*(extent if isinstance(extent, tuple) else (extent,)), 1, 1)[:3]
    return int(x), int(y), int(z)
