"""The outer tier fails in every way there is: tokens are those of a node without it, and late by a bounded time."""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.e2e.tiers.nodes import PAGE, PROMPT_TOKENS, Node, Served, key_file, node, outer, prompt, redis, until
from tests.kvcache.outer.servers import RedisServer

pytestmark = pytest.mark.timeout(400)
WHOLE = PROMPT_TOKENS // PAGE
SEEDS = range(1, 4)
#: By what a first token may be late, beyond twice the time of computing it, since a wait is at most as long: a lookup
#: that is not answered, the gate after a refusal, and a busy machine of two cores.
LATE_S = 3.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        yield Path(name)


def dies(server: RedisServer) -> None:
    server.kill()


def hangs(server: RedisServer) -> None:
    server.stop()


def loses(server: RedisServer) -> None:
    server.command("FLUSHALL")


def keys(server: RedisServer) -> list[bytes]:
    """The keys that a server has."""
    answer = server.command("EVAL", "return table.concat(redis.call('KEYS', '*'), '\\n')", "0")
    return answer.split(b"\n") if answer else []


def lies(server: RedisServer) -> None:
    """Each value is another's: authentic, and of the wrong page."""
    script = (
        "local keys = redis.call('KEYS', '*') local first = redis.call('GET', keys[1]) "
        "for at = 1, #keys do local next = keys[at % #keys + 1] "
        "redis.call('SET', keys[at], at < #keys and redis.call('GET', next) or first) end return #keys"
    )
    server.command("EVAL", script, "0")


def rots(server: RedisServer) -> None:
    """One byte in the middle of each value has changed."""
    script = (
        "for _, key in ipairs(redis.call('KEYS', '*')) do "
        "local at = math.floor(redis.call('STRLEN', key) / 2) "
        "local byte = string.byte(redis.call('GETRANGE', key, at, at)) "
        "redis.call('SETRANGE', key, at, string.char((byte + 1) % 256)) end"
    )
    server.command("EVAL", script, "0")


def writes_nonsense(server: RedisServer) -> None:
    """Everything is replaced by a few bytes, or by a list."""
    script = (
        "for at, key in ipairs(redis.call('KEYS', '*')) do redis.call('DEL', key) "
        "if at % 2 == 0 then redis.call('SET', key, 'x') else redis.call('RPUSH', key, 'x') end end"
    )
    server.command("EVAL", script, "0")


@pytest.fixture(scope="module")
def cold() -> dict[int, Served]:
    """What a node without tiers serves."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name, node(Path(name) / "cold") as plain:
        plain.generate(prompt(99))
        served = {seed: plain.generate(prompt(seed)) for seed in SEEDS}
        assert all(one.cached_tokens == 0 for one in served.values())
        return served


def check(one: Node, cold: dict[int, Served], cached: int | None) -> None:
    """Serve the prompts: the same tokens, and no later than computing them and a bound."""
    limit_s = max(served.first_token_s for served in cold.values()) * 2 + LATE_S
    for seed, expected in cold.items():
        served = one.generate(prompt(seed))
        assert served.tokens == expected.tokens
        assert served.first_token_s <= limit_s, f"{served.first_token_s:.3f} s, cold {expected.first_token_s:.3f} s"
        if cached is not None:
            assert served.cached_tokens == cached
        one.evict()


@pytest.mark.parametrize("fault", [dies, hangs, loses, lies, rots, writes_nonsense])
def test_no_fault_of_the_server_changes_a_token(
    directory: Path, cold: dict[int, Served], fault: Callable[[RedisServer], None]
) -> None:
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", *outer(server, key)) as a:
        for seed in SEEDS:
            a.generate(prompt(seed))
        a.until_stored(pb.TIER_OUTER, WHOLE * len(SEEDS))
        a.evict()
        assert len(keys(server)) >= WHOLE * len(SEEDS)
        with node(directory / "b", *outer(server, key)) as b:
            fault(server)
            check(b, cold, cached=0)
            if fault in (lies, rots, writes_nonsense):
                assert b.tier(pb.TIER_OUTER).failed_pages > 0, "what is wrong is counted"
            b.assert_clean()
            # It comes back, and is used again.
            if fault is hangs:
                server.resume()
            if fault is dies:
                server.start()
            until(lambda: b.tier(pb.TIER_OUTER).available, "it is not used again")
            tokens = b.generate(prompt(77)).tokens
            until(lambda: fetched_again(b, tokens), "nothing is fetched any more")
            b.assert_clean()


def fetched_again(one: Node, tokens: list[int]) -> bool:
    """Whether a prompt that may have been stored by now is fetched; its tokens are the same either way."""
    one.until_moved()
    one.evict()
    served = one.generate(prompt(77))
    assert served.tokens == tokens
    return served.cached_tokens > 0


def test_a_full_server_stores_nothing_and_changes_no_token(directory: Path, cold: dict[int, Served]) -> None:
    key = key_file(directory)
    limits = ("--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    with redis(directory, *limits) as server, node(directory / "a", *outer(server, key)) as a:
        check(a, cold, cached=None)
        a.until_moved()
        assert a.tier(pb.TIER_OUTER).failed_pages > 0
        check(a, cold, cached=None)
        a.assert_clean()


def test_a_server_that_dies_in_the_middle_of_fills_changes_no_token(directory: Path, cold: dict[int, Served]) -> None:
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", *outer(server, key)) as a:
        for seed in SEEDS:
            a.generate(prompt(seed))
        a.until_stored(pb.TIER_OUTER, WHOLE * len(SEEDS))
        for _ in range(3):
            a.evict()
            threads, served = [], dict[int, Served]()

            def serve(seed: int, into: dict[int, Served]) -> None:
                into[seed] = a.generate(prompt(seed))

            for seed in SEEDS:
                threads.append(threading.Thread(target=serve, args=(seed, served)))
                threads[-1].start()
            server.stop()
            for thread in threads:
                thread.join()
            server.resume()
            assert {seed: one.tokens for seed, one in served.items()} == {
                seed: one.tokens for seed, one in cold.items()
            }
            limit_s = sum(one.first_token_s for one in cold.values()) * 2 + LATE_S
            assert max(one.first_token_s for one in served.values()) <= limit_s
        a.assert_clean()


def test_waiting_for_the_outer_tier_is_worth_it_or_short(directory: Path, cold: dict[int, Served]) -> None:
    """The median of first tokens from the outer tier is no later than computing them, and a little."""
    key = key_file(directory)
    with redis(directory) as server, node(directory / "a", *outer(server, key)) as a:
        for seed in SEEDS:
            a.generate(prompt(seed))
        a.until_stored(pb.TIER_OUTER, WHOLE * len(SEEDS))
        times = []
        for seed in SEEDS:
            a.evict()
            served = a.generate(prompt(seed))
            assert served.tokens == cold[seed].tokens
            times.append(served.first_token_s)
        computed_s = statistics.median(one.first_token_s for one in cold.values())
        assert statistics.median(times) <= 2 * computed_s + 0.2
