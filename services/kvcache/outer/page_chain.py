"""What identifies a page outside its pool."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

DIGEST_BYTES: Final = 32
MOST_TOKENS: Final = 65536

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
#: Token ids as 4 bytes each, little-endian.
Tokens = Annotated[bytes, Meta(min_length=4, max_length=4 * MOST_TOKENS)]


class Chain(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The digest of the page's whole chain, that of its parent, and its own tokens."""

    digest: Digest
    parent: Digest
    tokens: Tokens
