"""The tokenizer that a GGUF file carries: byte-level BPE, put together from its tokens and merges."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from services.engine.gguf import GgufFile
from services.engine.keys import Keys

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"


def _words(digits: str, any_case: bool = True) -> str:
    """Where a text is cut before its bytes are merged; ``digits`` is how many of them stay together."""
    english = f"(?i:{_ENGLISH})" if any_case else _ENGLISH
    return (
        rf"{english}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


#: tokenizer.ggml.pre -> that pattern, None for GPT-2's own; as in the tokenizer.json of the models it is named after.
_PATTERNS = {
    "gpt-2": None,
    "default": None,
    "llama-bpe": _words("{1,3}"),
    "llama3": _words("{1,3}"),
    "llama-v3": _words("{1,3}"),
    "qwen2": _words(""),
}
#: Those that compose characters first, and those whose whole words are looked up before merges.
_COMPOSED, _WHOLE_WORDS = ("qwen2",), ("llama-bpe", "llama3", "llama-v3")


def is_served(file: GgufFile) -> bool:
    """Whether the file's tokenizer is of a kind that `tokenizer_of` builds."""
    return file.metadata.get("tokenizer.ggml.model") == "gpt2"


def tokenizer_of(file: GgufFile) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` for one of another kind, or that contradicts itself."""
    keys = Keys(file.path, file.metadata)
    if not is_served(file):
        keys.refuse(
            "tokenizer.ggml.model",
            "only gpt2, byte-level BPE, is built from a GGUF file; put the model's tokenizer.json beside the file",
        )
    pre = keys.values.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PATTERNS:
        keys.refuse("tokenizer.ggml.pre", f"served are {', '.join(_PATTERNS)}")
    tokens = _strings(keys, "tokenizer.ggml.tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        keys.refuse("tokenizer.ggml.tokens", "a token comes twice")
    kinds = keys.values.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        keys.refuse("tokenizer.ggml.token_type", f"it must be a list as long as that of tokens, {len(tokens)}")
    merges = []
    for line in _strings(keys, "tokenizer.ggml.merges"):
        first, _, second = line.partition(" ")
        if first not in vocab or second not in vocab or first + second not in vocab:
            keys.refuse("tokenizer.ggml.merges", f"{line[:40]!r} does not join two tokens to one")
        merges.append((first, second))

    built = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        built.normalizer = normalizers.NFC()
    pattern = _PATTERNS[pre]
    if pattern is None:
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    built.decoder = decoders.ByteLevel()
    special = {_CONTROL: True, _USER_DEFINED: False}
    built.add_tokens(
        [
            AddedToken(token, special=special[kind], normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in special
        ]
    )
    _add_ends(built, keys, tokens)
    return built


def _strings(keys: Keys, key: str) -> list[str]:
    values = keys.values.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        keys.refuse(key, "it must be a list of strings")
    return values


def _add_ends(built: tokenizers.Tokenizer, keys: Keys, tokens: list[str]) -> None:
    """What a text begins and ends with, where the file says so."""
    before, after = "", ""
    ends: list[tuple[Any, int]] = []
    for name in ("bos", "eos"):
        if not keys.boolean(f"tokenizer.ggml.add_{name}_token", default=False):
            continue
        ids = keys.token_ids(f"tokenizer.ggml.{name}_token_id", len(tokens))
        if not ids:
            keys.refuse(f"tokenizer.ggml.add_{name}_token", f"there is no {name}_token_id")
        ends.append((tokens[ids[0]], ids[0]))
        if name == "bos":
            before = f"{tokens[ids[0]]}:0 "
        else:
            after = f" {tokens[ids[0]]}:0"
    if ends:
        built.post_processor = processors.TemplateProcessing(single=f"{before}$A:0{after}", special_tokens=ends)
