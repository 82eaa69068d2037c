"""A sequence: one request's block table and tokens, as the daemon sees them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable
from operator import attrgetter

from services.kvcache.eviction.hints import Claim
from services.kvcache.eviction.retention import Retention


class Sequence:
    """A block table, the tokens resident in it, and its accesses.

    The first ``published`` pages carry links of the prefix cache; ``chain_broken`` means that no further page can
    (another chain's link has the same hash, see ``prefix_cache``). ``forked`` is set on both sides of a fork: only such
    sequences can share a page that is not full. ``copy`` is (index, source page): the engine fills the new page at that
    index from the source, which the sequence holds until it reports a token after the copied ones. ``retention``
    applies to the published pages when the sequence ends, and so does ``claim``, what its caller said of when they come
    back. Instances are the holders in the page table, compared by
    identity.
    """

    __slots__ = (
        "access_count",
        "cached_tokens",
        "chain_broken",
        "claim",
        "copy",
        "created_at",
        "forked",
        "id",
        "last_access",
        "origin_digest",
        "pages",
        "published",
        "retention",
        "salt",
        "session_id",
        "tokens",
    )

    def __init__(self, session_id: str, sequence_id: str, salt: str, origin_digest: bytes, now: float) -> None:
        self.session_id = session_id
        self.id = sequence_id
        self.salt = salt
        self.origin_digest = origin_digest
        self.pages: list[int] = []
        self.tokens: array[int] = array("I")
        self.published = 0
        self.cached_tokens = 0
        self.retention: Retention | None = None
        self.claim: Claim | None = None
        self.chain_broken = False
        self.forked = False
        self.copy: tuple[int, int] | None = None
        self.created_at = now
        self.last_access = now
        self.access_count = 0

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id} of {self.session_id}: {len(self.tokens)} tokens in {len(self.pages)} pages, "
            f"{self.published} published>"
        )

    @property
    def page_count(self) -> int:
        """Pages it holds: its block table, and the source of a copy that is still to be made."""
        return len(self.pages) if self.copy is None else len(self.pages) + 1


_COPY, _PAGES, _SALT = attrgetter("copy"), attrgetter("pages"), attrgetter("salt")


def entries_of(sequences: Collection[Sequence]) -> int:
    """The pages that all of these hold, each its own: very many of them in one look."""
    copies = len(sequences) - list(map(_COPY, sequences)).count(None)
    return sum(map(len, map(_PAGES, sequences))) + copies


def salts_of(sequences: Iterable[Sequence]) -> list[str]:
    """The salt of each."""
    return list(map(_SALT, sequences))


def digest_prompt(prompt: array[int], salt: str) -> bytes:
    """Distinguishes a replayed opening from a different one with the same id."""
    salted = salt.encode()
    return hashlib.blake2b(len(salted).to_bytes(4, "little") + salted + prompt.tobytes(), digest_size=16).digest()


def digest_fork(parent_id: str) -> bytes:
    """Distinguishes a replayed fork from a different sequence with the same id."""
    return hashlib.blake2b(parent_id.encode(), digest_size=16, person=b"rocmforge.fork").digest()
