"""Builds SentencePiece BPE tokenizers from GGUF metadata: pieces, their merge scores, and tokens for single bytes.

Text is normalized and decoded as in Llama 2's tokenizer.json. A user-defined symbol of the trained model has score 0
and does not affect the text around it. llama.cpp's converter gives tokens that were added later the score -1000; text
after one of those, or after a control token, starts like any text: with a space.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import NoReturn

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.merges import Pair, merged, pairings
from services.engine.checkpoint.gguf.vocabulary import (
    BYTE,
    CONTROL,
    KINDS,
    NORMAL,
    TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)

_SCORES, _CHARSMAP = "tokenizer.ggml.scores", "tokenizer.ggml.precompiled_charsmap"
_PREFIX, _STRIPPED = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"
_UNKNOWN_ID = "tokenizer.ggml.unknown_token_id"
_SPACE = "▁"

#: Limits on a vocabulary: characters of a token; characters of all tokens; user-defined symbols, and also other tokens
#: that are never merged; characters of a user-defined symbol.
MOST_CHARACTERS, MOST_ALTOGETHER, MOST_SYMBOLS, MOST_IN_SYMBOL = 512, 1 << 22, 4096, 64
MOST_CUTS = 8  # splits of text that spells a token which is never merged


def pieces(keys: Fields) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` naming a key that is missing, unsupported, or inconsistent."""
    if keys.values.get(_CHARSMAP):
        keys.refuse(_CHARSMAP, "character maps are not supported; put the model's tokenizer.json next to the file")
    vocabulary = Vocabulary.of(keys, kinds_required=True)
    scores = _scores(vocabulary)
    has_bytes = _has_bytes(vocabulary)
    symbols, added = _whole(vocabulary, scores)
    mergeable = _mergeable(vocabulary, scores, symbols)
    made = _made(vocabulary, mergeable)

    built = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            list(made.values()),
            unk_token=None if has_bytes else _unknown(vocabulary),
            fuse_unk=True,
            byte_fallback=has_bytes,
            ignore_merges=bool(symbols),
        )
    )
    prefixed, stripped = keys.boolean(_PREFIX, default=True), keys.boolean(_STRIPPED, default=False)
    built.normalizer = _normalizer(prefixed, stripped)
    if symbols:
        built.pre_tokenizer = _cuts(vocabulary, mergeable, made, symbols)
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed or stripped:
        decoder.append(decoders.Strip(" ", 1, 0))
    built.decoder = decoders.Sequence(decoder)
    vocabulary.add_to(built, vocabulary.of_kind(CONTROL, UNKNOWN), added)
    vocabulary.frame(built, bos=True)
    return built


def _scores(vocabulary: Vocabulary) -> dict[str, float]:
    """Returns the score of each token, a finite number."""
    keys = vocabulary.keys
    values = keys.values.get(_SCORES)
    if not isinstance(values, list) or len(values) != len(vocabulary.tokens):
        keys.refuse(_SCORES, f"it must be a list with one entry per token, {len(vocabulary.tokens)}")
    for number, score in enumerate(values):
        if not isinstance(score, float) or not math.isfinite(score):
            keys.refuse(_SCORES, f"entry {number} is {str(score)[:20]}; it must be a finite number")
    return dict(zip(vocabulary.tokens, values, strict=True))


def _has_bytes(vocabulary: Vocabulary) -> bool:
    """Whether there is byte fallback for characters without a piece. It needs tokens for all bytes, or for none."""
    found = set(vocabulary.of_kind(BYTE))
    wanted = {f"<0x{byte:02X}>" for byte in range(256)}
    if strange := sorted(found - wanted):
        vocabulary.keys.refuse(TOKENS, f"{strange[0][:40]!r} is a byte token but does not name a byte")
    if found and (missing := sorted(wanted - found)):
        vocabulary.keys.refuse(TOKENS, f"{len(missing)} byte tokens are missing, the first is {missing[0]}")
    return bool(found)


def _unknown(vocabulary: Vocabulary) -> str:
    """Returns the token for characters without a piece, in a vocabulary without byte tokens."""
    keys = vocabulary.keys
    ids = keys.token_ids(_UNKNOWN_ID, len(vocabulary.tokens))
    found = [vocabulary.tokens[number] for number in ids] or vocabulary.of_kind(UNKNOWN)
    if len(found) != 1:
        keys.refuse(_UNKNOWN_ID, "without byte tokens there must be one unknown token")
    return found[0]


def _whole(vocabulary: Vocabulary, scores: dict[str, float]) -> tuple[list[str], list[str]]:
    """Returns the user-defined tokens: symbols of the trained model, and tokens added later, matched in raw text."""
    symbols, added = list[str](), list[str]()
    for token in vocabulary.of_kind(USER_DEFINED):
        # A symbol with a plain space never matches normalized text.
        (symbols if scores[token] == 0.0 and token and " " not in token else added).append(token)
    if len(symbols) > MOST_SYMBOLS or max(map(len, symbols), default=0) > MOST_IN_SYMBOL:
        vocabulary.keys.refuse(
            KINDS,
            f"{len(symbols)} user-defined tokens have score 0; at most {MOST_SYMBOLS} are supported, "
            f"of at most {MOST_IN_SYMBOL} characters",
        )
    return symbols, added


