"""Hashes of links: 64 bits of a chain, by its parent's hash and its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

#: Maps (parent's hash, the page's tokens as little-endian uint32 bytes) to the link's hash. A parameter, so that tests
#: can force collisions.
ChainHash = Callable[[int, bytes], int]


def blake2b_chain(parent: int, tokens: bytes) -> int:
    """64 bits of BLAKE2b (RFC 7693) over the parent's hash and the tokens."""
    return int.from_bytes(hashlib.blake2b(parent.to_bytes(8, "little") + tokens, digest_size=8).digest(), "little")


def root_hash(salt: str) -> int:
    """The root hash of a salt's chains."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8, person=b"rocmforge.root").digest(), "little")
