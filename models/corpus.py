"""The training text: its tokenizer, and the randomised passages a model is trained on.

The text is small, so it is never shown twice in the same way. Every pass over it cuts new passages at blank lines,
joins them in a new order with `<|endoftext|>` between, and splits a share of the words in another way than the
tokenizer would (BPE dropout: Provilkov et al., 2020). All of it follows from one seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
"""The one special token: it starts a passage (bos) and ends it (eos). Its id is 0."""

MIN_TEXT_BYTES = 20_000
"""The smallest text that leaves something to train on and something to validate on."""

VARIANTS_PER_WORD = 16
"""How many random splits of each distinct word are drawn before training."""

IntArray = NDArray[np.int64]


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, with line ends as `\\n`.

    Raises ValueError, naming the flag, if it is missing, is not UTF-8 or is shorter than MIN_TEXT_BYTES.
    """
    if not path.is_file():
        raise ValueError(f"--text: no such file: {path}")
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {path} is not UTF-8 (byte {error.start})") from error
    size = len(text.encode())
    if size < MIN_TEXT_BYTES:
        raise ValueError(f"--text: {path} has {size} bytes; at least {MIN_TEXT_BYTES} are needed")
    return text


def split_text(text: str, share: float = 0.1) -> tuple[str, str]:
    """Split off the last `share` of the characters: (training text, validation text)."""
    cut = int(len(text) * (1 - share))
    return text[:cut], text[cut:]


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on `text`: every byte has a token, so nothing is ever unknown.

    No prefix space is added and no special token is inserted: a prompt is encoded as it is.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


class Splitter:
    """Splits single words into token ids, at will with some of the merges skipped."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = json.loads(tokenizer.to_str())["model"]
        self._ids: dict[str, int] = model["vocab"]
        self._ranks: dict[tuple[str, str], int] = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}

    def split(self, word: str, dropout: float, rng: random.Random) -> list[int]:
        """Token ids of one pre-tokenized word; each possible merge is skipped with probability `dropout`."""
        parts = list(word)
        while len(parts) > 1:
            best, best_rank = -1, len(self._ranks)
            for i in range(len(parts) - 1):
                rank = self._ranks.get((parts[i], parts[i + 1]))
                if rank is not None and rank < best_rank and (dropout == 0.0 or rng.random() >= dropout):
                    best, best_rank = i, rank
            if best < 0:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [self._ids[part] for part in parts]


class Corpus:
    """A text as words, each with its token ids, from which streams of passages are drawn.

    Word 0 is END_OF_TEXT. `_first[w]` is the row of word w's own split; its random splits follow it.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, bpe_dropout: float, seed: int) -> None:
        splitter, rng = Splitter(tokenizer), random.Random(seed)
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        index = {END_OF_TEXT: 0}
        self._words: IntArray = np.array([index.setdefault(piece, len(index)) for piece in pieces], dtype=np.int64)
        self.eos_id = int(tokenizer.get_vocab()[END_OF_TEXT])

        self._variants = VARIANTS_PER_WORD if bpe_dropout > 0 else 0
        splits: list[list[int]] = [[self.eos_id]] * (1 + self._variants)
        for word in list(index)[1:]:
            splits.append(splitter.split(word, 0.0, rng))
            splits.extend(splitter.split(word, bpe_dropout, rng) for _ in range(self._variants))
        self._lengths: IntArray = np.array([len(split) for split in splits], dtype=np.int64)
        self._starts: IntArray = np.cumsum(self._lengths) - self._lengths
        self._tokens: IntArray = np.concatenate([np.array(split, dtype=np.int64) for split in splits])
        self._first: IntArray = np.arange(len(index), dtype=np.int64) * (1 + self._variants)

        self._position: IntArray = np.concatenate([[0], np.cumsum(self._lengths[self._first[self._words]])])
        self._blank: IntArray = np.array(
            [i for i in range(1, len(pieces)) if pieces[i] == "Ċ" and pieces[i - 1].endswith("Ċ")], dtype=np.int64
        )

    @property
    def token_count(self) -> int:
        """Tokens in the text, split as the tokenizer does."""
        return int(self._position[-1])

    def stream(self, rng: np.random.Generator, shortest: int, longest: int, random_share: float) -> IntArray:
        """One pass over the text: token ids [n], passages in random order, END_OF_TEXT before, between and after.

        Passages have about `shortest` to `longest` tokens. Each word is split at random with probability
        `random_share`.
        """
        parts: list[IntArray] = [np.zeros(1, dtype=np.int64)]
        passages = self._passages(rng, shortest, longest)
        for i in rng.permutation(len(passages)):
            begin, end = passages[i]
            parts += [self._words[begin:end], parts[0]]
        words = np.concatenate(parts)
        rows = self._first[words]
        if self._variants and random_share > 0:
            chosen = rng.random(len(words)) < random_share
            rows = rows + np.where(chosen, rng.integers(1, 1 + self._variants, len(words)), 0)
        lengths = self._lengths[rows]
        ends = np.cumsum(lengths)
        inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        tokens: IntArray = self._tokens[np.repeat(self._starts[rows], lengths) + inside]
        return tokens

    def _passages(self, rng: np.random.Generator, shortest: int, longest: int) -> list[tuple[int, int]]:
        """Cut the words at blank lines, each in place of one newline: [(first word, past the last word)].

        A passage ends at the last blank line before its drawn length, or at the next one if that makes it too short;
        where none comes in time, between two words.
        """
        passages: list[tuple[int, int]] = []
        begin, total = 0, len(self._words)
        blanks: IntArray = np.append(self._blank, total)
        while begin < total:
            limit = self._position[begin] + rng.integers(shortest, longest + 1)
            end = min(total, int(np.searchsorted(self._position, limit)))
            next_blank = int(np.searchsorted(blanks, min(end, total - 1), side="right"))
            before = int(blanks[next_blank - 1]) if next_blank else -1
            after = int(blanks[min(next_blank, len(blanks) - 1)])
            if before > begin and self._position[before] - self._position[begin] >= shortest:
                cut, following = before, before + 1
            elif self._position[after] - self._position[begin] <= longest or end == total:
                cut, following = after, after + 1
            else:
                cut, following = end, end
            passages.append((begin, cut))
            begin = following
        return passages


def crops(
    stream: IntArray, rng: np.random.Generator, batch: int, context: int, eos_id: int, passage_share: float = 0.5
) -> Iterator[IntArray]:
    """Draw about one stream's worth of training rows: arrays [batch, context + 1] of token ids.

    A `passage_share` of the rows begins at a passage's END_OF_TEXT, the others at any token, so that the model
    continues a prompt with and without it.
    """
    marks = np.flatnonzero(stream == eos_id)
    last = len(stream) - context - 1
    for _ in range(max(1, len(stream) // (batch * context))):
        starts = rng.integers(0, last + 1, batch)
        snapped = marks[np.searchsorted(marks, starts, side="right") - 1]
        starts = np.where(rng.random(batch) < passage_share, snapped, starts)
        yield stream[starts[:, None] + np.arange(context + 1)]
