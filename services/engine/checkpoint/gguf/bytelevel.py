"""Builds byte-level BPE tokenizers from GGUF metadata: tokens and merges."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.vocabulary import CONTROL, USER_DEFINED, Vocabulary, strings

_PRE, _MERGES = "tokenizer.ggml.pre", "tokenizer.ggml.merges"

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"


def _words(digits: str, any_case: bool = True) -> str:
    """Returns the pre-tokenization pattern; ``digits`` is the quantifier of a run of digits."""
    english = f"(?i:{_ENGLISH})" if any_case else _ENGLISH
    return (
        rf"{english}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )


#: tokenizer.ggml.pre -> pattern, None for GPT-2's own; as in the tokenizer.json of the model that it is named after.
_PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _words("{1,3}"),
    "llama3": _words("{1,3}"),
    "llama-v3": _words("{1,3}"),
    "qwen2": _words(""),
}
#: Pre-tokenizers that split digits first; that normalize to NFC; that look up whole words before merging.
_SINGLE_DIGITS, _COMPOSED, _WHOLE_WORDS = ("smollm",), ("qwen2",), ("llama-bpe", "llama3", "llama-v3")


def byte_level(keys: Fields) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` naming a key that is missing, unsupported, or inconsistent."""
    pre = keys.values.get(_PRE)
    if not isinstance(pre, str) or pre not in _PATTERNS:
        keys.refuse(_PRE, f"supported are {', '.join(_PATTERNS)}; or put the model's tokenizer.json next to the file")
    vocabulary = Vocabulary.of(keys, kinds_required=False)
    ids = vocabulary.ids
    merges = []
    for line in strings(keys, _MERGES):
        first, _, second = line.partition(" ")
        if first not in ids or second not in ids or first + second not in ids:
            keys.refuse(_MERGES, f"{line[:40]!r} does not merge two tokens into a third")
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
