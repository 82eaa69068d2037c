"""Values of the outer tier: the page that was stored, or refused."""

from __future__ import annotations

import hashlib
import os
import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.kvcache.outer.page_chain import Chain
from services.kvcache.outer.value import Codec, InvalidValue

KEY = bytes(range(32))
PAGE = bytes(at % 251 for at in range(96))
TOKENS = struct.pack("<4I", 1, 2, 70_000, 4)
PARENT = hashlib.sha256(b"parent").digest()
Bytes = bytes | bytearray
CHAIN = Chain(hashlib.sha256(PARENT + TOKENS).digest(), PARENT, TOKENS)
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plaintext", "encrypted"])


def sealed(page: bytes = PAGE, chain: Chain = CHAIN, key: bytes | None = KEY) -> bytearray:
    codec = Codec(key)
    value = bytearray(codec.value_bytes(len(page), chain))
    codec.seal(memoryview(bytearray(page) + bytes(len(chain.tokens))), chain, memoryview(value))
    return value


def opened(value: Bytes, chain: Chain = CHAIN, key: bytes | None = KEY, page_bytes: int = len(PAGE)) -> bytes:
    body = bytearray(page_bytes + len(chain.tokens))
    Codec(key).open(memoryview(value), chain, memoryview(body))
    assert body[page_bytes:] == chain.tokens
    return bytes(body[:page_bytes])


def refuses(value: Bytes, chain: Chain = CHAIN, key: bytes | None = KEY, page_bytes: int = len(PAGE)) -> bool:
    try:
        opened(value, chain, key, page_bytes)
    except InvalidValue:
        return True
    return False


@given(st.binary(min_size=1, max_size=300), st.integers(1, 9), st.none() | st.just(KEY))
def test_what_is_sealed_opens(page: bytes, tokens: int, key: bytes | None) -> None:
    chain = Chain(os.urandom(32), PARENT, os.urandom(4 * tokens))
    assert opened(sealed(page, chain, key), chain, key, len(page)) == page


@KEYS
def test_every_bit_that_is_flipped_is_refused(key: bytes | None) -> None:
    value = sealed(key=key)
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert refuses(value, key=key), bit
        value[bit // 8] ^= 1 << bit % 8
    assert opened(value, key=key) == PAGE


@KEYS
def test_every_length_but_the_right_one_is_refused(key: bytes | None) -> None:
    value = sealed(key=key)
    for size in range(len(value)):
        assert refuses(value[:size], key=key), size
    assert refuses(value + b"\0", key=key)


@KEYS
@given(st.binary(max_size=400))
def test_other_bytes_are_refused(key: bytes | None, value: bytes) -> None:
    assert refuses(value, key=key)


@KEYS
def test_the_value_of_another_page_is_refused(key: bytes | None) -> None:
    value = sealed(key=key)
    other = hashlib.sha256(b"other").digest()
    assert refuses(value, Chain(other, CHAIN.parent, CHAIN.tokens), key)
    assert refuses(value, Chain(CHAIN.digest, other, CHAIN.tokens), key)
    assert refuses(value, Chain(CHAIN.digest, CHAIN.parent, CHAIN.tokens[::-1]), key)


@KEYS
def test_another_layout_is_refused_even_of_the_same_length(key: bytes | None) -> None:
    fewer = Chain(CHAIN.digest, CHAIN.parent, CHAIN.tokens[:8])
    assert refuses(sealed(key=key), fewer, key, len(PAGE) + 8)
    assert refuses(sealed(key=key), key=key, page_bytes=len(PAGE) - 4)


def test_another_key_is_refused_and_so_is_plaintext_where_a_key_is_set() -> None:
    assert refuses(sealed(), key=bytes(32))
    assert refuses(sealed(key=None), key=KEY)
    assert refuses(sealed(key=KEY), key=None)


def test_a_forged_checksum_does_not_pass_for_the_key() -> None:
    """Whoever can write to the outer tier can compute every CRC."""
    value, codec = sealed(), Codec(KEY)
    for at in (8, 12, 40, 80, 120, len(value) - 8):
        forged = bytearray(value)
        forged[at] ^= 1
        forged[-4:] = codec._checksum(memoryview(forged), CHAIN)
        assert refuses(forged), at


def test_an_encrypted_value_shows_neither_page_nor_tokens_nor_the_same_bytes_twice() -> None:
    value = sealed()
    assert PAGE[:16] not in value and TOKENS not in value
    assert PAGE[:16] in sealed(key=None)
    assert sealed()[:-4] != sealed()[:-4]


def test_each_page_has_its_own_key() -> None:
    """So that nonces of different pages may be the same."""
    other = Chain(hashlib.sha256(b"other").digest(), CHAIN.parent, CHAIN.tokens)
    codec = Codec(KEY)
    outputs = []
    for chain in (CHAIN, other):
        out = bytearray(32)
        codec._cipher(KEY, chain).encrypt_into(bytes(12), memoryview(bytes(16)), b"", memoryview(out))
        outputs.append(out[:16])
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="must have 32"):
        Codec(bytes(size))
