"""What one node has computed and evicted is served from its lower tiers: to itself, and to other nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.e2e.tiers.nodes import PAGE, PROMPT_TOKENS, Node, key_file, node, outer, prompt, redis

pytestmark = pytest.mark.timeout(300)
WHOLE = PROMPT_TOKENS // PAGE


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


def warm(one: Node, seed: int, tier: pb.Tier, **fields: Any) -> list[int]:
    """Compute a prompt, have it stored, and evict it; returns the tokens generated."""
    before = one.tier(tier).stored_pages
    served = one.generate(prompt(seed), **fields)
    assert served.cached_tokens == 0
    one.until_stored(tier, before + WHOLE)
    one.evict()
    return served.tokens


def test_the_host_tier_gives_back_what_the_pool_gave_up(directory: Path) -> None:
    with node(directory / "a", "--host-cache", "32MiB") as a:
        tokens = warm(a, 1, pb.TIER_HOST)
        assert a.tiers_of(prompt(1))[:WHOLE] == [pb.TIER_HOST] * WHOLE
        again = a.generate(prompt(1))
        assert again.tokens == tokens and again.cached_tokens > 0
        host = a.tier(pb.TIER_HOST)
        assert host.fetched_pages * PAGE >= again.cached_tokens
        assert host.fetched_bytes == host.fetched_pages * a.stats().pools[0].page_bytes
        assert a.stats().mover.waited_openings == 1
        assert a.generate(prompt(1), cache_salt="another").cached_tokens == 0
        a.assert_clean()


def test_a_node_serves_what_another_has_computed(directory: Path) -> None:
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", *outer(server, key)) as a:
        tokens = warm(a, 1, pb.TIER_OUTER)
        salted = warm(a, 2, pb.TIER_OUTER, cache_salt="one tenant")
        with node(directory / "b", *outer(server, key)) as b:
            served = b.generate(prompt(1))
            assert served.tokens == tokens and served.cached_tokens > 0
            assert b.tier(pb.TIER_OUTER).fetched_pages * PAGE >= served.cached_tokens
            assert b.generate(prompt(2)).cached_tokens == 0, "that is another tenant's"
            served = b.generate(prompt(2), cache_salt="one tenant")
            assert served.tokens == salted and served.cached_tokens > 0
            b.assert_clean()
        a.assert_clean()


def test_only_the_same_pool_with_the_same_key_hits(directory: Path) -> None:
    key, wrong = key_file(directory), key_file(directory, "wrong", "a5")
    with redis(directory) as server, node(directory / "a", *outer(server, key)) as a:
        tokens = warm(a, 1, pb.TIER_OUTER)
        a.close()
        with node(directory / "b", *outer(server, wrong)) as b:
            served = b.generate(prompt(1))
            assert (served.tokens, served.cached_tokens) == (tokens, 0)
            b.assert_clean()
        with node(directory / "c", *outer(server, key), engine_flags=("--pool-id", "another")) as c:
            served = c.generate(prompt(1))
            assert (served.tokens, served.cached_tokens) == (tokens, 0)
            c.assert_clean()


def test_a_restarted_daemon_is_warm(directory: Path) -> None:
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", *outer(server, key)) as a:
        tokens = warm(a, 1, pb.TIER_OUTER)
        a.daemon.kill()
        a.start_daemon()
        a.generate(prompt(9))  # the engine opens a session, and the mover maps the new arena
        served = a.generate(prompt(1))
        assert served.tokens == tokens and served.cached_tokens > 0
        a.assert_clean()


def test_both_tiers_of_a_node_are_used_at_once(directory: Path) -> None:
    """The host tier has room for a few prompts, the outer one for all."""
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", "--host-cache", "8MiB", *outer(server, key)) as a:
        tokens = {seed: warm(a, seed, pb.TIER_OUTER) for seed in range(4)}
        assert a.tier(pb.TIER_HOST).evicted_pages > 0
        for seed, expected in tokens.items():
            served = a.generate(prompt(seed))
            assert served.tokens == expected and served.cached_tokens > 0
            a.evict()
        assert a.tier(pb.TIER_OUTER).fetched_pages > 0
        a.assert_clean()
