"""Special tokens in the text of a chat: what the template wrote are tokens, what somebody typed is text."""

from __future__ import annotations

import re
import threading
from typing import Any

import tokenizers
from tokenizers import AddedToken

from services.engine.text.tokenizer import Tokenizer, ids_of

#: Noncharacters, which Unicode sets aside for a program's own use; text with one of these is not taken.
GUARD, _MARK = "\ufdd1", "\ufdd0"
RESERVED = "\ufdd0\ufdd1\ufdd2"


class SpecialTokens:
    """Tells special tokens apart by who wrote them. Any thread may use it.

    `guard` puts a noncharacter into every special token that a text spells. A template may trim, cut and join such a
    text, and what it writes beside it has no guard; `encode` then reads special tokens that have none, and takes the
    guards out of the others.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = {
            number: token
            for number, token in tokenizer.inner.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        # The longest first: it is what the tokenizer takes where two begin.
        self._spelled = sorted({token.content for token in self._added.values()}, key=len, reverse=True)
        self._lock = threading.Lock()
        self._marked: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def guard(self, text: str) -> str:
        """A text in which no special token is spelled any more, until `plain` gives it back."""
        found = [token for token in self._spelled if token in text]
        if not found:
            return text

        def guarded(match: re.Match[str]) -> str:
            # Within the token, where no trimming reaches it; before one that has no within.
            return f"{GUARD if match[2] in found else ''}{match[2]}{GUARD if len(match[1]) > 1 else ''}"

        return re.sub(rf"(?=({_one_of(found)}))(.)", guarded, text, flags=re.DOTALL)

    @staticmethod
    def plain(text: str) -> str:
        """The text without guards."""
        return text.replace(GUARD, "")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with guards; nothing is added at its begin or end.

        Without guards, which is almost always, they are what the tokenizer makes of the text. With them the special
        tokens are marked, and read by a copy of the tokenizer that knows these by their marks only: all between them is
        cut and merged as it is beside a special token.
        """
        if GUARD not in text:
            return ids_of(self._tokenizer.inner, text, add_special_tokens=False)
        marking, numbers = self._copy()
        unguarded = rf"(?<!{GUARD})(?:{_one_of(self._spelled)})"
        marked = re.sub(unguarded, lambda match: f"{_MARK}{match[0]}", text)
        ids = ids_of(marking, self.plain(marked), add_special_tokens=False)
        return [numbers.get(token, token) for token in ids]

    def _copy(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The copy, and the ids of its marked tokens to those of the tokenizer. Made when it is needed first."""
        with self._lock:
            if self._marked is None:
                copy = tokenizers.Tokenizer.from_str(self._tokenizer.inner.to_str())
                copy.no_truncation()
                copy.no_padding()
                numbers = dict[int, int]()
                for number, token in self._added.items():
                    spelling = f"{_MARK}{token.content}"
                    # Not special itself: special ones are what the copy reads as text.
                    like = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
                    copy.add_tokens([AddedToken(spelling, special=False, normalized=False, **like)])
                    if (marked := copy.token_to_id(spelling)) is not None:
                        numbers[marked] = number
                copy.encode_special_tokens = True
                self._marked = copy, numbers
            return self._marked


def _one_of(texts: list[str]) -> str:
    """A pattern that matches each of the texts, the first where several do."""
    return "|".join(map(re.escape, texts))
