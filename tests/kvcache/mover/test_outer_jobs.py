"""The mover and the outer tier: whatever dies at any point, a value is a whole page, and a page is what was stored."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.kvcache.mover.orders import (
    Abandon,
    Commit,
    Filled,
    FillFromHost,
    FillFromOuter,
    Forget,
    Found,
    Health,
    Lookup,
    Order,
    OuterTier,
    Read,
    ReadDone,
    Stored,
)
from services.kvcache.outer.store import PREFIX
from services.kvcache.outer.value import Codec, InvalidValue
from tests.kvcache.mover.rig import ARENA, HOST, PAGE_BYTES, PAGES, Rig, chain_of
from tests.kvcache.outer.servers import RedisServer, settings

pytestmark = [pytest.mark.needs("redis"), pytest.mark.timeout(200)]

KEY = bytes(range(32))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def outer(server: RedisServer, tmp_path: Path) -> OuterTier:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(KEY)
    return settings(server.port, key_file=str(key))


def value_of(server: RedisServer, at: int) -> bytes:
    return server.command("GET", PREFIX + chain_of(at).digest)


def page_in(value: bytes | bytearray, at: int) -> bytes:
    """Raises InvalidValue unless the whole page is there."""
    chain, body = chain_of(at), bytearray(PAGE_BYTES + 64)
    Codec(KEY).open(memoryview(value), chain, memoryview(body))
    return bytes(body[:PAGE_BYTES])


async def put(rig: Rig, job: int, page: int, at: int, slot: int | None = None) -> None:
    order = Read(job, ARENA, page, None if slot is None else HOST, slot or 0, chain_of(at))
    assert (await rig.read(order, job)).ok
    stored = await rig.stored(Commit(job), job)
    assert stored.ok and stored.bytes > PAGE_BYTES, stored


@pytest.mark.parametrize("slot", [None, 4])
async def test_a_page_goes_to_the_outer_tier_and_back(
    tmp_path: Path, outer: OuterTier, server: RedisServer, slot: int | None
) -> None:
    async with Rig(tmp_path, outer) as rig:
        await rig.healthy()
        page = rig.arena[3]
        await put(rig, 1, 3, 1, slot)
        assert page_in(value_of(server, 1), 1) == page
        assert rig.host[4] == (page if slot else bytes(PAGE_BYTES))
        assert (await rig.found(Lookup(2, (chain_of(1).digest, chain_of(2).digest)), 2)).count == 1
        filled = await rig.filled(FillFromOuter(3, ARENA, 9, chain_of(1)), 3)
        assert (filled.outcome, filled.bytes) == ("filled", PAGE_BYTES)
        assert rig.arena[9] == page
        before = rig.arena[10]
        assert (await rig.filled(FillFromOuter(4, ARENA, 10, chain_of(2)), 4)).outcome == "missing"
        assert rig.arena[10] == before
        assert rig.mover.send(Forget((chain_of(1).digest,)))
        await rig.until(lambda: server.command("EXISTS", PREFIX + chain_of(1).digest) == b":0")


async def test_nothing_is_stored_before_it_is_committed_and_nothing_after_it_is_abandoned(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    async with Rig(tmp_path, outer) as rig:
        await rig.healthy()
        for job in range(20):
            assert (await rig.read(Read(job, ARENA, job, outer=chain_of(job)), job)).ok
        assert server.command("DBSIZE") == b":0"
        for job in range(0, 20, 2):
            assert rig.mover.send(Abandon(job))
            assert not rig.mover.send(Commit(job))
        for job in range(1, 20, 2):
            assert (await rig.stored(Commit(job), job)).ok
        assert server.command("DBSIZE") == b":10"


async def test_what_is_stored_is_what_was_read_and_not_what_came_later(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    """After ReadDone, the page and the slot are others'."""
    async with Rig(tmp_path, outer) as rig:
        await rig.healthy()
        page = rig.arena[3]
        assert (await rig.read(Read(1, ARENA, 3, HOST, 4, chain_of(1)), 1)).ok
        rig.arena[3] = rig.host[4] = b"later" * (PAGE_BYTES // 5) + b"x"
        await rig.stored(Commit(1), 1)
        assert page_in(value_of(server, 1), 1) == page


async def test_a_changed_value_is_refused_deleted_and_reaches_no_page(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    async with Rig(tmp_path, outer) as rig:
        await rig.healthy()
        await put(rig, 1, 3, 1)
        value = bytearray(value_of(server, 1))
        value[500] ^= 1
        server.command("SET", PREFIX + chain_of(1).digest, bytes(value))
        before = rig.arena[9]
        assert (await rig.filled(FillFromOuter(2, ARENA, 9, chain_of(1)), 2)).outcome == "refused"
        assert rig.arena[9] == before
        assert server.command("DBSIZE") == b":0"


async def test_private_memory_is_bounded(tmp_path: Path, outer: OuterTier) -> None:
    """Pages still go to the host tier; what finds no room is not stored, and says so."""
    async with Rig(tmp_path, outer, staging=4 * (PAGE_BYTES + 64)) as rig:
        await rig.healthy()
        for job in range(8):
            assert (await rig.read(Read(job, ARENA, job, HOST, job, chain_of(job)), job)).ok
        assert rig.host[7] == rig.arena[7]
        stored = [await rig.stored(Commit(job), job) for job in (7, 6, 5, 4)]
        assert [each.ok for each in stored] == [False] * 4 and "no private memory" in stored[0].detail
        for job in (0, 1):
            assert rig.mover.send(Abandon(job))
        assert (await rig.stored(Commit(2), 2)).ok, "two buffers are free for its value"


async def test_without_a_server_everything_is_answered_and_health_tells_when_it_is_there(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    server.kill()
    async with Rig(tmp_path, outer) as rig:
        await rig.until(lambda: any(isinstance(reply, Health) for reply in rig.replies))
        assert (await rig.read(Read(1, ARENA, 3, HOST, 4, chain_of(1)), 1)).ok
        stored = await rig.stored(Commit(1), 1)
        assert not stored.ok and stored.detail and not stored.bytes
        assert (await rig.found(Lookup(2, (chain_of(1).digest,)), 2)).count == 0
        assert (await rig.filled(FillFromOuter(3, ARENA, 9, chain_of(1)), 3)).outcome == "failed"
        assert (await rig.filled(FillFromHost(4, ARENA, 9, HOST, 4), 4)).outcome == "filled", "it needs no server"
        server.start()
        await rig.healthy()
        await put(rig, 5, 3, 1)
        server.kill()
        for job in range(6, 12):
            await rig.found(Lookup(job, (chain_of(1).digest,)), job)
        await rig.until(lambda: any(isinstance(each, Health) and not each.outer_up for each in rig.replies[-10:]))
        assert rig.mover.restarts == 0


async def test_a_server_that_hangs_holds_neither_host_copies_nor_the_mover(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    async with Rig(tmp_path, outer, silence_s=5.0) as rig:
        await rig.healthy()
        server.stop()
        try:
            for job in range(40):
                assert rig.mover.send(FillFromOuter(job, ARENA, job % PAGES, chain_of(1)))
            assert (await rig.read(Read(100, ARENA, 1, HOST, 1), 100)).ok
            assert not [reply for reply in rig.replies if isinstance(reply, Filled) and reply.outcome == "filled"]
            await rig.until(lambda: sum(isinstance(reply, Filled) for reply in rig.replies) == 40)
            assert rig.mover.restarts == 0
        finally:
            server.resume()


async def test_a_mover_that_is_alive_and_does_not_end_a_job_is_killed(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    """Its library hangs for longer than the limit that it was given says: here, because that limit is long."""
    hanging = msgspec.structs.replace(outer, operation_seconds=100.0)
    async with Rig(tmp_path, hanging, silence_s=1.0, job_s=0.5) as rig:
        await rig.healthy()
        server.stop()
        try:
            assert rig.mover.send(FillFromOuter(1, ARENA, 9, chain_of(1)))
            await rig.ready_again(1)
        finally:
            server.resume()
        assert rig.lost == [[1]]
        assert (await rig.filled(FillFromOuter(2, ARENA, 9, chain_of(1)), 2)).outcome in ("missing", "failed")


async def test_a_memory_is_detached_after_the_fills_into_it(
    tmp_path: Path, outer: OuterTier, server: RedisServer
) -> None:
    async with Rig(tmp_path, outer) as rig:
        await rig.healthy()
        server.stop()
        try:
            assert rig.mover.send(FillFromOuter(1, ARENA, 9, chain_of(1)))
            await rig.detached(ARENA)
            kinds = [type(reply).__name__ for reply in rig.replies]
            assert kinds.index("Filled") < kinds.index("Detached")
        finally:
            server.resume()


async def test_a_key_that_cannot_be_read_is_told_and_the_host_tier_works(tmp_path: Path, outer: OuterTier) -> None:
    Path(outer.key_file).chmod(0o644)
    async with Rig(tmp_path, outer) as rig:
        await rig.until(lambda: any(isinstance(reply, Health) for reply in rig.replies))
        [said] = [reply for reply in rig.replies if isinstance(reply, Health)]
        assert not said.outer_up and "--outer-key" in said.detail
        assert (await rig.read(Read(1, ARENA, 1, HOST, 1), 1)).ok
        assert not (await rig.read(Read(2, ARENA, 1, outer=chain_of(1)), 2)).ok


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("point", ["read", "commit", "fill", "host fill", "lookup"])
async def test_a_mover_that_dies_at_any_order_leaves_nothing_torn(
    tmp_path: Path, outer: OuterTier, server: RedisServer, point: str, blow: signal.Signals
) -> None:
    """Each round it is hit at another moment of its work. What is answered is whole, what is not is lost."""
    rounds = 4 if blow == signal.SIGKILL else 2
    chance = random.Random(1)
    async with Rig(tmp_path, outer, silence_s=1.0) as rig:
        await rig.healthy()
        await put(rig, 1, 3, 1, slot=30)
        page, job = rig.arena[3], 10
        for turn in range(rounds):
            if point == "commit":
                for each in range(8):
                    assert (await rig.read(Read(job + each, ARENA, each, outer=chain_of(100 + each)), job + each)).ok
            for each in range(8):
                orders: dict[str, Order] = {
                    "read": Read(job, ARENA, each, HOST, each, chain_of(100 + each)),
                    "commit": Commit(job),
                    "fill": FillFromOuter(job, ARENA, 20 + each, chain_of(1)),
                    "host fill": FillFromHost(job, ARENA, 20 + each, HOST, 30),
                    "lookup": Lookup(job, (chain_of(1).digest,)),
                }
                assert rig.mover.send(orders[point])
                job += 1
            victim = rig.mover.pid
            assert victim
            await asyncio.sleep(chance.random() * 0.02)
            os.kill(victim, blow)
            await rig.ready_again(turn + 1)
            assert not Path(f"/proc/{victim}").exists()
            await rig.healthy()
        ended = {reply.job for reply in rig.replies if isinstance(reply, Stored | Found | Filled)}
        lost = [each for jobs in rig.lost for each in jobs]
        assert len(lost) == len(set(lost)) and not ended & set(lost)
        assert ended | set(lost) == {1, *range(10, job)}
        # Values that are there are whole; slots that were answered for are, and so are pages.
        for each in range(8):
            value = value_of(server, 100 + each)
            if value != b"$-1":
                assert page_in(value, 100 + each) == rig.arena[each]
        if point == "read":
            last = {(reply.job - 10) % 8 for reply in rig.replies if isinstance(reply, ReadDone) and reply.job >= 10}
            assert all(rig.host[each] == rig.arena[each] for each in last)
        if point in ("fill", "host fill"):
            whole = {reply.job for reply in rig.replies if isinstance(reply, Filled) and reply.outcome == "filled"}
            assert all(rig.arena[20 + (each - 10) % 8] == page for each in whole)
        assert (await rig.filled(FillFromOuter(9999, ARENA, 19, chain_of(1)), 9999)).outcome == "filled"
        assert rig.arena[19] == page


def test_the_check_of_these_tests_finds_a_torn_value() -> None:
    chain = chain_of(1)
    codec = Codec(KEY)
    value = bytearray(codec.value_bytes(PAGE_BYTES, chain))
    codec.seal(memoryview(bytearray(PAGE_BYTES + 64)), chain, memoryview(value))
    assert page_in(value, 1) == bytes(PAGE_BYTES)
    value[PAGE_BYTES // 2 :] = bytes(len(value) - PAGE_BYTES // 2)
    with pytest.raises(InvalidValue):
        page_in(value, 1)
