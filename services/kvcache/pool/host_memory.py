"""The daemon's own memory: what it spends on objects outside the arenas, and the budget that refuses more of them.

Each kind of object has a price, measured for CPython (``tests/kvcache/pool/test_host_memory.py`` compares) and rounded
up. Prices are charged before or as an object is made, and given back when it goes, so that the sum is a matter of a few
additions a transaction. What an object may grow to is part of its price from the start: a page's is that of a published
page, so no step is refused for publishing; that of an entry in a block table includes the tokens of its page.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sized
from itertools import filterfalse

from services.common.errors import HostMemoryExceeded, InvalidConfiguration

#: The daemon's flag for the budget, for messages.
FLAG = "--host-memory"

#: Bytes of a link in the ring of events, and of a session with what becomes of it once it is lost: both are limited in
#: number, and charged when the daemon starts.
EVENT, SESSION = 256, 1280

#: Bytes of a pool, and of each of its pages with all that is kept of it, its tokens apart.
POOL, PAGE = 6144, 384

#: Bytes of a token of a page: in the prefix cache's index, and in its sequence.
TOKEN = 4

#: Bytes of a sequence, and of an entry in its block table, its tokens apart.
SEQUENCE, ENTRY = 560, 48

#: Bytes that a page's second holder costs, and each further one.
SHARED, HOLDER = 288, 40

#: Bytes of a removed id that is remembered, and of a salt in the prefix cache, their texts apart.
REMOVED, SALT = 176, 96

#: Pages whose holders, and whose salts, are charged to one sum: what they cost is seen in one look.
BLOCK = 4096

#: A container with more bytes for each of its elements is mostly empty.
_SPARSE = 256


def text_bytes(text: str) -> int:
    """The price of a text: beyond ASCII a character may take four bytes, twice once it was encoded."""
    return 64 + (len(text) if text.isascii() else 8 * len(text))


def texts_bytes(texts: Collection[str]) -> int:
    """The price of many texts."""
    return 64 * len(texts) + sum(map(len, texts)) + 7 * sum(map(len, filterfalse(str.isascii, texts)))


def pool_bytes(pages: int, page_size: int) -> int:
    """The price of a pool."""
    return POOL + pages * (PAGE + TOKEN * page_size)


def entry_bytes(page_size: int) -> int:
    """The price of an entry in a block table, full of tokens."""
    return ENTRY + TOKEN * page_size


def sequence_bytes(sequence_id: str, salt: str) -> int:
    """The price of a sequence without its pages."""
    return SEQUENCE + text_bytes(sequence_id) + text_bytes(salt)


def expired_bytes(salt: str, entries: int) -> int:
    """The price of an expired sequence beside its remembered id: together not more than it was charged before."""
    return SEQUENCE - REMOVED + text_bytes(salt) + ENTRY * entries


def all_expired_bytes(salts: Collection[str], entries: int) -> int:
    """The price of many of them, by their salts and with so many entries in all."""
    return (SEQUENCE - REMOVED) * len(salts) + texts_bytes(salts) + ENTRY * entries


def ending_bytes(sequences: int, entries: int, page_size: int) -> int:
    """The price of sequences that have ended and hold pages still, and perhaps tokens. Their ids may be remembered."""
    return sequences * (SEQUENCE - REMOVED) + entry_bytes(page_size) * entries


def removed_bytes(sequence_id: str) -> int:
    """The price of a remembered id."""
    return REMOVED + text_bytes(sequence_id)


def is_sparse(container: Sized) -> bool:
    """Whether a set or dict has kept much more room than its elements need, which Python does when they go.

    A copy of it has not. Asked whenever elements go, that costs O(1) amortised for each.
    """
    return sys.getsizeof(container) > _SPARSE * (len(container) + 2)


class HostMemory:
    """What is charged, in bytes, against ``limit``. Every operation is O(1).

    ``used`` is public to the few places where a call would show; they call ``check`` before they add to it.
    """

    __slots__ = ("ceiling", "floor", "limit", "refused", "used")

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit
        #: The largest limit there was: what was charged stays charged when the limit is lowered.
        self.ceiling = limit
        self.used = 0
        #: The part of ``used`` that is charged for as long as the daemon runs.
        self.floor = 0
        self.refused = 0

    def reserve(self, events: int, sessions: int) -> None:
        """Charge what is limited in number, once. Raises InvalidConfiguration."""
        floor = events * EVENT + sessions * SESSION
        if floor > self.limit:
            raise InvalidConfiguration(
                f"{FLAG} is {self.limit} bytes; {events} events of --event-ring and {sessions} sessions of "
                f"--max-sessions alone need {floor}",
                field=FLAG,
            )
        self.floor = floor
        self.used += floor

    def reserve_more(self, price: int) -> None:
        """Charge something for as long as the daemon runs. Raises InvalidConfiguration."""
        if self.floor + price > self.limit:
            raise InvalidConfiguration(
                f"{FLAG} is {self.limit} bytes; {self.floor} are reserved, and the lower tiers need {price}", field=FLAG
            )
        self.floor += price
        self.used += price

    def check_limit(self, limit: int) -> None:
        """Whether there can be another limit. Raises InvalidConfiguration if less than is charged for good."""
        if self.floor > limit:
            raise InvalidConfiguration(
                f"{FLAG} is {limit} bytes; the events and sessions that this daemon was started for need {self.floor}",
                field=FLAG,
            )

    def set_limit(self, limit: int) -> None:
        """Go by another limit, which was checked. Below what is charged it refuses all, until enough is given back."""
        self.limit = limit
        self.ceiling = max(self.ceiling, limit)

    def pages_within(self, page_size: int) -> int:
        """How many pages a pool gets that asks for no number: half of the budget is left for its sequences."""
        return max(0, self.limit - self.floor - POOL) // 2 // (PAGE + TOKEN * page_size)

    def check(self, wanted: int, what: str, *, field: str = "", spare: int = 0) -> None:
        """Whether ``wanted`` bytes more can be charged, with ``spare`` of those charged given back. Raises
        HostMemoryExceeded, and charges nothing either way.
        """
        if self.used - spare + wanted > self.limit:
            self.refused += 1
            raise HostMemoryExceeded(
                f"{what} needs {wanted} bytes of the daemon's own memory, and {self.used - spare} of {self.limit} are "
                f"used; start the daemon with more {FLAG}",
                field=field,
                wanted_bytes=wanted,
                used_bytes=self.used - spare,
                limit=self.limit,
            )
