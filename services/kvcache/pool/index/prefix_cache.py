"""The prefix cache's index: which page holds the K and V of which prefix.

A published page is one link of a chain: its tokens, following a parent chain that starts at a root, one root per salt.
The index identifies a chain by a 64-bit hash and finds a page by its parent's hash and its tokens: a lookup compares
both, at the root also the salt, and computes no hash.

This is exact even under hash collisions: a hash identifies at most one chain at a time (a second chain with the same
hash is not published), and **no page is indexed unless its parent is**. So a page whose parent hash equals the hash of
the page just found continues exactly that chain, and not another that collides with it.

Several pages may hold the same link, if sequences computed the same prefix concurrently. One of them, the primary, is
indexed; the others are stand-bys for as long as they are held. Eviction preserves the parent rule because

- the holder of a page also holds a page of every ancestor link, the primary or a stand-by, and
- among cached pages, a child is evicted before its parent (see ``lru`` and ``density``).

A *condemned* page is on its way out with its continuation (see ``purge``): no lookup finds it, and nothing is published
behind it or beside it.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from services.kvcache.pool.host_memory import BLOCK, SALT, HostMemory, text_bytes
from services.kvcache.pool.index.chain_hash import ChainHash, blake2b_chain, root_hash
from services.kvcache.pool.index.events import EventKind, Link
from services.kvcache.pool.index.frozen_links import FrozenLinks
from services.kvcache.pool.index.key_table import KeyTable

_HASH = 8  # bytes of a hash
_SCAN = 1 << 16  # pages that are looked at in one go
_LINKS = 128  # links that are hashed in one go


class PrefixCache:
    """Links of ``total`` pages; tokens are passed as the bytes of one page, 4 bytes a token.

    ``on_change`` is called for every link that lookups start or stop finding.
    """

    def __init__(
        self,
        total: int,
        chain_hash: ChainHash = blake2b_chain,
        on_change: Callable[[EventKind, Link], None] = lambda kind, link: None,
        memory: HostMemory | None = None,
    ) -> None:
        """``memory`` is charged for the salts; the caller has checked."""
        self._memory = HostMemory() if memory is None else memory
        self._chain_hash = chain_hash
        self._on_change = on_change
        # Keyed by a link's name: the parent's hash, 8 bytes, then the tokens. The object is shared with ``_names``.
        self._primary: dict[bytes, int] = {}
        self._is_primary = bytearray(total)  # of each page, whether it is in there
        self._names: list[bytes | None] = [None] * total
        self._standby: dict[int, list[int]] = {}
        self._keys = array("Q", bytes(8 * total))
        self._parents = array("Q", bytes(8 * total))
        self._of_key = KeyTable(self._keys)  # the primaries
        # Only first links have an entry; further along a chain, the parent's hash implies the salt.
        self._salts: dict[int, str] = {}
        self._charged = array("q", bytes(8 * (total // BLOCK + 1)))  # for the salts of each block of pages
        self._condemned = bytearray(total)
        self.condemned_count = 0
        #: Pages published while there are condemned ones, for the walk that looks for their continuations.
        self.arrivals: list[int] = []

    def __len__(self) -> int:
        """The number of links indexed."""
        return len(self._primary)

    def key(self, page: int) -> int:
        """The hash of a published page's link."""
        return self._keys[page]

    def parent(self, page: int) -> int | None:
        """The primary page of a published page's parent link; None for a first link."""
        return None if page in self._salts else self._of_key[self._parents[page]]

    def salt(self, page: int) -> str | None:
        """The salt of a page that is a first link; None for others."""
        return self._salts.get(page)

    def tokens(self, page: int) -> bytes | None:
        """The tokens of a published page; None for others."""
        name = self._names[page]
        return None if name is None else name[_HASH:]

    def content(self, key: int) -> tuple[bytes, str | None] | None:
        """The tokens of the indexed link with this hash, and its salt if it is a first link; None if there is none."""
        page = self._of_key.get(key)
        name = None if page is None else self._names[page]
        return None if page is None or name is None else (name[_HASH:], self._salts.get(page))

    def is_primary(self, page: int) -> bool:
        """Whether lookups find this page."""
        return self._is_primary[page] == 1

    def primary_of(self, page: int) -> int:
        """The page that lookups find for the link of a published page."""
        return self._of_key[self._keys[page]]

    def match(self, salt: str, chunks: Iterable[bytes], behind: int | None = None) -> list[int]:
        """The indexed pages of the longest prefix of ``chunks``, one page of tokens each; of what follows the published
        page ``behind``, if there is one.
        """
        pages: list[int] = []
        find, keys, salt_of = self._primary.get, self._keys, self._salts.get
        parent, root = (root_hash(salt), True) if behind is None else (keys[behind], False)
        for tokens in chunks:
            page = find(parent.to_bytes(_HASH, "little") + tokens)
            if page is None or salt_of(page) != (salt if root else None):
                break
            pages.append(page)
            parent, root = keys[page], False
        if self.condemned_count:
            return list(takewhile(lambda page: not self._condemned[page], pages))
        return pages

    def match_each(self, salt: str, chunks: Iterable[bytes]) -> Iterator[int]:
        """As `match`, page by page. Between two of them the index may change."""
        find, keys, salt_of = self._primary.get, self._keys, self._salts.get
        parent, root = root_hash(salt), True
        for tokens in chunks:
            page = find(parent.to_bytes(_HASH, "little") + tokens)
            if page is None or salt_of(page) != (salt if root else None) or self._condemned[page]:
                break
            parent, root = keys[page], False
            yield page

    def chain(self, salt: str, chunks: Iterable[bytes]) -> Iterator[int]:
        """The hash of each link of a chain, cached or not."""
        parent = root_hash(salt)
        for tokens in chunks:
            parent = self._chain_hash(parent, tokens)
            yield parent

    def charged(self) -> int:
        """What is charged for its salts."""
        return sum(self._charged)

    def dismantled(self, most: int) -> list[Link]:
        """Take some of the links out, of an index that is used no more. Of a million at once the loop would not be back
        soon.
        """
        links: list[Link] = []
        while self._primary and len(links) < most:
            _, page = self._primary.popitem()
            links.append(self.link(page))
            self._is_primary[page] = 0
            self._names[page] = None
            self._salts.pop(page, None)
        return links

    def salts(self) -> set[str]:
        """The salts with published pages."""
        return set(self._salts.values())

    def continuations(self, parent: int) -> Iterator[bytes | None]:
        """Tokens of the pages published as children of a link or of a salt's root. Scans the whole pool, and yields
        None now and then meanwhile.
        """
        total = len(self._parents)
        for begin in range(0, total, _SCAN):
            at, end = begin, min(begin + _SCAN, total)
            with contextlib.suppress(ValueError):
                while at < end:
                    at = self._parents.index(parent, at, end)
                    tokens = self.tokens(at)
                    if tokens is not None:
                        yield tokens
                    at += 1
            yield None

    def publish(self, page: int, parent: int | None, tokens: bytes, salt: str) -> bool:
        """Publish ``page`` as the link of ``tokens`` after ``parent`` (None: the salt's root).

        ``parent`` must be published and held by the publisher. Returns False if the link's hash belongs to another
        chain, or the link or its parent is condemned: then neither this page nor any page after it may be published.
        """
        above = root_hash(salt) if parent is None else self._keys[parent]
        key, name = self._chain_hash(above, tokens), above.to_bytes(_HASH, "little") + tokens
        if self.condemned_count and self._leads_nowhere(parent, key):
            return False
        self._keys[page] = key
        present = self._of_key.add(page)
        if present != page and not self._same(present, name, salt if parent is None else None):
            return False
        self._parents[page], self._names[page] = above, name
        if parent is None:
            self._salts[page] = salt
            self._memory.used += SALT + text_bytes(salt)
            self._charged[page // BLOCK] += SALT + text_bytes(salt)
        if present == page:
            self._primary[name] = page
            self._is_primary[page] = 1
            self._on_change(EventKind.STORED, Link(key, above))
        else:
            self._standby.setdefault(key, []).append(page)
        if self.condemned_count:
            self.arrivals.append(page)
        return True

    def _leads_nowhere(self, parent: int | None, key: int) -> bool:
        present = self._of_key.get(key)
        near = [parent, None if parent is None else self.primary_of(parent), present]
        return any(self._condemned[page] for page in near if page is not None)

    def condemn(self, page: int) -> None:
        """Hide the link of a published page from lookups, and refuse continuations of it. Idempotent."""
        key = self._keys[page]
        for one in (self._of_key[key], *self._standby.get(key, ())):
            self.condemned_count += not self._condemned[one]
            self._condemned[one] = 1

    def is_condemned(self, page: int) -> bool:
        """Whether the page is condemned."""
        return bool(self._condemned[page])

    def withdraw(self, page: int, kind: EventKind = EventKind.EVICTED) -> int | None:
        """Remove a published page. The oldest stand-by replaces a primary and is returned; without one, the link is
        gone, with event ``kind``.
        """
        key, heir, name = self._keys[page], None, self._names[page]
        if name is None:
            raise ValueError(f"page {page} is not published")
        standby = self._standby.get(key)
        if not self._is_primary[page]:
            self._standby[key].remove(page)
        elif standby:
            self._primary[name] = heir = standby.pop(0)
            self._of_key.replace(heir)
            self._is_primary[page], self._is_primary[heir] = 0, 1
        else:
            del self._primary[name]
            self._is_primary[page] = 0
            self._of_key.remove(key)
            self._on_change(kind, Link(key, self._parents[page]))
        if standby is not None and not standby:
            del self._standby[key]
        self._names[page] = None
        salt = self._salts.pop(page, None)
        if salt is not None:
            self._memory.used -= SALT + text_bytes(salt)
            self._charged[page // BLOCK] -= SALT + text_bytes(salt)
        if self._condemned[page]:
            self._condemned[page] = 0
            self.condemned_count -= 1
        return heir

    def _same(self, page: int, name: bytes, salt: str | None) -> bool:
        return self._names[page] == name and self._salts.get(page) == salt

    def links(self) -> Iterator[Link]:
        """Every link that lookups find."""
        return (Link(self._keys[page], self._parents[page]) for page in self._primary.values())

    def published(self) -> Iterator[int]:
        """Every published page, primary or stand-by."""
        return (page for page, name in enumerate(self._names) if name is not None)

    def link(self, page: int) -> Link:
        """The link of a published page."""
        return Link(self._keys[page], self._parents[page])

    def is_published(self, page: int) -> bool:
        """Whether the page is published, as primary or stand-by."""
        return self._names[page] is not None

    def _check_link(self, page: int) -> Iterator[str]:
        name, parent, salt = self._names[page] or b"", self._parents[page], self._salts.get(page)
        if name[:_HASH] != parent.to_bytes(_HASH, "little"):
            yield f"page {page} has a link behind another than {parent:016x}, which is not its"
        if self._keys[page] != self._chain_hash(parent, name[_HASH:]):
            yield f"page {page} has the key {self._keys[page]:016x}, which is not the hash of its link"
        if salt is not None and parent != root_hash(salt):
            yield f"page {page} has a salt and is not behind its root"
        if salt is None and self._of_key.get(parent) is None:
            yield f"page {page} is published and its parent link is not"

    def frozen(self) -> FrozenLinks:
        """The links of now."""
        return FrozenLinks(self._of_key.frozen(), self._parents[:])

    def has_standby(self, page: int) -> bool:
        """Whether others stand by for the link of a published page."""
        return self._keys[page] in self._standby

    def walk(self) -> Iterator[str | None]:
        """Every violated invariant of the index; None now and then.

        It may change meanwhile. What is said of a page was seen in one look at it, and counts are of one moment.
        """
        condemned = self._condemned.count(1)
        if condemned != self.condemned_count:
            yield f"{condemned} pages are condemned, the index counts {self.condemned_count}"
        # As many as are marked, and each that is marked is found by its name and by its key: so no link is besides.
        primaries = self._is_primary.count(1)
        if len(self._primary) != primaries:
            yield f"{len(self._primary)} links are indexed, {primaries} pages are marked as such"
        yield None
        yield from self._of_key.walk(self.is_primary)
        for block, charged in enumerate(self._charged):
            pages = range(block * BLOCK, min((block + 1) * BLOCK, len(self._names)))
            costs = sum(SALT + text_bytes(self._salts[page]) for page in pages if page in self._salts)
            if costs != self._charged[block]:
                yield f"{charged} bytes are charged for the salts of pages {pages}, they cost {costs}"
            yield None
        stands_by = bytearray(len(self._names))
        for key in list(self._standby):
            yield from self._check_standbys(key, stands_by)
            yield None
        for page in range(len(self._names)):
            yield from self._check_page(page, stands_by)
            if page % _LINKS == 0:
                yield None

    def _check_standbys(self, key: int, stands_by: bytearray) -> Iterator[str]:
        pages, primary = self._standby.get(key), self._of_key.get(key)
        if pages is None:
            return
        if not pages or len(set(pages)) != len(pages) or primary is None:
            yield f"link {key:016x} has stand-bys {pages} and primary {primary}"
            return
        named, salt = self._names[primary], self._salts.get(primary)
        for page in pages:
            stands_by[page] = 1
            if named is None or not self._same(page, named, salt) or self._keys[page] != key or page == primary:
                yield f"page {page} stands by for link {key:016x}, which is not its"

    def _check_page(self, page: int, stands_by: bytearray) -> Iterator[str]:
        name = self._names[page]
        if name is None:
            if self._condemned[page]:
                yield f"page {page} is condemned and has no link"
            if page in self._salts:
                yield f"page {page} has a salt and no link"
            if self._is_primary[page]:
                yield f"page {page} is marked as indexed and has no link"
            return
        yield from self._check_link(page)
        key = self._keys[page]
        indexed = self._primary.get(name) == page
        if indexed != self._is_primary[page]:
            yield f"page {page} is {'' if indexed else 'not '}indexed and marked {self._is_primary[page]}"
        if indexed:
            if self._of_key.get(key) != page:
                yield f"page {page} is indexed and another, or none, by its key {key:016x}"
        elif not stands_by[page] and page not in self._standby.get(key, ()):
            yield f"page {page} carries a link, and is neither indexed by it nor stands by"
