"""A page as a value of the outer tier.

    magic 8 | version 2 | flags 2 | tokens 4 | page bytes 8 | nonce 12 | parent digest 32 | body | tag 16 | CRC-32C 4

Numbers are little-endian. The body is the page's bytes and its tokens, 4 bytes each. Encrypted (AES-256-GCM), the
header, the digest and its parent's are authenticated with it; in plaintext there is no tag, and the nonce is zero. The
CRC-32C is over the digest and all before it, so a value under another page's key is refused in plaintext too.

Each page is encrypted with a key of its own, derived from the outer tier's and the digest. So random nonces of 12 bytes
may meet only among the values of one page, whose contents are the same, however many pages there are.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Protocol

from services.kvcache.outer.page_chain import DIGEST_BYTES, Chain
from services.kvcache.outer.secret import KEY_BYTES

MAGIC = b"RFKVPAGE"
VERSION = 1
ENCRYPTED = 1

_HEADER = struct.Struct("<8sHHIQ12s")
_NONCE_BYTES, _TAG_BYTES, _CRC_BYTES, _TOKEN_BYTES = 12, 16, 4, 4
_BODY_AT = _HEADER.size + DIGEST_BYTES
_KEY_LABEL = b"rocmforge outer page 1"


class InvalidValue(Exception):
    """Bytes that are not the value of the page that was wanted. The message says which check they failed."""


class _Cipher(Protocol):
    def encrypt_into(self, nonce: bytes, data: memoryview, associated: bytes, buf: memoryview) -> int: ...

    def decrypt_into(self, nonce: bytes, data: memoryview, associated: bytes, buf: memoryview) -> int: ...


class Codec:
    """Pages to values and back, encrypted with ``key`` if there is one. Any thread may call."""

    def __init__(self, key: bytes | None) -> None:
        from crc32c import crc32c
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes: must have {KEY_BYTES}")
        self._key = key
        self._aes = AESGCM
        self._invalid_tag = InvalidTag
        self._crc32c = crc32c

    def body_bytes(self, page_bytes: int, chain: Chain) -> int:
        """The size of a page and its tokens."""
        return page_bytes + len(chain.tokens)

    def value_bytes(self, page_bytes: int, chain: Chain) -> int:
        """The size of the page's value."""
        tag = _TAG_BYTES if self._key is not None else 0
        return _BODY_AT + self.body_bytes(page_bytes, chain) + tag + _CRC_BYTES

    def seal(self, body: memoryview, chain: Chain, value: memoryview) -> None:
        """Write the value of a page to ``value``, of exactly `value_bytes`.

        ``body`` has `body_bytes`: the page's bytes, then room for its tokens, which are written there.
        """
        page_bytes = self._sizes(body, chain, value)
        body[page_bytes:] = chain.tokens
        nonce = os.urandom(_NONCE_BYTES) if self._key is not None else bytes(_NONCE_BYTES)
        value[:_BODY_AT] = self._header(page_bytes, chain, nonce)
        inside = value[_BODY_AT:-_CRC_BYTES]
        if self._key is None:
            inside[:] = body
        else:
            self._cipher(self._key, chain).encrypt_into(nonce, body, bytes(value[:_BODY_AT]) + chain.digest, inside)
        value[-_CRC_BYTES:] = self._checksum(value, chain)

    def open(self, value: memoryview, chain: Chain, body: memoryview) -> None:
        """Check a value, and write its page and tokens to ``body``, of exactly `body_bytes`.

        Raises InvalidValue; ``body`` may have been written then, and must not be used.
        """
        try:
            page_bytes = self._sizes(body, chain, value)
        except ValueError as error:
            raise InvalidValue(str(error)) from error
        nonce = bytes(value[_HEADER.size - _NONCE_BYTES : _HEADER.size]) if self._key is not None else bytes(12)
        if value[:_BODY_AT] != self._header(page_bytes, chain, nonce):
            raise InvalidValue("the header is another page's, layout's, version's or encryption's")
        if value[-_CRC_BYTES:] != self._checksum(value, chain):
            raise InvalidValue("the checksum differs")
        inside = value[_BODY_AT:-_CRC_BYTES]
        if self._key is None:
            body[:] = inside
        else:
            try:
                self._cipher(self._key, chain).decrypt_into(nonce, inside, bytes(value[:_BODY_AT]) + chain.digest, body)
            except self._invalid_tag as error:
                raise InvalidValue("encrypted with another key, or changed") from error
        if body[page_bytes:] != chain.tokens:
            raise InvalidValue("the tokens are another page's")

    def _sizes(self, body: memoryview, chain: Chain, value: memoryview) -> int:
        """The size of the page, if those of body and value agree. Raises ValueError."""
        page_bytes = len(body) - len(chain.tokens)
        if page_bytes < 1 or len(chain.tokens) % _TOKEN_BYTES:
            raise ValueError(f"a body of {len(body)} bytes with {len(chain.tokens)} of tokens has no page")
        if len(value) != (wanted := self.value_bytes(page_bytes, chain)):
            raise ValueError(f"the value has {len(value)} bytes; a page of this layout takes {wanted}")
        return page_bytes

    def _header(self, page_bytes: int, chain: Chain, nonce: bytes) -> bytes:
        flags = ENCRYPTED if self._key is not None else 0
        tokens = len(chain.tokens) // _TOKEN_BYTES
        return _HEADER.pack(MAGIC, VERSION, flags, tokens, page_bytes, nonce) + chain.parent

    def _checksum(self, value: memoryview, chain: Chain) -> bytes:
        return self._crc32c(value[:-_CRC_BYTES], self._crc32c(chain.digest)).to_bytes(_CRC_BYTES, "little")

    def _cipher(self, key: bytes, chain: Chain) -> _Cipher:
        cipher: _Cipher = self._aes(hmac.digest(key, _KEY_LABEL + chain.digest, "sha256"))
        return cipher
