"""The prefix cache's index: which page holds the K and V of which prefix.

A published page is one link of a chain: its tokens, behind a parent chain that starts at a root, one root a salt. The
index names a chain by a 64-bit hash, and finds a page by the hash of the chain before it, or at the root the salt, and
its tokens: a lookup compares all tokens and computes no hash.

Why that is exact, collisions included: one hash names at most one chain at a time (a second chain with the same hash
is refused publication), and **no page is indexed unless its parent is**. So a page whose parent hash equals the hash
of the page just found continues exactly the chain that was found, not another one that collides with it.

Several pages may hold the same link, when sequences computed the same prefix at the same time. One of them, the
primary, is indexed; the others stand by while their holders live. The parent rule holds through eviction because

- whoever holds a page holds a page of every ancestor link, the primary or a stand-by, and
- among cached pages the child is evicted before the parent (see ``lru`` and ``density``).
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator

from services.kvcache.events import EventKind, Link

#: Maps (parent's hash, the page's tokens as little-endian uint32 bytes) to the link's hash. A parameter so that tests
#: can make everything collide.
ChainHash = Callable[[int, bytes], int]


def blake2b_chain(parent: int, tokens: bytes) -> int:
    """64 bits of BLAKE2b (RFC 7693) over the parent's hash and the tokens."""
    return int.from_bytes(hashlib.blake2b(parent.to_bytes(8, "little") + tokens, digest_size=8).digest(), "little")


