"""Byte-level BPE as GGUF files have it: tokens, and the merges that lead to them."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.vocabulary import CONTROL, USER_DEFINED, Vocabulary, strings

_PRE, _MERGES = "tokenizer.ggml.pre", "tokenizer.ggml.merges"

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
    "smollm": None,
    "llama-bpe": _words("{1,3}"),
    "llama3": _words("{1,3}"),
    "llama-v3": _words("{1,3}"),
    "qwen2": _words(""),
}
#: Those that cut out each digit before; that compose characters; and whose whole words are looked up before merges.
_SINGLE_DIGITS, _COMPOSED, _WHOLE_WORDS = ("smollm",), ("qwen2",), ("llama-bpe", "llama3", "llama-v3")


def byte_level(keys: Fields) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` naming a key that is missing, not served, or contradicts others."""
    pre = keys.values.get(_PRE)
    if not isinstance(pre, str) or pre not in _PATTERNS:
        keys.refuse(_PRE, f"built are {', '.join(_PATTERNS)}; or put the model's tokenizer.json beside the file")
    vocabulary = Vocabulary.of(keys, kinds_required=False)
    ids = vocabulary.ids
    merges = []
    for line in strings(keys, _MERGES):
        first, _, second = line.partition(" ")
        if first not in ids or second not in ids or first + second not in ids:
            keys.refuse(_MERGES, f"{line[:40]!r} does not join two tokens to one")
        merges.append((first, second))

    built = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        built.normalizer = normalizers.NFC()
    pattern = _PATTERNS[pre]
    if pre in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        built.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pattern is None:
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    built.decoder = decoders.ByteLevel()
    vocabulary.add_to(built, vocabulary.of_kind(CONTROL), vocabulary.of_kind(USER_DEFINED))
    vocabulary.frame(built, bos=False)
    return built
