"""Special tokens in chat text: those written by the template are tokens, those typed by a user are plain text."""

from __future__ import annotations

import re
import threading
from typing import Any

import tokenizers
from tokenizers import AddedToken

from services.engine.text.tokenizer import Tokenizer, ids_of

#: Noncharacters, which Unicode reserves for internal use. Text that contains one is rejected.
GUARD, _MARK = "\ufdd1", "\ufdd0"
RESERVED = "\ufdd0\ufdd1\ufdd2"


class SpecialTokens:
    """Distinguishes special tokens of a template from those in user text. Thread-safe.

    `guard` inserts a noncharacter into every special token spelled in user text. A template may trim, cut and join such
    text; what the template itself writes has no guard. `encode` then treats only unguarded special tokens as tokens,
    and removes the guards from the others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = {
            number: token
            for number, token in tokenizer.inner.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        # Longest first, as the tokenizer matches them.
        self._spelled = sorted({token.content for token in self._added.values()}, key=len, reverse=True)
        self._lock = threading.Lock()
        self._marked: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def guard(self, text: str) -> str:
        """Returns the text with every special token guarded; `plain` restores it."""
        found = [token for token in self._spelled if token in text]
        if not found:
            return text

        def guarded(match: re.Match[str]) -> str:
            # Inside the token, out of reach of trimming; before a token of one character.
            return f"{GUARD if match[2] in found else ''}{match[2]}{GUARD if len(match[1]) > 1 else ''}"

        return re.sub(rf"(?=({_one_of(found)}))(.)", guarded, text, flags=re.DOTALL)

    @staticmethod
    def plain(text: str) -> str:
        """Returns the text without guards."""
        return text.replace(GUARD, "")

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a guarded text; adds nothing at its start or end.

        Text without guards, the usual case, goes to the tokenizer as it is. Otherwise the unguarded special tokens are
        marked, and the text is encoded by a copy of the tokenizer that recognizes them only by their marks. The text
        between them is split and merged as it would be next to a special token.
        """
        if GUARD not in text:
            return ids_of(self._tokenizer.inner, text, add_special_tokens=False)
        marking, numbers = self._copy()
        unguarded = rf"(?<!{GUARD})(?:{_one_of(self._spelled)})"
        marked = re.sub(unguarded, lambda match: f"{_MARK}{match[0]}", text)
        ids = ids_of(marking, self.plain(marked), add_special_tokens=False)
        return [numbers.get(token, token) for token in ids]

    def _copy(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Returns the copy, and a map from its marked token ids to the tokenizer's. Created on first use."""
        with self._lock:
            if self._marked is None:
                copy = tokenizers.Tokenizer.from_str(self._tokenizer.inner.to_str())
                copy.no_truncation()
                copy.no_padding()
                numbers = dict[int, int]()
                for number, token in self._added.items():
                    spelling = f"{_MARK}{token.content}"
                    # Not special: the copy reads special tokens as text.
                    like = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
                    copy.add_tokens([AddedToken(spelling, special=False, normalized=False, **like)])
                    if (marked := copy.token_to_id(spelling)) is not None:
                        numbers[marked] = number
                copy.encode_special_tokens = True
                self._marked = copy, numbers
            return self._marked


def _one_of(texts: list[str]) -> str:
    """Returns a pattern that matches any of the texts, earlier ones first."""
    return "|".join(map(re.escape, texts))