def root_hash(salt: str) -> int:
    """The hash that a salt's chains start from."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8, person=b"rocmforge.root").digest(), "little")


class PrefixIndex:
    """Links of ``total`` pages; tokens come and go as bytes of one page, 4 bytes a token.

    ``on_change`` hears of every link that lookups begin or cease to find.
    """

    def __init__(
        self,
        total: int,
        chain_hash: ChainHash = blake2b_chain,
        on_change: Callable[[EventKind, Link], None] = lambda kind, link: None,
    ) -> None:
        self._chain_hash = chain_hash
        self._on_change = on_change
        self._primary: dict[int, int] = {}
        # The same pages, by what they continue (a chain by its hash, the root by its salt) and their tokens.
        self._continuing: dict[tuple[int | str, bytes], int] = {}
        self._standby: dict[int, list[int]] = {}
        self._keys = array("Q", bytes(8 * total))
        self._parents = array("Q", bytes(8 * total))
        self._tokens: list[bytes | None] = [None] * total
        # Only first links have one: behind them, the parent's hash stands for it.
        self._salts: dict[int, str] = {}

    def __len__(self) -> int:
        """Links indexed."""
        return len(self._primary)

    def key(self, page: int) -> int:
        """The hash of a published page's link."""
        return self._keys[page]

    def parent(self, page: int) -> int | None:
        """The page that lookups find for the link before a published page's own; None for a first link."""
        return None if page in self._salts else self._primary[self._parents[page]]

    def tokens(self, page: int) -> bytes | None:
        """The tokens of a published page; None for others."""
        return self._tokens[page]

    def is_primary(self, page: int) -> bool:
        """Whether lookups find this page."""
        return self._tokens[page] is not None and self._primary.get(self._keys[page]) == page

    def primary_of(self, page: int) -> int:
        """The page that lookups find for the link of a published page."""
        return self._primary[self._keys[page]]

    def match(self, salt: str, chunks: Iterable[bytes]) -> list[int]:
        """The indexed pages of the longest prefix of ``chunks``, one page of tokens each."""
        pages: list[int] = []
        find, keys = self._continuing.get, self._keys
        before: int | str = salt
        for tokens in chunks:
            page = find((before, tokens))
            if page is None:
                break
            pages.append(page)
            before = keys[page]
        return pages

    def chain(self, salt: str, chunks: Iterable[bytes]) -> Iterator[int]:
        """The hash of each link of a chain, cached or not."""
        parent = root_hash(salt)
        for tokens in chunks:
            parent = self._chain_hash(parent, tokens)
            yield parent

    def salts(self) -> set[str]:
        """Salts under which something is published."""
        return set(self._salts.values())

    def continuations(self, parent: int) -> Iterator[bytes]:
        """Tokens of the pages published behind a link, or behind a salt's root. Walks the whole pool."""
        at = 0
        with contextlib.suppress(ValueError):
            while True:
                at = self._parents.index(parent, at)
                tokens = self._tokens[at]
                if tokens is not None:
                    yield tokens
                at += 1

    def publish(self, page: int, parent: int | None, tokens: bytes, salt: str) -> bool:
        """Make ``page`` the link of ``tokens`` behind ``parent`` (None: the salt's root).

        ``parent`` is published and held by the publisher. Returns false when the link's hash belongs to another
        chain: the page stays unpublished, and so must everything behind it.
        """
        above = root_hash(salt) if parent is None else self._keys[parent]
        key = self._chain_hash(above, tokens)
        present = self._primary.get(key)
        if present is None:
            self._primary[key] = self._continuing[salt if parent is None else above, tokens] = page
            self._on_change(EventKind.STORED, Link(key, above))
        elif self._same(present, above, tokens, salt if parent is None else None):
            self._standby.setdefault(key, []).append(page)
        else:
            return False
        self._keys[page], self._parents[page], self._tokens[page] = key, above, tokens
        if parent is None:
            self._salts[page] = salt
        return True

    def withdraw(self, page: int, kind: EventKind = EventKind.EVICTED) -> int | None:
        """Forget a published page. The oldest stand-by takes a primary's place and is returned, else the link is gone
        as ``kind``.
        """
        key, heir = self._keys[page], None
        standby, link = self._standby.get(key, []), self._link(page)
        if self._primary[key] != page:
            standby.remove(page)
        elif standby:
            self._primary[key] = self._continuing[link] = heir = standby.pop(0)
        else:
            del self._primary[key], self._continuing[link]
            self._on_change(kind, Link(key, self._parents[page]))
        if not standby:
            self._standby.pop(key, None)
        self._tokens[page] = None
        self._salts.pop(page, None)
        return heir

    def _same(self, page: int, parent: int, tokens: bytes, salt: str | None) -> bool:
        return self._parents[page] == parent and self._tokens[page] == tokens and self._salts.get(page) == salt

    def _link(self, page: int) -> tuple[int | str, bytes]:
        tokens, salt = self._tokens[page], self._salts.get(page)
        if tokens is None:
            raise ValueError(f"page {page} is not published")
        return self._parents[page] if salt is None else salt, tokens

    def links(self) -> Iterator[Link]:
        """Every link that lookups find."""
        return (Link(key, self._parents[page]) for key, page in self._primary.items())

    def published(self) -> Iterator[int]:
        """Every published page, primary or stand-by."""
        return (page for page, tokens in enumerate(self._tokens) if tokens is not None)

    def check(self) -> Iterator[str]:
        """Violations of the index's own invariants."""
        for key, page in self._primary.items():
            if self._tokens[page] is None or self._keys[page] != key:
                yield f"link {key:016x} names page {page}, which is not its"
            if page not in self._salts and self._parents[page] not in self._primary:
                yield f"page {page} is indexed and its parent link is not"
            if self._tokens[page] is not None and self._continuing.get(self._link(page)) != page:
                yield f"page {page} is indexed and no lookup comes to it"
        if len(self._continuing) != len(self._primary):
            yield f"{len(self._primary)} links are indexed, lookups know {len(self._continuing)}"
        for key, pages in self._standby.items():
            if not pages or len(set(pages)) != len(pages) or key not in self._primary:
                yield f"link {key:016x} has stand-bys {pages} and primary {self._primary.get(key)}"
            for page in pages:
                if self._tokens[page] is None or self._keys[page] != key or page == self._primary.get(key):
                    yield f"page {page} stands by for link {key:016x}, which is not its"
        count = sum(1 for _ in self.published())
        indexed = len(self._primary) + sum(map(len, self._standby.values()))
        if count != indexed:
            yield f"{count} pages carry links, the index knows {indexed}"
