"""A code object as the loader reads it: segments, kernels, descriptors, and the arguments that the metadata lists."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.simulators.amdgpu.code import messagepack

#: e_flags' lowest byte, by GPU.
MACHINES = {0x3F: "gfx90a", 0x4C: "gfx942", 0x36: "gfx1030", 0x41: "gfx1100", 0x4E: "gfx1201"}

_NOTE_METADATA = 32
_SYMBOL = struct.Struct("<IBBHQQ")
_RELATIVE_64 = 13


class ObjectError(Exception):
    """A file that is no code object, or one that asks for what this executor does not do."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One of a kernel's arguments: where it lies among them, in bytes, and what it is."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its code, and what its descriptor and its metadata say. Sizes are in bytes, registers in count."""

    name: str
    entry: int
    size: int
    arguments: tuple[Argument, ...]
    arguments_bytes: int
    shared_bytes: int
    private_bytes: int
    lanes: int
    vectors: int
    accumulators: int
    scalars: int
    spilled: int
    properties: int
    user_scalars: int
    ids: int
    #: Whether a scalar behind the block's ids has the place of a wave's private memory.
    private_offset: bool


@dataclass(frozen=True, slots=True)
class CodeObject:
    """What a code object has: its memory as it is loaded, and its kernels by name."""

    gpu: str
    image: bytes
    kernels: dict[str, Kernel]


def read(data: bytes) -> CodeObject:
    """Return the code object in the bytes of an ELF file; raises ObjectError."""
    if data[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", data, 18)[0] != 224:
        raise ObjectError("no ELF file for AMD's GPUs")
    flags = struct.unpack_from("<I", data, 48)[0]
    gpu = MACHINES.get(flags & 0xFF)
    if gpu is None:
        raise ObjectError(f"a GPU that is not known: e_flags 0x{flags:x}")
    sections = list(_sections(data))
    image = bytearray()
    for kind, offset, address, bytes_in_file, bytes_in_memory in _segments(data):
        if kind == 1:
            image.extend(bytes(max(0, address + bytes_in_memory - len(image))))
            image[address : address + bytes_in_file] = data[offset : offset + bytes_in_file]
    if any(kind in (4, 9) and size for kind, _, size, _ in sections):
        raise ObjectError("relocations")
    symbols = dict(_symbols(data, sections))
    metadata = next((messagepack.read(note) for note in _notes(data, sections)), None)
    if metadata is None:
        raise ObjectError("no metadata")
    kernels = {}
    for entry in metadata["amdhsa.kernels"]:
        descriptor, _ = symbols[entry[".symbol"]]
        address, size = symbols[entry[".name"]]
        kernels[entry[".name"]] = _kernel(
            entry, bytes(image[descriptor : descriptor + 64]), descriptor, address, size, gpu
        )
    return CodeObject(gpu, bytes(image), kernels)


def _kernel(entry: dict[str, Any], descriptor: bytes, at: int, address: int, size: int, gpu: str) -> Kernel:
    shared, private, arguments_bytes = struct.unpack_from("<III", descriptor, 0)
    (code,) = struct.unpack_from("<q", descriptor, 16)
    third, first, second, properties, preloaded = struct.unpack_from("<IIIHH", descriptor, 44)
    name = entry[".name"]
    if at + code != address:
        raise ObjectError(f"{name}: the descriptor's entry is not its code")
    if (shared, private) != (entry[".group_segment_fixed_size"], entry[".private_segment_fixed_size"]):
        raise ObjectError(f"{name}: descriptor and metadata differ")
    # To the nearest; denormal numbers kept: what the executor computes.
    if first >> 12 & 0xFF != 0xF0:
        raise ObjectError(f"{name}: float mode 0x{first >> 12 & 0xFF:02x}")
    if preloaded:
        raise ObjectError(f"{name}: arguments that are loaded to registers before it starts")
    lanes = 32 if properties & 1 << 10 else 64
    # Registers are given by eights, on CDNA of both kinds together.
    vectors, accumulators = ((first & 63) + 1) * 8, 0
    if gpu in ("gfx90a", "gfx942"):
        together = vectors
        vectors = min(together, ((third & 63) + 1) * 4)
        accumulators = together - vectors
    return Kernel(
        name=name,
        entry=address,
        size=size,
        arguments=tuple(Argument(one[".offset"], one[".size"], one[".value_kind"]) for one in entry[".args"]),
        arguments_bytes=arguments_bytes,
        shared_bytes=shared,
        private_bytes=private,
        lanes=lanes,
        vectors=vectors,
        accumulators=accumulators,
        scalars=entry[".sgpr_count"],
        spilled=entry[".vgpr_spill_count"] + entry[".sgpr_spill_count"],
        properties=properties & 0x7F,
        user_scalars=second >> 1 & 31,
        ids=second >> 7 & 7,
        # Elsewhere the same bit asks for private memory that is found without it.
        private_offset=bool(second & 1) and gpu in ("gfx90a", "gfx1030"),
    )


def _segments(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    (start,) = struct.unpack_from("<Q", data, 32)
    each, count = struct.unpack_from("<HH", data, 54)
    for number in range(count):
        kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", data, start + number * each
        )
        yield kind, offset, address, in_file, in_memory


def _sections(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind, place, bytes and linked section of each."""
    (start,) = struct.unpack_from("<Q", data, 40)
    each, count = struct.unpack_from("<HH", data, 58)
    for number in range(count):
        _, kind, _, _, offset, size, link = struct.unpack_from("<IIQQQQI", data, start + number * each)
        yield kind, offset, size, link


def _symbols(data: bytes, sections: list[tuple[int, int, int, int]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, address and size of each dynamic symbol."""
    for kind, offset, size, link in sections:
        if kind != 11:
            continue
        names = sections[link][1]
        for at in range(offset, offset + size, _SYMBOL.size):
            name, _, _, _, value, length = _SYMBOL.unpack_from(data, at)
            text = data[names + name : data.index(b"\0", names + name)].decode()
            yield text, (value, length)


def _notes(data: bytes, sections: list[tuple[int, int, int, int]]) -> Iterator[bytes]:
    for kind, offset, size, _ in sections:
        at = offset
        while kind == 7 and at < offset + size:
            name_bytes, bytes_, note = struct.unpack_from("<III", data, at)
            begin = at + 12 + (name_bytes + 3) // 4 * 4
            if note == _NOTE_METADATA:
                yield data[begin : begin + bytes_]
            at = begin + (bytes_ + 3) // 4 * 4
