"""Targets that read a checkpoint: whatever is in a file, reading it raises nothing but ``ModelInvalid``, and a
tokenizer that was read encodes a text or refuses it as ``FieldInvalid``.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from services.common.errors import FieldInvalid, ModelInvalid
from services.engine.checkpoint.gguf import tokenizer as gguftokenizer
from services.engine.checkpoint.weights import Weights
from services.engine.model.checkpoint import Checkpoint
from services.engine.text import chat_files
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import TOKENIZER_FILE, Tokenizer
from tests.fuzz.seeds import CONFIG, VOCAB, tokenizer_json

#: What separates the files of a folder in one input.
BREAK = b"\0\0"
#: A tensor this large is not read: where it lies was checked.
MOST_VALUES = 1 << 16


@cache
def _folder() -> Path:
    name = tempfile.TemporaryDirectory(prefix="rf-fuzz-")
    _kept.append(name)  # removed when the process ends
    return Path(name.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []
#: What the last input was refused with: declared errors, which are no findings.
refused: list[str] = []


@contextlib.contextmanager
def _declared() -> Iterator[None]:
    try:
        yield
    except (ModelInvalid, FieldInvalid) as error:
        refused.append(error.message)


@contextlib.contextmanager
def _files(**contents: bytes) -> Iterator[Path]:
    folder = _folder()
    refused.clear()
    for old in folder.iterdir():
        old.unlink()
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    with _declared():
        yield folder


def _read_all(weights: Weights) -> None:
    for tensor in weights.values():
        if tensor.size <= MOST_VALUES:
            tensor.read_into(np.empty(tensor.shape, np.float32))


def safetensors(data: bytes) -> None:
    """The tensors of a Hugging Face folder, whose configuration is a good one."""
    with _files(config__json=CONFIG, model__safetensors=data) as folder:
        _read_all(Checkpoint.open(folder).weights())


def gguf(data: bytes) -> None:
    """A GGUF file: its header, its configuration, its tokenizer, its chat template and its tensors."""
    with _files(model__gguf=data) as folder:
        checkpoint = Checkpoint.open(folder / "model.gguf")
        if checkpoint.gguf is None:
            return
        with _declared():
            chat_files.of_gguf(checkpoint.gguf)
        with _declared():
            gguftokenizer.tokenizer_of(checkpoint.gguf)
        _read_all(checkpoint.weights())


def config(data: bytes) -> None:
    """``config.json``, ``generation_config.json`` and ``tokenizer_config.json``, concatenated."""
    parts = [*data.split(BREAK, 2), b"{}", b"{}"]
    files = {"generation_config__json": parts[1], "tokenizer_config__json": parts[2]}
    with _files(config__json=parts[0], **files) as folder:
        source = chat_files.of_folder(folder)
        with _declared():
            Checkpoint.open(folder)
        Chat.of(source, _tokenizer())


def tokenizer(data: bytes) -> None:
    """``tokenizer.json``, and a text through it and back."""
    with _files(tokenizer__json=data) as folder:
        loaded = Tokenizer.load(folder, VOCAB)
        loaded.decode(loaded.encode("To be, or not to be \u00e9\u6f22"))


@cache
def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="rf-fuzz-") as name:
        (Path(name) / TOKENIZER_FILE).write_bytes(tokenizer_json())
        return Tokenizer.load(name, VOCAB)
