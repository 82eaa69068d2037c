# mypy: disable-error-code="arg-type, attr-defined"
"""SentencePiece models as their own library trains and reads them, and as a GGUF file's metadata."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as spm

#: By the types of sentencepiece_model.proto, which are ggml's too.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]

TEXT = (
    "the cat sat on a mat, and that hat was here there theatre other mother together gather rather weather "
    "123 4567 2024 1999 31415 (see_foo) bar(baz) don't won't it's <div> </div> a=b; {x} école élan été naïve "
    "日本語 日本 中国 中文 🙂 🙂🙂 привет мир what  where   who"
)
WORDS = TEXT.split(" ")


def trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A model of random sentences of these words."""
    chosen = random.Random(0)
    sentences = [" ".join(chosen.choices(WORDS, k=12)) for _ in range(300)]
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 600, "byte_fallback": True, "hard_vocab_limit": False}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **(settings | options)
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def composed(pieces: Iterable[tuple[str, float, int]], *, prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    """A model of these pieces, scores and types, after <unk>, <s> and </s>."""
    model = spm.ModelProto()
    model.trainer_spec.model_type = spm.TrainerSpec.BPE
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.add_dummy_prefix = prefix
    for text, score, kind in [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), *pieces]:
        model.pieces.add(piece=text, score=score, type=kind)
        model.trainer_spec.byte_fallback |= kind == BYTE
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def metadata_of(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """Its keys in a GGUF file, as llama.cpp's converter writes them."""
    model = spm.ModelProto.FromString(processor.serialized_model_proto())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [int(piece.type) for piece in model.pieces],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
    }
