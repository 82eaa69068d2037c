# mypy: disable-error-code="arg-type, assignment, dict-item"
"""GGUF files: numbers as the `gguf` package decodes them; a hostile file costs nothing but an error that names it."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ModelInvalid
from services.engine.checkpoint.gguf.header import GgufFile
from services.engine.checkpoint.gguf.quants import ENCODINGS, OTHERS
from services.engine.checkpoint.tensor import StoredTensor
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.loading import Loading
from tests.models.families import FAMILIES, family_tensors
from tests.models.gguf_files import write_gguf

QUANTISED = [number for number, encoding in ENCODINGS.items() if encoding.block_values > 1]

# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", QUANTISED, ids=lambda number: Kind(number).name)
def test_all_bits_decode_as_in_gguf(number: int) -> None:
    encoding = ENCODINGS[number]
    assert (encoding.name, (encoding.block_values, encoding.block_bytes)) == (
        Kind(number).name,
        GGML_QUANT_SIZES[Kind(number)],
    )
    raw = np.random.default_rng(number).integers(0, 256, (3000, encoding.block_bytes)).astype(np.uint8)
    with np.errstate(all="ignore"):  # a scale of random bits may be infinity
        expected, found = dequantize(raw, Kind(number)), encoding.decode(raw)
    assert found.dtype == np.float32 and found.shape == (3000, encoding.block_values)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    assert found[finite].tobytes() == expected[finite].tobytes()
    assert not np.isfinite(found[~finite]).any()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_what_was_quantised_is_near_what_it_was(kind: Kind) -> None:
    numbers = np.random.default_rng(0).standard_normal((50, 64), np.float32)
    raw = quantize(numbers, kind)
    found = ENCODINGS[int(kind)].decode(raw.reshape(-1, GGML_QUANT_SIZES[kind][1])).reshape(50, 64)
    assert np.abs(found - numbers).max() < (0.02 if kind is Kind.Q8_0 else 0.35)


def test_every_type_has_a_name() -> None:
    assert not ENCODINGS.keys() & OTHERS.keys()
    named = {number: encoding.name for number, encoding in ENCODINGS.items()} | OTHERS
    for kind in Kind:
        assert named.get(int(kind), kind.name) == kind.name


@pytest.mark.parametrize("number", ENCODINGS, ids=lambda number: Kind(number).name)
def test_a_tensor_of_many_chunks(tmp_path: Path, number: int) -> None:
    """... not a whole number of them, at an odd place in the file."""
    encoding = ENCODINGS[number]
    values = (1 << 19) + 256 * 5
    if encoding.block_values == 1:
        numbers = np.random.default_rng(0).standard_normal(values, np.float32).astype(encoding.dtype)
        raw, expected = numbers.view(np.uint8), numbers.astype(np.float32)
    else:
        block = np.random.default_rng(0).integers(0, 60, (values // encoding.block_values, encoding.block_bytes))
        raw = block.astype(np.uint8)
        expected = dequantize(raw, Kind(number)).reshape(-1)
    file = tmp_path / "raw"
    file.write_bytes(b"\xff" * 7 + raw.tobytes() + b"\xff" * 7)
    out, seen = np.empty(values, np.float32), list[int]()
    tensor = StoredTensor(file, "it", (values,), 7, encoding)
    tensor.read_into(out, seen.append)
    assert np.array_equal(out, expected)
    assert sum(seen) == raw.size == tensor.stored_bytes and len(seen) == 2
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelInvalid, match="was truncated while"):
        tensor.read_into(out)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused_in_the_type_it_is_stored_in(tmp_path: Path, dtype: Any, bad: float) -> None:
    numbers = np.ones(100, dtype)
    file = tmp_path / "raw"
    numbers.tofile(file)
    number = {4: 0, 2: 1 if dtype is np.float16 else 30}[numbers.itemsize]
    tensor, out = StoredTensor(file, "it", (100,), 0, ENCODINGS[number]), np.empty(100, dtype)
    tensor.read_into(out)
    assert np.array_equal(out, numbers)
    numbers[77] = bad
    numbers.tofile(file)
    with pytest.raises(ModelInvalid, match="tensor it contains NaN or infinity"):
        tensor.read_into(out)


# --- headers ---------------------------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def head(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def entry(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def listed(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def aligned(header: bytes, data: bytes = b"", to: int = 32) -> bytes:
    return header + bytes(-len(header) % to) + data


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes, str], None]:
    """Reading fails as it should: quickly, and without memory for what the file claims to hold."""

    def check(content: bytes, said: str) -> None:
        file = tmp_path / "it.gguf"
        file.write_bytes(content)
        begun = time.monotonic()
        tracemalloc.start()
        try:
            with pytest.raises(ModelInvalid, match=said) as caught:
                GgufFile.read(file)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
        assert time.monotonic() - begun < 30
        assert str(file) in caught.value.message and len(caught.value.message) < 500 + len(str(file))

    return check


def test_values_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "it.gguf", "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    for name, value in {"uint8": 255, "int8": -1, "uint16": 65535, "int16": -2, "uint32": 1 << 31, "int32": -3}.items():
        getattr(writer, f"add_{name}")(name, value)
        expected[name] = value
    for name, value in {"uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1}.items():
        getattr(writer, f"add_{name}")(name, value)
        expected[name] = value
    for name, value in {"strings": ["a", "ü", ""], "numbers": [1, -2, 3], "floats": [0.5, -0.25]}.items():
        writer.add_array(name, value)
        expected[name] = value
    writer.add_array("bools", [True, False])
    writer.add_bool("bool", True)
    writer.add_string("string", "x" * 1000)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile.read(tmp_path / "it.gguf")
    assert found.metadata == expected | {"bools": [True, False], "bool": True, "string": "x" * 1000}
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {"a": (2, 3), "b": (5,)}
    out = np.empty((2, 3), np.float32)
    found.tensors["a"].read_into(out)
    assert np.array_equal(out, np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_nothing(tmp_path: Path, version: int) -> None:
    (tmp_path / "it.gguf").write_bytes(head(0, 0, version))
    assert GgufFile.read(tmp_path / "it.gguf") == GgufFile(tmp_path / "it.gguf", {}, {})


def test_another_alignment(tmp_path: Path) -> None:
    header = head(1, 1) + pair("general.alignment", 4, struct.pack("<I", 1024)) + entry("a", [2], 0, 1024)
    (tmp_path / "it.gguf").write_bytes(aligned(header, bytes(1024) + np.float32([1, 2]).tobytes(), 1024))
    out = np.empty(2, np.float32)
    GgufFile.read(tmp_path / "it.gguf").tensors["a"].read_into(out)
    assert out.tolist() == [1, 2]


MANY = 1 << 60


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is truncated: it ends at 0, within its first bytes"),
        (b"GG", "within its first bytes"),
        (b"PK\3\4" + bytes(100), r"is not GGUF: it begins with b'PK\\x03\\x04'"),
        (b"GGUF\3\0", "within its version"),
        (head(0, 0, 1), "version 1; supported versions are 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian files are not supported"),
        (head(0, 0)[:-1], "within its number of keys"),
        (head(MANY, 0), f"has a value of {MANY} for its number of tensors; at most 65536 is supported"),
        (head(0, MANY), f"has a value of {MANY} for its number of keys; at most 65536 is supported"),
        (head(60000, 0) + bytes(100), "is truncated: its number of tensors is 60000, but only 108 bytes are left"),
        (head(0, 60000), "is truncated: its number of keys is 60000"),
        (
            head(0, 1) + struct.pack("<Q", 10 << 30) + bytes(50),
            "a value of 10737418240 for the length of a key; at most 16777216",
        ),
        (
            head(0, 1) + struct.pack("<Q", 10 << 20) + bytes(50),
            "is truncated: the length of a key is 10485760, but only 50 bytes",
        ),
        (head(0, 1) + pair("s", 8, struct.pack("<Q", 10 << 30)), "has a value of 10737418240 for the length of s"),
        (head(0, 1) + pair("s", 8, struct.pack("<Q", 1 << 20)), "is truncated: the length of s is 1048576"),
        (head(0, 1) + pair("s", 8, text(b"\xff\xfe")), "has s that is not UTF-8"),
        (head(0, 1) + pair("s", 13, bytes(8)), "has s of unknown type 13"),
        (head(0, 1) + pair("s", 1 << 31, bytes(8)), "has s of unknown type 2147483648"),
        (head(0, 1) + pair("s", 7, b"\2"), "has s with boolean 2; it must be 0 or 1"),
        (head(0, 1) + pair("s", 12, bytes(7)), "within s"),
        (head(0, 1) + pair("s", 9, listed(4, MANY, b"")), f"a value of {MANY} for the length of s; at most 4194304"),
        (head(0, 1) + pair("s", 9, listed(4, 1 << 20, bytes(64))), "the length of s is 1048576, but only 64 bytes"),
        (head(0, 1) + pair("s", 9, listed(8, 1 << 20, bytes(64))), "the length of s is 1048576, but only 64 bytes"),
        (
            head(0, 1) + pair("s", 9, listed(8, 2, text("a") + struct.pack("<Q", MANY))),
            f"has a value of {MANY} for the length of s",
        ),
        (head(0, 1) + pair("s", 9, listed(9, 1, listed(4, 1, bytes(4)))), "a list of type 9, which is not supported"),
        (head(0, 1) + pair("s", 9, listed(99, 1, bytes(4))), "a list of type 99"),
        (head(0, 1) + pair("s", 9, listed(7, 3, b"\0\1\7")), "has s with boolean 7; it must be 0 or 1"),
        (head(0, 2) + 2 * pair("s", 0, b"\0"), "has the key 's' twice"),
        (head(0, 1) + pair("general.alignment", 4, struct.pack("<I", 0)), "general.alignment 0: it must be a power"),
        (head(0, 1) + pair("general.alignment", 4, struct.pack("<I", 48)), "general.alignment 48"),
        (head(0, 1) + pair("general.alignment", 4, struct.pack("<I", 1 << 31)), "general.alignment 2147483648"),
        (head(0, 1) + pair("general.alignment", 8, text("32")), "general.alignment 32: it must be a power"),
        (head(0, 1) + text("k" * 1000) + struct.pack("<I", 77), "has k{100} of unknown type 77"),
    ],
    ids=range(33),
)
def test_a_header_that_lies(refused: Callable[[bytes, str], None], content: bytes, said: str) -> None:
    refused(content, said)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([("t" * 65, [8], 0, 0)], "a value of 65 for the length of a tensor's name; at most 64"),
        ([("t", [], 0, 0)], "of 0 dimensions; it must have 1 to 4"),
        ([("t", [1] * 5, 0, 0)], "of 5 dimensions"),
        ([("t", [8], 4, 0)], "has tensor 't' of type number 4; supported types are F32, F16, Q4_0"),
        ([("t", [256], 23, 0)], "of type IQ4_XS; supported types are"),
        ([("t", [8], 1 << 31, 0)], "of type number 2147483648"),
        ([("t", [31], 8, 0)], "rows of 31; Q8_0 has blocks of 32"),
        ([("t", [128, 2], 12, 0)], "rows of 128; Q4_K has blocks of 256"),
        ([("t", [8], 0, 4)], "of 32 bytes at .*, which is not aligned to 32"),
        ([("t", [8], 0, 64)], "in the .* bytes of the file"),
        ([("t", [8], 0, (1 << 64) - 32)], "or not within"),
        ([("t", [MANY], 0, 0)], f"of {4 * MANY} bytes"),
        ([("t", [MANY, MANY, MANY, MANY], 0, 0)], "or not within"),
        ([("t", [1 << 32, 1 << 32], 0, 0)], "or not within"),
        ([("t", [0], 0, 0)], "of 0 bytes"),
        ([("t", [8, 0], 0, 0)], "of 0 bytes"),
        ([("t", [8], 0, 0), ("t", [8], 0, 32)], "has tensor 't' twice"),
        ([("t", [9], 0, 0), ("u", [4], 0, 32)], "has tensor 'u' overlapping tensor 't'"),
        ([("u", [8], 0, 32), ("t", [8], 0, 32)], "overlapping tensor"),
    ],
    ids=range(19),
)
def test_a_tensor_that_lies(refused: Callable[[bytes, str], None], entries: list[Any], said: str) -> None:
    refused(aligned(head(len(entries), 0) + b"".join(entry(*e) for e in entries), bytes(64)), said)


def test_a_header_larger_than_any_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "it.gguf"
    with file.open("wb") as stream:
        stream.write(head(0, 1) + pair("s", 9, listed(10, 1 << 22, b"")))
        stream.truncate(100 << 30)  # sparse: takes no space
    # 32 MiB of zeros are read, as the list says; then nothing else is there to be read.
    assert len(GgufFile.read(file).metadata["s"]) == 1 << 22
    with file.open("r+b") as stream:
        stream.write(head(0, 200))
    # Every key after the list is "" of type 0: the second is one too many.
    with pytest.raises(ModelInvalid, match="twice"):
        GgufFile.read(file)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the smallest of everything."""
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 1}
    file = tmp_path_factory.mktemp("sound") / "it.gguf"
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    metadata |= {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    write_gguf(file, config, family_tensors(config, 0), metadata=metadata)
    return file


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 3000), value=st.integers(0, 255))
def test_no_damaged_byte_of_the_header_does_more_than_fail(
    tmp_path_factory: pytest.TempPathFactory, sound: Path, at: int, value: int
) -> None:
    raw = bytearray(sound.read_bytes())
    raw[at] = value
    file = tmp_path_factory.mktemp("damaged") / "it.gguf"
    file.write_bytes(raw)
    try:
        weights = Checkpoint.open(file).weights()
        loading = Loading(weights)
        for name in weights:
            loading.take(name, dtype="f32")
    except ModelInvalid:
        return
    assert len(weights) == 14


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, sound: Path, share: float) -> None:
    file = tmp_path_factory.mktemp("cut") / "it.gguf"
    raw = sound.read_bytes()
    file.write_bytes(raw[: int(share * (len(raw) - 64))])
    with pytest.raises(ModelInvalid, match=re.escape(str(file))):
        Checkpoint.open(file).weights()


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"it\.gguf: there is no such folder or file"):
        Checkpoint.open(tmp_path / "it.gguf")
    (tmp_path / "it.gguf").mkdir()
    with pytest.raises(ModelInvalid, match="is not a regular file"):
        Checkpoint.open(tmp_path / "it.gguf")
    (tmp_path / "weights.bin").write_bytes(b"what is this?")
    with pytest.raises(ModelInvalid, match="is not GGUF"):
        Checkpoint.open(tmp_path / "weights.bin")
