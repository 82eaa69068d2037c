"""Derives an ordered list of BPE merge rules from a SentencePiece vocabulary with scores.

SentencePiece's BPE repeatedly merges the adjacent pair whose joint text is the piece with the highest score, the
leftmost among equals (`SampleEncode` in bpe_model.cc). Rule-based BPE merges the pair that comes first in a list.

The two are equivalent because each piece is only ever built in one way. While a piece is being built, nothing is merged
across its ends, so the best pair of the whole text, when it lies within the piece, is also the best pair of the piece's
text alone: the piece is merged as if it stood by itself. The last two parts of that merge are its rule. No other pair
with the same text is ever merged, and neither is a pair for a piece whose own text does not merge into it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush

Pair = tuple[str, str]


def merged(text: str, scores: Mapping[str, float]) -> tuple[list[str], Pair | None]:
    """Merge a text by the ``scores`` of pieces until no merge applies.

    Returns the remaining symbols, and the two parts that were merged last, if any. O(n log n) for n characters.
    """
    length = len(text)
    # Symbols are identified by their start. end: where a symbol ends, 0 once merged into the previous one; before: the
    # start of the previous symbol.
    end = list(range(1, length + 1))
    before = list(range(-1, length - 1))
    agenda = [
        (-score, at, at + 1, at + 2) for at in range(length - 1) if (score := scores.get(text[at : at + 2])) is not None
    ]
    heapify(agenda)
    last = None
    while agenda:
        _, left, middle, right = heappop(agenda)
        if end[left] != middle or end[middle] != right:
            continue
        end[left], end[middle] = right, 0
        last = left, middle, right
        if right < length:
            before[right] = left
            if (score := scores.get(text[left : end[right]])) is not None:
                heappush(agenda, (-score, left, right, end[right]))
        if left > 0:
            begin = before[left]
            if (score := scores.get(text[begin:right])) is not None:
                heappush(agenda, (-score, begin, left, right))
    symbols = []
    at = 0
    while at < length:
        symbols.append(text[at : end[at]])
        at = end[at]
    return symbols, last and (text[last[0] : last[1]], text[last[1] : last[2]])


def pairings(scores: Mapping[str, float]) -> dict[str, Pair]:
    """Returns the pair that each piece is merged from, in merge order; pieces that no merge builds are left out.

    Raises ``ValueError`` for pieces of one score whose merge order depends on the text, which no list can express.
    """
    made: dict[str, Pair] = {}
    for piece in scores:
        if len(piece) > 1:
            symbols, last = merged(piece, scores)
            if len(symbols) == 1 and last is not None:
                made[piece] = last
    levels: defaultdict[float, list[str]] = defaultdict(list)
    for piece in made:
        levels[scores[piece]].append(piece)
    best_part: dict[str, float] = {}  # piece -> the highest score of the pieces built from it
    for piece, pair in made.items():
        for part in pair:
            best_part[part] = max(scores[piece], best_part.get(part, scores[piece]))
    ordered: dict[str, Pair] = {}
    for score in sorted(levels, reverse=True):
        for piece in _level(levels[score], made, best_part, score):
            ordered[piece] = made[piece]
    return ordered


def _level(pieces: list[str], made: Mapping[str, Pair], best_part: Mapping[str, float], score: float) -> list[str]:
    """Orders the pieces of one score such that, in any text, the leftmost pair is merged first.

    If a merge enables no other merge of the same or a higher score, only conflicts over a shared symbol matter: the
    piece that has the symbol as its right part goes first. An enabled merge of the same score is harmless if no other
    piece uses its parts.
    """
    if len(pieces) == 1:
        return pieces
    wanted: defaultdict[str, list[str]] = defaultdict(list)  # symbol -> the pieces that it is a part of
    for piece in pieces:
        for part in made[piece]:
            wanted[part].append(piece)
    for piece in pieces:
        if best_part.get(piece, score - 1) < score:
            continue
        follow = wanted[piece][0] if wanted[piece] else ""
        if best_part[piece] > score or any(len(wanted[part]) > 1 for part in made[follow]):
            other = next(other for other in pieces if other != piece)
            names = f"{piece[:40]!r} and {other[:40]!r}"
            raise ValueError(
                f"{names} have the same score, {score:g}, and a piece built from the first has no lower one"
            )
    # Edges go through a node for each symbol, to keep their number linear. A piece that doubles a symbol is that node.
    sorter: TopologicalSorter[tuple[str, ...]] = TopologicalSorter()
    doubled = {made[piece][0]: (piece,) for piece in pieces if made[piece][0] == made[piece][1]}
    for piece in pieces:
        left, right = made[piece]
        if left == right:
            sorter.add((piece,))
        else:
            sorter.add((piece,), doubled.get(left, (left, "")))
            sorter.add(doubled.get(right, (right, "")), (piece,))
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        first, second, *_ = (node[0] for node in error.args[1] if len(node) == 1)
        raise ValueError(
            f"{first[:40]!r} and {second[:40]!r} have the same score, {score:g}, and which is merged first depends on "
            "the text"
        ) from None
    return [node[0] for node in order if len(node) == 1]