def _mergeable(vocabulary: Vocabulary, scores: dict[str, float], symbols: list[str]) -> dict[str, float]:
    """Returns the scores of pieces that merging can build: all but those that contain a symbol, where text is split."""
    for number, token in enumerate(vocabulary.tokens):
        if len(token) > MOST_CHARACTERS:
            vocabulary.keys.refuse(
                TOKENS, f"token {number} has {len(token)} characters; at most {MOST_CHARACTERS} are supported"
            )
    if (total := sum(map(len, vocabulary.tokens))) > MOST_ALTOGETHER:
        vocabulary.keys.refuse(TOKENS, f"they have {total} characters; at most {MOST_ALTOGETHER} are supported")
    whole, lengths = set(symbols), sorted(set(map(len, symbols)))

    def holds(piece: str) -> bool:
        return any(piece[at : at + length] in whole for length in lengths for at in range(len(piece) - length + 1))

    return {piece: scores[piece] for piece in vocabulary.of_kind(NORMAL, UNUSED) if not holds(piece)}


def _made(vocabulary: Vocabulary, mergeable: dict[str, float]) -> dict[str, Pair]:
    """Returns the pair that each piece is merged from, in merge order."""
    keys = vocabulary.keys
    try:
        made = pairings(mergeable)
    except ValueError as error:
        keys.refuse(_SCORES, f"{error}; put the model's tokenizer.json next to the file")
    for piece, pair in made.items():
        number = vocabulary.ids[piece]
        if vocabulary.kinds[number] == UNUSED:
            keys.refuse(KINDS, f"token {number}, {piece[:40]!r}, is unused but can be merged")
        for part in pair:
            if part not in mergeable:
                keys.refuse(TOKENS, f"{part[:40]!r}, a part of {piece[:40]!r}, is missing")
    return made


def _normalizer(prefixed: bool, stripped: bool) -> normalizers.Normalizer:
    """Replaces spaces by the piece marker. ``prefixed`` adds one before each text; ``stripped`` strips and collapses
    spaces.
    """
    steps: list[normalizers.Normalizer] = []
    if stripped:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefixed:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if stripped:
        steps.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _cuts(
    vocabulary: Vocabulary, mergeable: dict[str, float], made: Mapping[str, Pair], symbols: list[str]
) -> pre_tokenizers.PreTokenizer:
    """Split normalized text at symbols, each of which is then looked up whole, without merging.

    The text between symbols is looked up whole, too. If it spells a token that no merge builds, such as ``</s>``, the
    lookup would wrongly find that token. Such text is therefore split again at a point that no merge crosses.
    """
    firsts = "".join(sorted({re.escape(symbol[0]) for symbol in symbols}))
    longest_first = "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))
    cuts = [pre_tokenizers.Split(Regex(f"(?=[{firsts}])(?:{longest_first})"), "isolated")]
    joints = dict[str, Pair]()
    for token in vocabulary.ids.keys() - made.keys() - set(symbols):
        if len(token) > 1:
            joints[token] = _joint(vocabulary, token, merged(token, mergeable)[0])
    if len(joints) > MOST_SYMBOLS:
        vocabulary.keys.refuse(
            TOKENS, f"{len(joints)} are never merged; at most {MOST_SYMBOLS} are supported besides user-defined ones"
        )
    # The text after the first split may be such a token again.
    times = 0
    for token in joints:
        count = 0
        while token in joints:
            if joints[token][0] in joints or count == MOST_CUTS:
                _indistinct(vocabulary, token)
            token, count = joints[token][1], count + 1
        times = max(times, count)
    if joints:
        alternatives = "|".join(
            rf"{re.escape(left)}(?={re.escape(right)}\z)" for left, right in sorted(joints.values())
        )
        cuts += [pre_tokenizers.Split(Regex(rf"\A(?:{alternatives})"), "isolated")] * times
    return pre_tokenizers.Sequence(cuts)


def _joint(vocabulary: Vocabulary, token: str, parts: list[str]) -> Pair:
    """Splits ``token`` at the first point that no merge crosses."""
    left, has_bytes = "", BYTE in vocabulary.kinds
    for first, second in itertools.pairwise(parts):
        left += first
        # Without byte tokens, adjacent unknown characters form one token.
        if has_bytes or first in vocabulary.ids or second in vocabulary.ids:
            return left, token[len(left) :]
    _indistinct(vocabulary, token)


def _indistinct(vocabulary: Vocabulary, token: str) -> NoReturn:
    vocabulary.keys.refuse(TOKENS, f"{token[:40]!r} is never merged and cannot be distinguished from plain text")
