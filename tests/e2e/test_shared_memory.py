"""The pages really are shared memory: a third process finds in them what an independent forward computes."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2
from tests.e2e.conftest import MODEL, Pair
from tests.gated import gated
from tests.generation import collect, request
from tests.models.references.plain_forward import forward
from tests.polling import until
from tests.processes import Service, engine, kvcache

PROMPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\nFirst Citizen:\nYou"


class Reader:
    """Maps the pool's arena without being an engine: it opens a session, and never attaches."""

    def __init__(self, pair: Pair) -> None:
        stats = pair.pool()
        self._stub = pair.cache
        self.opened = self._stub.OpenSession(kvcache_pb2.OpenSessionRequest(pool_id=stats.pool_id, layout=stats.layout))
        arena, layout = self.opened.arena, self.opened.layout
        with open(arena.file_path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), arena.size_bytes)
        shape = (arena.total_pages, layout.layers, 2, layout.kv_heads, layout.page_size, layout.head_dim)
        self.pages: Any = np.frombuffer(self._map, np.float32, int(np.prod(shape))).reshape(shape)

    def kv(self, sequence: kvcache_pb2.Sequence) -> np.ndarray:
        """K and V of the sequence's resident tokens: [layers, 2, tokens, kv_heads, head_dim]."""
        gathered = self.pages[list(sequence.page_ids)]
        layers, heads, head_dim = gathered.shape[1], gathered.shape[3], gathered.shape[5]
        slots = gathered.transpose(1, 2, 0, 4, 3, 5).reshape(layers, 2, -1, heads, head_dim)
        return np.asarray(slots[:, :, : sequence.total_tokens])

    def close(self) -> None:
        self._stub.CloseSession(kvcache_pb2.CloseSessionRequest(session_id=self.opened.session_id))


@pytest.fixture
def daemon() -> Iterator[tuple[Path, Service]]:
    """It verifies no hit: it would give up a page that a test marks."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        with kvcache(Path(name), "--verify-share", "0") as one:
            yield Path(name), one


def live_sequence(pair: Pair, at_least: int) -> kvcache_pb2.Sequence:
    """The one live sequence, once that many of its tokens are reported resident."""

    def long_enough() -> list[kvcache_pb2.Sequence]:
        every = pair.cache.ListSequences(kvcache_pb2.ListSequencesRequest()).sequences
        return [listed for listed in every if listed.total_tokens >= at_least]

    [listed] = until(long_enough)
    asked = kvcache_pb2.GetSequenceRequest(
        session_handle=listed.session_handle, sequence_id=listed.sequence_id, include_tokens=True
    )
    return pair.cache.GetSequence(asked).sequence


def test_a_third_process_finds_the_k_and_v_of_an_independent_forward(daemon: tuple[Path, Service]) -> None:
    directory, cache = daemon
    with gated(directory, cache.address, model=MODEL) as (one, steps):
        pair = Pair(cache, one, directory)
        stream = pair.stub.Generate(request(PROMPT, 400))
        steps.let(250)  # and there it stands, for as long as the pages are looked at
        sequence = live_sequence(pair, at_least=100)
        reader = Reader(pair)
        found = reader.kv(sequence)
        tokens = list(sequence.tokens)
        assert len(tokens) == sequence.total_tokens >= 100
        _, keys, values = forward(MODEL, tokens)
        for layer in range(found.shape[0]):
            np.testing.assert_allclose(found[layer, 0], keys[layer], atol=1e-4)
            np.testing.assert_allclose(found[layer, 1], values[layer], atol=1e-4)
        stream.cancel()
        reader.close()


def test_a_second_engine_uses_the_pages_of_the_first_and_writes_none_of_them(daemon: tuple[Path, Service]) -> None:
    prompt = PROMPT + " are all resolved rather to die"
    directory, cache = daemon
    with ExitStack() as both:
        one = both.enter_context(engine(directory, cache.address, model=MODEL, name="first"))
        pair = Pair(cache, one, directory)
        _, expected, cold = collect(pair.stub.Generate(request(prompt, 32)))
        other, steps = both.enter_context(gated(directory, cache.address, model=MODEL, name="second"))
        stub = engine_pb2_grpc.EngineServiceStub(other.channel)
        steps.let()
        _, tokens, finish = collect(stub.Generate(request(prompt, 32)))
        assert tokens == expected
        whole_pages = (cold.usage.prompt_tokens - 1) // 16 * 16
        assert finish.usage.cached_tokens == whole_pages > 0

        # Change the shared pages by one unit in the last place: whoever writes them again, even the same numbers,
        # would undo it.
        reader = Reader(pair)
        steps.hold()
        stream = stub.Generate(request(prompt, 400))
        steps.let(250)  # and there it stands until it was seen
        sequence = live_sequence(pair, at_least=whole_pages + 16)
        shared = list(sequence.page_ids)[: whole_pages // 16]
        stream.cancel()
        collect_until_gone(stream)
        steps.close()
        before = reader.pages[shared].copy()
        marked = np.nextafter(before, np.float32(np.inf))
        reader.pages[shared] = marked
        collect(stub.Generate(request(prompt, 32)))
        assert np.array_equal(reader.pages[shared], marked), "the second engine wrote a shared page"
        reader.pages[shared] = before
        reader.close()


def collect_until_gone(stream: Any) -> None:
    """Wait for a cancelled call to end on our side."""
    import grpc

    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.CANCELLED
