"""What identifies a page outside its pool: the SHA-256 of its chain.

The digest of a page is SHA-256 over its parent's digest (32 bytes) and its tokens (4 bytes each, little-endian). That
of a root covers everything else that decides what the bytes of a page mean and who may read them: the format's version,
the pool with its trust domain, the layout and the salt. With a key it is HMAC-SHA-256, so that nobody without the key
can tell which prompts a store has. A digest names its whole chain: pages with one digest have the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import astuple

from services.kvcache.pool.layout import Layout

DIGEST_BYTES = 32

_FORMAT = "rocmforge.page.1"


def root_digest(key: bytes, pool_id: str, layout: Layout, salt: str) -> bytes:
    """The parent of first pages. ``pool_id`` is without the GPU that the pool is on; an empty ``key`` is none."""
    fields = [_FORMAT, pool_id, type(layout).__name__, *map(str, astuple(layout)), salt]
    # Each with its length: no two lists of fields have one encoding.
    texts = [field.encode(errors="surrogatepass") for field in fields]
    body = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return hmac.digest(key, body, "sha256") if key else hashlib.sha256(body).digest()


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of the page with these tokens behind its parent."""
    return hashlib.sha256(parent + tokens).digest()


class PageDigests:
    """The digest of each page of a pool, kept from its publication on."""

    def __init__(self, total: int) -> None:
        self._bytes = bytearray(DIGEST_BYTES * total)

    def __getitem__(self, page: int) -> bytes:
        return bytes(self._bytes[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES])

    def __setitem__(self, page: int, digest: bytes) -> None:
        self._bytes[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES] = digest
