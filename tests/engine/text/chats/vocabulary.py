"""A byte-level tokenizer with the special tokens of the templates, and one that cuts words as SentencePiece does."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tests.engine.text.chats.conversations import ADDED_TOKENS, SPECIAL_TOKENS

_MERGES = [("H", "i"), ("t", "h"), ("th", "e"), ("e", "l"), ("Ġ", "W"), ("i", "m"), ("Ċ", "Ċ"), ("|", ">"), ("<", "|")]


def tokenizer() -> tokenizers.Tokenizer:
    """Bytes, a few merges, special tokens first, and a `<s>` at the start of a text as in Llama's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL_TOKENS, *ADDED_TOKENS, *letters, *(first + second for first, second in _MERGES)]
    made = tokenizers.Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, _MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return with_special_tokens(made)


def pieces() -> tokenizers.Tokenizer:
    """Words with ▁ for a space, and one before a text; unknown characters are bytes."""
    words = [*SPECIAL_TOKENS, *ADDED_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abimt<|>_x/", "▁a", "▁a▁"]
    made = tokenizers.Tokenizer(
        models.BPE(
            {word: at for at, word in enumerate(words)},
            [("▁", "a"), ("▁a", "▁")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_special_tokens(made)


def with_special_tokens(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """One that knows the special tokens, of which `[/INST]` takes the spaces after it."""
    made.add_special_tokens([AddedToken(text, normalized=False, rstrip=text == "[/INST]") for text in SPECIAL_TOKENS])
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED_TOKENS])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made
