"""The tokenizer that a GGUF file carries, of one of the kinds that are served."""

from __future__ import annotations

import tokenizers

from services.engine.gguf import GgufFile
from services.engine.ggufbytelevel import byte_level
from services.engine.ggufpieces import pieces
from services.engine.ggufvocabulary import BYTE_LEVEL, MODEL, PIECES
from services.engine.keys import Keys


def tokenizer_of(file: GgufFile) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` for one of another kind, or that contradicts itself."""
    keys = Keys(file.path, file.metadata)
    match keys.values.get(MODEL):
        case name if name == BYTE_LEVEL:
            return byte_level(keys)
        case name if name == PIECES:
            return pieces(keys)
    keys.refuse(
        MODEL,
        f"built from a GGUF file are {BYTE_LEVEL}, byte-level BPE, and {PIECES}, SentencePiece's BPE; "
        "put the model's tokenizer.json beside the file",
    )
