"""Frames of messages: whatever is sent arrives, and nothing else is taken for a message."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from services.kvcache.mover import frames as wire
from services.kvcache.mover import orders
from services.kvcache.mover.frames import MOST_FRAME_BYTES, MOST_MESSAGES, Frames, InvalidFrame
from services.kvcache.mover.orders import (
    Commit,
    Filled,
    FillFromHost,
    FillFromOuter,
    Forget,
    Found,
    Lookup,
    Order,
    Ping,
    Pong,
    Read,
    ReadDone,
    Reply,
    Setup,
)
from services.kvcache.outer.page_chain import MOST_TOKENS, Chain
from services.kvcache.outer.settings import OuterTier

NUMBERS = st.integers(0, (1 << 63) - 1)
DIGESTS = st.binary(min_size=32, max_size=32)
CHAINS = st.builds(Chain, DIGESTS, DIGESTS, st.binary(min_size=4, max_size=256))
ORDERS: st.SearchStrategy[Any] = st.one_of(
    st.builds(Read, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS, NUMBERS, st.none() | CHAINS, st.booleans()),
    st.builds(Commit, NUMBERS),
    st.builds(Lookup, NUMBERS, st.lists(DIGESTS, min_size=1, max_size=5).map(tuple)),
    st.builds(FillFromHost, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS),
    st.builds(FillFromOuter, NUMBERS, NUMBERS, NUMBERS, CHAINS),
    st.builds(Forget, st.lists(DIGESTS, min_size=1, max_size=5).map(tuple)),
    st.builds(
        Setup,
        st.none() | st.builds(OuterTier, st.just((("localhost", 6379),)), st.integers(1, 1 << 31)),
        st.integers(1, 1 << 40),
        st.floats(0.1, 100),
    ),
)
SECONDS = st.floats(0, 1e6)
REPLIES: st.SearchStrategy[Any] = st.one_of(
    st.builds(ReadDone, NUMBERS, st.booleans(), SECONDS, st.none() | NUMBERS, st.text(max_size=20)),
    st.builds(Found, NUMBERS, NUMBERS, SECONDS),
    st.builds(Filled, NUMBERS, st.sampled_from(["filled", "missing", "refused", "failed"]), NUMBERS, SECONDS),
)


@given(st.lists(st.lists(ORDERS, min_size=1, max_size=3), max_size=3), st.lists(st.integers(1, 200), min_size=1))
def test_what_is_sent_arrives_however_the_stream_is_cut(batches: list[list[Order]], cuts: list[int]) -> None:
    stream = b"".join(wire.encode(batch) for batch in batches)
    frames, got = Frames(), []
    for size in itertools.cycle(cuts):
        if not stream:
            break
        got += [wire.orders(body) for body in frames.feed(stream[:size])]
        stream = stream[size:]
    assert got == batches


@given(st.lists(REPLIES, min_size=1, max_size=4))
def test_replies_arrive(batch: list[Reply]) -> None:
    [body] = Frames().feed(wire.encode(batch))
    assert wire.replies(body) == batch


@given(st.binary(max_size=200))
def test_other_bytes_are_no_messages_or_valid_ones(body: bytes) -> None:
    for decode in (wire.orders, wire.replies):
        try:
            found = decode(body)
        except InvalidFrame:
            continue
        assert found


def test_each_side_takes_only_what_the_other_may_say() -> None:
    [order] = Frames().feed(wire.encode([Ping(1)]))
    [reply] = Frames().feed(wire.encode([Pong(1)]))
    with pytest.raises(InvalidFrame):
        wire.replies(order)
    with pytest.raises(InvalidFrame):
        wire.orders(reply)


@pytest.mark.parametrize(
    "message",
    [
        Read(-1, 0, 0),
        Read(1 << 63, 0, 0),
        Lookup(0, ()),
        Lookup(0, (b"short",)),
        Lookup(0, (bytes(32),) * (orders.MOST_KEYS + 1)),
        FillFromOuter(0, 0, 0, Chain(bytes(32), bytes(31), bytes(4))),
        FillFromOuter(0, 0, 0, Chain(bytes(32), bytes(32), b"")),
        FillFromOuter(0, 0, 0, Chain(bytes(32), bytes(32), bytes(4 * MOST_TOKENS + 1))),
        Setup(OuterTier((), 1), 1, 1.0),
        Setup(OuterTier((("a", 1),), 0), 1, 1.0),
        Setup(None, 0, 1.0),
        Setup(None, 1, 0.0),
    ],
)
def test_values_out_of_range_are_refused(message: Order) -> None:
    body = msgspec.msgpack.encode([message])
    with pytest.raises(InvalidFrame):
        wire.orders(body)


def test_an_unknown_field_is_refused() -> None:
    body = msgspec.msgpack.encode([["commit", 1, 2]])
    with pytest.raises(InvalidFrame):
        wire.orders(body)


@pytest.mark.parametrize("length", [0, MOST_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_frame_of_that_length_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(InvalidFrame, match=str(length)):
        list(Frames().feed(length.to_bytes(4, "little")))


def test_no_frame_is_sent_that_would_be_refused() -> None:
    with pytest.raises(ValueError, match="0 messages"):
        wire.encode([])
    with pytest.raises(ValueError, match=str(MOST_MESSAGES)):
        wire.encode([Commit(0)] * (MOST_MESSAGES + 1))
    large = Forget((bytes(32),) * orders.MOST_KEYS)
    with pytest.raises(ValueError, match="bytes"):
        wire.encode([large] * (MOST_FRAME_BYTES // (32 * orders.MOST_KEYS) + 1))


def test_every_message_is_in_a_union() -> None:
    kinds = [kind for kind in vars(orders).values() if isinstance(kind, type)]
    assert {*get_args(Order), *get_args(Reply)} == {kind for kind in kinds if orders._Message in kind.__bases__}
