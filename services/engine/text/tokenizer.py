"""The tokenizer, and incremental detokenization of one request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from services.common.errors import FieldInvalid, ModelInvalid
from services.engine.checkpoint.placeholders import HEAD_BYTES, refuse_placeholder

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library. Immutable once loaded, so thread-safe."""

    def __init__(self, inner: tokenizers.Tokenizer, vocab_size: int) -> None:
        self.inner = inner
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, folder: Path | str, vocab_size: int) -> Tokenizer:
        """Read ``tokenizer.json`` of ``folder`` for a model of ``vocab_size`` tokens. Ids it lacks decode to nothing.

        Raises ``ModelInvalid`` when the file is missing or damaged, or has ids outside the model's vocabulary.
        """
        file = Path(folder) / TOKENIZER_FILE
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise ModelInvalid(f"{file} cannot be read: {error.strerror or error}") from error
        try:
            inner = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except BaseException as error:
            if not _is_librarys(error):
                raise
            refuse_placeholder(file, raw[:HEAD_BYTES])
            raise ModelInvalid(f"{file} is not a tokenizer: {error}") from error
        return cls.of(inner, vocab_size, str(file))

    @classmethod
    def of(cls, inner: tokenizers.Tokenizer, vocab_size: int, file: str) -> Tokenizer:
        """Wrap a tokenizer read from ``file``. Raises ``ModelInvalid`` when it has ids outside the vocabulary."""
        highest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise ModelInvalid(f"{file} has token id {highest}; the model's vocab_size is {vocab_size}")
        # A file may carry training settings; prompts must never be truncated or padded silently.
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ``text``, including the special tokens that the file adds at its start and end.

        Raises ``FieldInvalid``; see `ids_of`.
        """
        return ids_of(self.inner, text)

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Returns the text of ``ids``; invalid UTF-8 becomes U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=not keep_special)


def ids_of(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Returns the token ids of ``text``. Encodes it as a batch of one, which releases the GIL; encoding a single text
    would block all threads, for seconds per megabyte.

    Raises ``FieldInvalid`` for text that the tokenizer has no tokens for, as one without an unknown token may.
    """
    try:
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
    except BaseException as error:
        if not _is_librarys(error):
            raise
        raise FieldInvalid(f"the model's tokenizer cannot encode the text: {error}") from error


def _is_librarys(error: BaseException) -> bool:
    """Whether the library failed. It raises nothing more specific than Exception, and a panic of its Rust is not even
    that: a class of its own below BaseException, which cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class TextStream:
    """Incremental detokenization of one request, in whole characters, cut at a stop string.

    The first stop string to be completed ends the text, as in vLLM and transformers: the match that ends first, and the
    longest of those, independent of token boundaries. Text that may still become part of a match is held back. Without
    a match, the pushes and `finish` together equal ``Tokenizer.decode`` of all ids. Text released by the first
    ``min_tokens`` tokens is never part of a match.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], include_stop: bool, min_tokens: int = 0) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0  # characters of the decoded text consumed so far
        self._held = ""  # consumed, but not released yet

    def push(self, token_id: int) -> str:
        """Take one token. Returns the text that is now final. Do not call it once `stopped` is set."""
        self._ids.append(token_id)
        piece = self._step(token_id)
        self._decoded += len(piece)
        return self._take(piece, final=False) if piece else ""

    def finish(self) -> str:
        """Returns the remaining text: what was held back, and an incomplete character as U+FFFD. Empty after a stop.

        Sets `stopped` if U+FFFD completes a match.
        """
        if self.stopped is not None:
            return ""
        rest = self._tokenizer.decode(self._ids)[self._decoded :]
        self._decoded += len(rest)
        return self._take(rest, final=True)

    def _step(self, token_id: int) -> str:
        """Returns what the last token adds to the text: nothing while a character is incomplete."""
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer.inner, token_id) or ""
            except Exception:  # the library raises nothing more specific
                # Tokenizers with byte fallback decode a run of bytes as a whole: an invalid byte also invalidates
                # valid ones before it that were already released. Keep those, and continue at the new length.
                self._stream = None
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else text[self._decoded :]

    def _take(self, piece: str, final: bool) -> str:
        text = self._held + piece
        if not self._stop or len(self._ids) <= self._min_tokens:
            return text
        matches = ((at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0)
        end, start, stop = min(matches, default=(0, 0, ""))
        if stop:
            self.stopped, self._held = stop, ""
            return text[: end if self._include_stop else start]
        # The start of the earliest match that more text might complete.
        open_at = len(text) if final else min(_open_match(text, s) for s in self._stop)
        self._held = text[open_at:]
        return text[:open_at]


def _open_match(text: str, stop: str) -> int:
    """Returns where the longest suffix of ``text`` that is a proper prefix of ``stop`` starts; its length if none."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return at
        at += 1
    return len(text)
