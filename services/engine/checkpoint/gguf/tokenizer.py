"""Builds the tokenizer that a GGUF file contains, if its kind is supported."""

from __future__ import annotations

import tokenizers

from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.bytelevel import byte_level
from services.engine.checkpoint.gguf.header import GgufFile
from services.engine.checkpoint.gguf.sentencepiece import pieces
from services.engine.checkpoint.gguf.vocabulary import BYTE_LEVEL, MODEL, PIECES


def tokenizer_of(file: GgufFile) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` for an unsupported kind, or inconsistent metadata."""
    keys = Fields(file.path, file.metadata)
    match keys.values.get(MODEL):
        case name if name == BYTE_LEVEL:
            return byte_level(keys)
        case name if name == PIECES:
            return pieces(keys)
    keys.refuse(
        MODEL,
        f"it must be {BYTE_LEVEL}, byte-level BPE, or {PIECES}, SentencePiece BPE; otherwise put the model's "
        "tokenizer.json next to the file",
    )
