"""The vocabulary of a GGUF file's tokenizer: tokens, their types, and the tokens that start and end a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from services.engine.checkpoint.fields import Fields

MODEL, TOKENS, KINDS = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
#: The values of tokenizer.ggml.token_type, which are SentencePiece's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

#: tokenizer.ggml.model of byte-level BPE, and of SentencePiece BPE.
BYTE_LEVEL, PIECES = "gpt2", "llama"
#: The ids that ggml assumes for SentencePiece files without them. It also assumes that a text begins with bos.
_PIECES_IDS = {"bos": 1, "eos": 2}

#: End-of-turn tokens by name, for files without the key. ggml recognizes them by name, too.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
#: End-of-text tokens. Few files have them in addition to end-of-turn, though the generation_config.json has all.
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>")


def strings(keys: Fields, key: str) -> list[str]:
    """Returns a key's value, a non-empty list of strings."""
    values = keys.values.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        keys.refuse(key, "it must be a list of strings")
    return values


def named_ids(keys: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids of ``bos``, ``eos``, ``eot`` or ``eom``: none, one, or several."""
    key = f"tokenizer.ggml.{name}_token_id"
    if not keys.has(key):
        unsaid = unsaid_id(keys, name)
        found = [unsaid] if unsaid is not None else []
        if name == "eot":
            found = _spelled(keys, _TURN_ENDS, CONTROL, USER_DEFINED)
        return tuple(number for number in found[:1] if number < vocab_size)
    return keys.token_ids(key, vocab_size)


def unsaid_id(keys: Fields, name: str) -> int | None:
    """Returns the default id of ``bos`` or ``eos``, for a file without the key."""
    return _PIECES_IDS.get(name) if keys.values.get(MODEL) == PIECES else None


def ending_ids(keys: Fields, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a completion, each once."""
    named = [token for name in ("eos", "eot", "eom") for token in named_ids(keys, name, vocab_size)]
    spelled = (number for number in _spelled(keys, _TEXT_ENDS, CONTROL) if number < vocab_size)
    return tuple(dict.fromkeys([*named, *spelled]))


def _spelled(keys: Fields, names: tuple[str, ...], *of_kinds: int) -> list[int]:
    """Returns the ids of tokens with these names and types. The type matters: plain text may be spelled the same."""
    tokens, kinds = keys.values.get(TOKENS), keys.values.get(KINDS)
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return []
    found = [tokens.index(name) for name in names if name in tokens]
    return [number for number in found if number < len(kinds) and kinds[number] in of_kinds]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and their types by id; ``ids`` by token."""

    keys: Fields
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    @classmethod
    def of(cls, keys: Fields, *, kinds_required: bool) -> Vocabulary:
        """Read the lists. Without ``kinds_required`` the types may be missing or unknown.

        Raises ``ModelInvalid`` for lists that are missing or inconsistent.
        """
        tokens = strings(keys, TOKENS)
        ids = {token: number for number, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
            keys.refuse(TOKENS, f"there is a duplicate token: {twice[:40]!r}")
        kinds = keys.values.get(KINDS, None if kinds_required else [NORMAL] * len(tokens))
        if not isinstance(kinds, list) or len(kinds) != len(tokens):
            keys.refuse(KINDS, f"it must be a list with one entry per token, {len(tokens)}")
        for number, kind in enumerate(kinds if kinds_required else ()):
            if not isinstance(kind, int) or not NORMAL <= kind <= BYTE:
                keys.refuse(KINDS, f"entry {number} is {str(kind)[:20]}; it must be {NORMAL} to {BYTE}")
        return cls(keys, tokens, kinds, ids)

    def of_kind(self, *kinds: int) -> list[str]:
        """Returns the tokens of these types, by id."""
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def add_to(self, built: tokenizers.Tokenizer, special: list[str], whole: list[str]) -> None:
        """Add tokens that are matched before anything else: ``special`` ones, and ``whole`` ones that are text.

        A token that ends a completion is always special, so that it cannot come from user text.
        """
        ends = {self.tokens[number] for number in ending_ids(self.keys, len(self.tokens))}
        built.add_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
            + [AddedToken(token, special=token in ends, normalized=False) for token in whole]
        )

    def frame(self, built: tokenizers.Tokenizer, *, bos: bool) -> None:
        """Add the start and end tokens that the file requests; ``bos`` is the default for the start token."""
        single: list[str] = ["$A"]
        ends: list[dict[str, Any]] = []
        for name, default in (("bos", bos), ("eos", False)):
            flag = f"tokenizer.ggml.add_{name}_token"
            if not self.keys.boolean(flag, default=default):
                continue
            ids = named_ids(self.keys, name, len(self.tokens))
            if not ids:
                self.keys.refuse(flag, f"there is no {name}_token_id")
            # By name, because a post-processor template would interpret some characters of the token's text.
            single.insert(0 if name == "bos" else len(single), name)
            ends.append({"id": name, "ids": [ids[0]], "tokens": [self.tokens[ids[0]]]})
        if ends:
            built.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
