"""SentencePiece's BPE as GGUF files have it: pieces, the scores by which they are merged, and tokens for single bytes.

A text is normalised and decoded as in Llama 2's tokenizer.json. A symbol that the model was trained with as a whole has
score 0 and changes nothing around it; llama.cpp's converter gives -1000 to a token that was added later, and a text
that follows one of those, or a control token, begins like any text: with a space.
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

#: What a vocabulary may have at most: a token of this many characters; all of them together; symbols found whole, and
#: beside these tokens that are never merged; and such a symbol's characters.
MOST_CHARACTERS, MOST_ALTOGETHER, MOST_SYMBOLS, MOST_IN_SYMBOL = 512, 1 << 22, 4096, 64
MOST_CUTS = 8  # of a text that spells a token which is not merged


def pieces(keys: Fields) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raises ``ModelInvalid`` naming a key that is missing, not served, or contradicts others."""
    if keys.values.get(_CHARSMAP):
        keys.refuse(_CHARSMAP, "characters are not rewritten; put the model's tokenizer.json beside the file")
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
    """The score of each token, a finite number."""
    keys = vocabulary.keys
    values = keys.values.get(_SCORES)
    if not isinstance(values, list) or len(values) != len(vocabulary.tokens):
        keys.refuse(_SCORES, f"it must be a list as long as that of tokens, {len(vocabulary.tokens)}")
    for number, score in enumerate(values):
        if not isinstance(score, float) or not math.isfinite(score):
            keys.refuse(_SCORES, f"that of token {number} is {str(score)[:20]}, it must be a finite number")
    return dict(zip(vocabulary.tokens, values, strict=True))


def _has_bytes(vocabulary: Vocabulary) -> bool:
    """Whether a character that is no piece becomes its bytes; there are tokens for all bytes then, or for none."""
    found = set(vocabulary.of_kind(BYTE))
    wanted = {f"<0x{byte:02X}>" for byte in range(256)}
    if strange := sorted(found - wanted):
        vocabulary.keys.refuse(TOKENS, f"{strange[0][:40]!r} is of the type of bytes, and names none")
    if found and (missing := sorted(wanted - found)):
        vocabulary.keys.refuse(TOKENS, f"of the bytes {len(missing)} are missing, first {missing[0]}")
    return bool(found)


def _unknown(vocabulary: Vocabulary) -> str:
    """The token for characters that are no piece, in a vocabulary without bytes."""
    keys = vocabulary.keys
    ids = keys.token_ids(_UNKNOWN_ID, len(vocabulary.tokens))
    found = [vocabulary.tokens[number] for number in ids] or vocabulary.of_kind(UNKNOWN)
    if len(found) != 1:
        keys.refuse(_UNKNOWN_ID, "there are no tokens for bytes, so there must be one for what is unknown")
    return found[0]


def _whole(vocabulary: Vocabulary, scores: dict[str, float]) -> tuple[list[str], list[str]]:
    """The user's tokens: symbols of the trained model, and those that were added to it, found in a text as typed."""
    symbols, added = list[str](), list[str]()
    for token in vocabulary.of_kind(USER_DEFINED):
        # In a normalised text no symbol is found that has a plain space.
        (symbols if scores[token] == 0.0 and token and " " not in token else added).append(token)
    if len(symbols) > MOST_SYMBOLS or max(map(len, symbols), default=0) > MOST_IN_SYMBOL:
        vocabulary.keys.refuse(
            KINDS,
            f"{len(symbols)} tokens of score 0 are user-defined; {MOST_SYMBOLS} at most are taken, "
            f"of {MOST_IN_SYMBOL} characters at most",
        )
    return symbols, added


def _mergeable(vocabulary: Vocabulary, scores: dict[str, float], symbols: list[str]) -> dict[str, float]:
    """The scores of what merging may make. A piece that a whole symbol is within cannot be: the text is cut there."""
    for number, token in enumerate(vocabulary.tokens):
        if len(token) > MOST_CHARACTERS:
            vocabulary.keys.refuse(
                TOKENS, f"token {number} has {len(token)} characters, {MOST_CHARACTERS} at most are taken"
            )
    if (total := sum(map(len, vocabulary.tokens))) > MOST_ALTOGETHER:
        vocabulary.keys.refuse(TOKENS, f"they have {total} characters altogether, {MOST_ALTOGETHER} at most are taken")
    whole, lengths = set(symbols), sorted(set(map(len, symbols)))

    def holds(piece: str) -> bool:
        return any(piece[at : at + length] in whole for length in lengths for at in range(len(piece) - length + 1))

    return {piece: scores[piece] for piece in vocabulary.of_kind(NORMAL, UNUSED) if not holds(piece)}


def _made(vocabulary: Vocabulary, mergeable: dict[str, float]) -> dict[str, Pair]:
    """The pair that each piece is merged from, the best first."""
    keys = vocabulary.keys
    try:
        made = pairings(mergeable)
    except ValueError as error:
        keys.refuse(_SCORES, f"{error}; put the model's tokenizer.json beside the file")
    for piece, pair in made.items():
        number = vocabulary.ids[piece]
        if vocabulary.kinds[number] == UNUSED:
            keys.refuse(KINDS, f"token {number}, {piece[:40]!r}, is merged though it is unused")
        for part in pair:
            if part not in mergeable:
                keys.refuse(TOKENS, f"{part[:40]!r} is missing, of which {piece[:40]!r} is merged")
    return made


def _normalizer(prefixed: bool, stripped: bool) -> normalizers.Normalizer:
    """Spaces as pieces have them; one before each text where ``prefixed``, no two in a row where ``stripped``."""
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
    """Cut a normalised text at its symbols, each of which then is looked up as it is, without merges.

    So is what lies between them, and when that spells a token that no merge leads to, such as ``</s>``, it would be
    found all the same. It is cut once more then, where nothing is merged.
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
            TOKENS, f"{len(joints)} are never merged, {MOST_SYMBOLS} at most are taken beside user-defined ones"
        )
    # What follows the first cut may be such a token again.
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
    """The two sides of the first place in ``token`` where nothing is merged."""
    left, has_bytes = "", BYTE in vocabulary.kinds
    for first, second in itertools.pairwise(parts):
        left += first
        # Without bytes, neighbours that are unknown are one token.
        if has_bytes or first in vocabulary.ids or second in vocabulary.ids:
            return left, token[len(left) :]
    _indistinct(vocabulary, token)


def _indistinct(vocabulary: Vocabulary, token: str) -> NoReturn:
    vocabulary.keys.refuse(TOKENS, f"{token[:40]!r} is never merged, and cannot be told from the same text")
