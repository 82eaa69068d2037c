"""A byte of a running daemon's arena changes: the page is found and removed, and the tokens stay right."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from tests.e2e.conftest import MODEL, Pair
from tests.generation import collect, request
from tests.processes import engine, kvcache

#: Four whole pages of 16 tokens, at least.
PROMPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 2


def damage(pair: Pair, page: int) -> None:
    """Flip the sign of each number of a page, as an engine could that maps the file."""
    [path] = (pair.directory / "arena").glob("*.arena")
    size = pair.pool().page_bytes
    with path.open("r+b") as file:
        file.seek(page * size)
        damaged = bytes(byte ^ (0x80 if at % 4 == 3 else 0) for at, byte in enumerate(file.read(size)))
        file.seek(page * size)
        file.write(damaged)


def deep(pair: Pair) -> kvcache_pb2.FsckResponse:
    return pair.cache.Fsck(kvcache_pb2.FsckRequest(deep=True))


def first_page(pair: Pair) -> int:
    """The page that the prompt begins with."""
    [_, tokens, _] = collect(pair.stub.Generate(request(PROMPT, 1)))
    assert tokens
    prompt = [*pair.stub.Tokenize(engine_pb2.TokenizeRequest(text=PROMPT)).token_ids]
    asked = kvcache_pb2.ExplainPrefixRequest(pool_id=pair.pool().pool_id, prompt=prompt)
    return pair.cache.ExplainPrefix(asked).pages[0].page.page_id


@pytest.mark.parametrize("found_by", ["fsck", "hit"])
def test_a_corrupted_page_is_found_removed_and_computed_anew(short_path: Path, found_by: str) -> None:
    share = "1" if found_by == "hit" else "0"
    with kvcache(short_path, "--verify-share", share) as daemon, engine(short_path, daemon.address, model=MODEL) as one:
        pair = Pair(daemon, one, short_path)
        _, right, _ = collect(pair.stub.Generate(request(PROMPT, 24)))
        assert not deep(pair).violations
        page = first_page(pair)
        damage(pair, page)
        if found_by == "fsck":
            answer = deep(pair)
            assert len(answer.violations) == 1 and f"page {page}, link" in answer.violations[0], answer
        _, tokens, finish = collect(pair.stub.Generate(request(PROMPT, 24)))
        assert tokens == right and finish.usage.cached_tokens == 0
        assert not deep(pair).violations
        [event] = daemon.events("page_corrupted")
        assert (event["page"], event["found_by"]) == (page, found_by)
        pool = pair.pool()
        assert pool.corrupted_pages == 1 and pool.withdrawn_pages >= 4
        _, tokens, finish = collect(pair.stub.Generate(request(PROMPT, 24)))
        assert tokens == right and (found_by == "hit" or finish.usage.cached_tokens >= 64)
        pair.assert_clean()


def test_unverified_it_would_have_been_served(short_path: Path) -> None:
    """What the tests above could not tell from a page that was found: tokens do depend on it."""
    with (
        kvcache(short_path, "--verify-share", "0") as daemon,
        engine(short_path, daemon.address, model=MODEL) as one,
    ):
        pair = Pair(daemon, one, short_path)
        _, right, _ = collect(pair.stub.Generate(request(PROMPT, 24)))
        damage(pair, first_page(pair))
        _, tokens, finish = collect(pair.stub.Generate(request(PROMPT, 24)))
        assert tokens != right and finish.usage.cached_tokens >= 64
