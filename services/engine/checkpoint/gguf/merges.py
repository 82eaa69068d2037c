"""What each piece of a SentencePiece vocabulary is merged from, and which merge goes first.

SentencePiece's BPE takes, of all neighbours whose joint text is a piece, those whose piece has the highest score, of
equals the leftmost (`SampleEncode` in bpe_model.cc). BPE by rules takes the pair that comes first in a list.

These are the same because a piece is only ever made in one way. While it is made nothing is joined across its ends, so
that the best neighbours of the whole text, when they lie within it, are the best neighbours of its own text alone: it
is merged as if nothing stood around it. Its last two parts are then its rule, and no other pair of the same text is
ever joined, nor one of a piece that merging its own text does not end at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush

Pair = tuple[str, str]


def merged(text: str, scores: Mapping[str, float]) -> tuple[list[str], Pair | None]:
    """Merge a text by the ``scores`` of pieces, until nothing can be, or all is one piece.

    Returns what it is then, and the two parts that were joined last, if any. Takes n log n steps for n characters.
    """
    length = len(text)
    # A symbol is named by where it begins: where it ends, 0 once it was joined to the one before; and that one.
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
    """Return the pair that makes each piece, the best first; pieces that nothing makes are left out.

    Raises ``ValueError`` for pieces of one score where it depends on the text which of them goes first: no list says
    that.
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
    best_part: dict[str, float] = {}  # the highest score of what a piece is a part of
    for piece, pair in made.items():
        for part in pair:
            best_part[part] = max(scores[piece], best_part.get(part, scores[piece]))
    ordered: dict[str, Pair] = {}
    for score in sorted(levels, reverse=True):
        for piece in _level(levels[score], made, best_part, score):
            ordered[piece] = made[piece]
    return ordered


def _level(pieces: list[str], made: Mapping[str, Pair], best_part: Mapping[str, float], score: float) -> list[str]:
    """The pieces of one score in an order that joins the leftmost first, whatever the text.

    Where a merge makes no other possible that is as good, all that counts is which of two goes first that want the same
    symbol: the one that has it as its right part. One that is as good does no harm if nothing else wants its parts.
    """
    if len(pieces) == 1:
        return pieces
    wanted: defaultdict[str, list[str]] = defaultdict(list)  # of each symbol, the pieces that it is a part of
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
            raise ValueError(f"{names} have the same score, {score:g}, and a piece of the first has no lower one")
    # By way of the symbol, so that there are as many edges as pieces; one that joins a symbol to itself is on that way.
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
