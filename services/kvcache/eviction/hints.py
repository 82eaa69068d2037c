"""What a caller knows of when a prompt comes back, and the classes that its pages are in because of it.

A hint is evidence, not an order: it only chooses the class by which a page's returns are counted, and a class is worth
what its pages were seen to do (see ``reuse``). So a hint that is wrong every time is soon worth nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from services.common.errors import FieldInvalid

MAX_CATEGORY = 64
MAX_TURN = 1_000_000
MAX_EXPECTED_S = 86400.0

#: Class 0 has the pages of which nothing was said; one identity may have half of the others.
CLASSES = 32
OWNER_CLASSES = (CLASSES - 1) // 2

#: Expected returns up to each of these, in seconds, are in a class of their own, and so are later ones.
EXPECTED_S = (4.0, 16.0, 64.0, 256.0)


class ReuseHint(NamedTuple):
    """See ReuseHint in the proto. A turn of 0 and an expected return of None are unknown."""

    category: str = ""
    turn: int = 0
    tool_call_pending: bool = False
    expected_s: float | None = None

    def check(self) -> None:
        """Raises FieldInvalid."""
        if len(self.category) > MAX_CATEGORY:
            _refuse("category", f"has {len(self.category)} characters; it may have {MAX_CATEGORY}", MAX_CATEGORY)
        if not 0 <= self.turn <= MAX_TURN:
            _refuse("turn", f"is {self.turn}; it may be {MAX_TURN} at most", MAX_TURN)
        if self.expected_s is not None and not 0 < self.expected_s <= MAX_EXPECTED_S:
            _refuse(
                "expected_return",
                f"is {self.expected_s:g} s; it must be above 0 s and at most {MAX_EXPECTED_S:g} s",
                int(MAX_EXPECTED_S),
            )


def _refuse(field: str, why: str, limit: int) -> None:
    field = f"prompt.reuse_hint.{field}"
    raise FieldInvalid(f"{field} {why}", field=field, limit=limit)


class Claim(NamedTuple):
    """A hint, and the identity that gave it."""

    owner: str
    hint: ReuseHint


class _Group(NamedTuple):
    owner: str
    category: str


class _Key(NamedTuple):
    group: _Group
    first_turn: bool
    tool_call_pending: bool
    expected: int


class HintClasses:
    """The class of each of ``total`` pages, and what the classes are. Every operation is O(1).

    A class without pages is remembered until its number is wanted for another. An identity that has all the classes
    that it may have gives up one of its own, so who invents categories forgets nobody else's.

    Of several identities, each has at most its equal share of the pages in classes other than 0.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._of = bytearray(total)
        self._keys: list[_Key | None] = [None] * CLASSES
        self._numbers: dict[_Key, int] = {}
        self._pages = array("q", bytes(8 * CLASSES))
        self._free = list(range(CLASSES - 1, 0, -1))
        self._empty: dict[int, None] = {}  # classes without pages, the one that has been so the longest first
        #: Pages in classes, by identity; only of those that have classes.
        self._owners: Counter[str] = Counter()
        #: Numbers that were given to another class since they were last collected.
        self.ended: list[int] = []

    @property
    def used(self) -> bool:
        """Whether any page is in a class other than 0."""
        return len(self._empty) < len(self._numbers)

    def of(self, page: int) -> int:
        """The class of a page."""
        return self._of[page]

    def put(self, page: int, claim: Claim | None) -> None:
        """A sequence has ended that used the page. A page that callers of several kinds use is in class 0."""
        key = None if claim is None else _key(claim)
        has = self._keys[self._of[page]]
        if key == has:
            return
        self.forget(page)
        if key is not None and (has is None or has.group == key.group) and self._has_room(key.group.owner):
            self._enter(page, key)

    def forget(self, page: int) -> None:
        """The page has lost its content, or its class."""
        number = self._of[page]
        key = self._keys[number]
        if key is None:
            return
        self._of[page] = 0
        self._pages[number] -= 1
        self._owners[key.group.owner] -= 1
        if not self._pages[number]:
            self._empty[number] = None

    def _has_room(self, owner: str) -> bool:
        others = sum(pages > 0 for one, pages in self._owners.items() if one != owner)
        return not others or self._owners[owner] < self._total // (others + 1)

    def _enter(self, page: int, key: _Key) -> None:
        number = self._numbers.get(key)
        if number is None:
            number = self._vacancy(key.group.owner)
            if number is None:
                return
            self._keys[number], self._numbers[key] = key, number
            self._owners[key.group.owner] += 0
        self._empty.pop(number, None)
        self._of[page] = number
        self._pages[number] += 1
        self._owners[key.group.owner] += 1

    def _vacancy(self, owner: str) -> int | None:
        """A number for another class of this identity: a free one, or that of an empty class, which ends."""
        mine = [number for key, number in self._numbers.items() if key.group.owner == owner]
        if self._free and len(mine) < OWNER_CLASSES:
            return self._free.pop()
        for number in self._empty:
            if len(mine) < OWNER_CLASSES or number in mine:
                break
        else:
            return None
        key = self._keys[number]
        if key is None:
            raise LookupError(f"class {number} is empty and none")
        del self._numbers[key], self._empty[number]
        if not any(other.group.owner == key.group.owner for other in self._numbers):
            del self._owners[key.group.owner]
        self.ended.append(number)
        return number

    def walk(self) -> Iterator[str | None]:
        """What is wrong with the counts, of one moment; None now and then."""
        of, pages, keys, empty = self._of[:], self._pages[:], self._keys[:], set(self._empty)
        numbers, free, counted = dict(self._numbers), self._free[:], dict(self._owners)
        owners: dict[str, int] = {}
        for number, key in enumerate(keys):
            yield None
            count = of.count(number) if number else 0
            if count != pages[number] or (number in empty) != (key is not None and not count):
                yield f"class {number} is {key}, counts {pages[number]} pages and has {count}"
            if key is not None:
                owners[key.group.owner] = owners.get(key.group.owner, 0) + count
        if owners != counted:
            yield f"identities have {owners} pages in classes, counted {counted}"
        if numbers != {key: number for number, key in enumerate(keys) if key is not None}:
            yield "the numbers of the classes are wrong"
        if sorted([0, *free, *numbers.values()]) != list(range(CLASSES)):
            yield "a number is neither free nor that of a class, or both"


def _key(claim: Claim) -> _Key:
    category, turn, pending, expected_s = claim.hint
    expected = 0 if expected_s is None else 1 + bisect_left(EXPECTED_S, expected_s)
    return _Key(_Group(claim.owner, category), turn == 1, pending, expected)
