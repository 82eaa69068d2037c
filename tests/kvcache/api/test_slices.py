"""Long work in slices: others are served meanwhile, and its answer is the same."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Generator

import grpc
import pytest

from rocmforge.client.demands import STEP_TOKENS
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import SequenceRemoved
from services.kvcache import slices
from services.kvcache.api import requests, responses
from services.kvcache.api.event_messages import snapshot_messages
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.lease.sessions import Session
from services.kvcache.pool.index.events import MAX_LINKS
from services.kvcache.pool.sequence import Sequence
from services.kvcache.slices import Slices
from tests.kvcache.cache.test_cache import run
from tests.kvcache.clients.messages import opening, report
from tests.kvcache.conftest import Running
from tests.kvcache.fakes import World


def counted(steps: int, begun: list[int]) -> Generator[None, None, str]:
    for at in range(steps):
        begun.append(at)
        yield
    return "done"


def test_others_run_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    begun: list[int] = []

    async def both() -> tuple[str, list[int]]:
        seen: list[int] = []

        async def other() -> None:
            while len(begun) < 5:
                seen.append(len(begun))
                await asyncio.sleep(0)

        watching = asyncio.create_task(other())
        result = await Slices().run(counted(5, begun))
        await watching
        return result, seen

    result, seen = asyncio.run(both())
    assert result == "done" and seen == sorted(seen) and set(seen) >= {2, 3, 4}


def test_however_many_works_there_are_they_share_one_slice_of_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)

    async def all_of_them() -> list[list[int]]:
        passes: list[list[int]] = [[]]
        loop, together, over = asyncio.get_running_loop(), Slices(), False

        def another() -> None:
            passes.append([])
            if not over:
                loop.call_soon(another)

        def work(number: int) -> Generator[None, None, None]:
            for _ in range(6):
                passes[-1].append(number)
                yield

        loop.call_soon(another)
        await asyncio.gather(*(together.run(work(number)) for number in range(5)))
        over = True
        return passes

    ran = [numbers for numbers in asyncio.run(all_of_them()) if numbers]
    first = [numbers for numbers in ran if len(numbers) > 1]
    # Each begins in the pass in which it came, and one goes on at once.
    assert len(first) == 1 and sorted(set(first[0])) == [0, 1, 2, 3, 4] and len(first[0]) <= 6
    assert sum(map(len, ran)) == 30
    turns = [number for [number] in ran[1:]]
    assert all(len(set(turns[at : at + 5])) == 5 for at in range(0, 20, 5)), "in turn"


def test_works_of_one_order_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)

    async def three() -> list[str]:
        ran: list[str] = []
        together = Slices()

        def work(name: str, count: int) -> Generator[None, None, None]:
            for _ in range(count):
                ran.append(name)
                yield
            ran.append(name)

        calls = (("a", 3, "one"), ("b", 0, "one"), ("c", 1, "one"), ("d", 0, "two"))
        await asyncio.gather(*(together.run(work(name, count), order) for name, count, order in calls))
        assert not together._orders
        return ran

    ran = asyncio.run(three())
    assert [name for name in ran if name != "d"] == ["a", "a", "a", "a", "b", "c", "c"]
    assert ran.index("d") < ran.index("b")


def test_a_job_runs_in_a_thread_and_its_error_is_the_works() -> None:
    def work() -> Generator[Callable[[], object] | None, None, str]:
        threads: list[int] = []
        yield lambda: threads.append(threading.get_ident())
        assert threads and threads[0] != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            yield lambda: 1 // 0
        return "done"

    assert asyncio.run(Slices().run(work())) == "done"


def test_a_work_that_is_given_up_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)

    async def two() -> str:
        together = Slices()
        given_up = asyncio.create_task(together.run(counted(1000, []), "one"))
        other = asyncio.create_task(together.run(counted(5, []), "one"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_up.cancel()
        return await other

    assert asyncio.run(two()) == "done"


def test_short_work_is_done_without_a_pause() -> None:
    begun: list[int] = []

    async def both() -> list[int]:
        seen: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: seen.append(len(begun)))
        assert await Slices().run(counted(0, begun)) == "done"
        return list(seen)

    assert asyncio.run(both()) == []


@pytest.mark.parametrize("count", [0, 1, requests.TOKEN_SLICE, requests.TOKEN_SLICE + 1, 3 * requests.TOKEN_SLICE])
def test_tokens_are_read_as_they_were_sent(count: int) -> None:
    tokens = [at * 4001 & 0xFFFFFFFF for at in range(count)]
    work, pauses = requests.read_tokens(pb.Prompt(tokens=tokens).tokens), 0
    while True:
        try:
            next(work)
            pauses += 1
        except StopIteration as end:
            assert end.value == array("I", tokens)
            break
    assert pauses == (-(-count // requests.TOKEN_SLICE) if count > requests.TOKEN_SLICE else 0)


def test_a_long_prompt_is_opened_and_explained_in_slices(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    pauses, pause = list[int](), Slices._pause

    async def noted(self: Slices) -> None:
        pauses.append(1)
        await pause(self)

    monkeypatch.setattr(Slices, "_pause", noted)
    session = running.session()
    request = pb.AllocatePagesRequest(session_id=session, demands=[opening("long", range(STEP_TOKENS // 8), 8)])
    [grant] = running.stub.AllocatePages(request).grants
    assert len(grant.page_ids) == 8 and len(pauses) >= STEP_TOKENS // 8 // requests.TOKEN_SLICE
    steps = report("long", 0, range(32))
    running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
    pauses.clear()
    explained = running.stub.ExplainPrefix(pb.ExplainPrefixRequest(pool_id="pool", prompt=range(STEP_TOKENS // 8)))
    hits, seen = pb.PAGE_OUTCOME_HIT, [page.outcome for page in explained.pages]
    assert seen == [hits] * 8 + [pb.PAGE_OUTCOME_NEVER_SEEN] * (STEP_TOKENS // 32 - 9) + [pb.PAGE_OUTCOME_LAST_TOKEN]
    assert len(pauses) > 3 * STEP_TOKENS // 32 // 1024, "each part of it pauses"


def test_an_explanation_has_so_many_pages(running: Running) -> None:
    running.session()
    most = 4 * requests.MAX_EXPLAINED
    for count, refused in ((most, False), (most + 1, True)):
        request = pb.ExplainPrefixRequest(pool_id="pool", prompt=[1] * count)
        if not refused:
            assert len(running.stub.ExplainPrefix(request).pages) == requests.MAX_EXPLAINED
            continue
        with pytest.raises(grpc.RpcError) as failure:
            running.stub.ExplainPrefix(request)
        error = rpc.error_from(failure.value)
        assert (error.reason, error.field, error.metadata["limit"]) == ("FIELD_INVALID", "prompt", str(most))


def test_a_list_goes_on_where_it_ended_over_several_sessions(running: Running) -> None:
    names: list[str] = []
    for session, count in ((running.session(), 3), (running.session(), 0), (running.session(), 4)):
        own = [f"{len(names) + at}" for at in range(count)]
        demands = [opening(name, [1]) for name in own]
        running.stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=demands))
        names += own
    for limit in range(1, 9):
        listed, cursor = list[str](), ""
        while True:
            page = running.stub.ListSequences(pb.ListSequencesRequest(limit=limit, cursor=cursor))
            assert len(page.sequences) <= limit
            listed += [sequence.sequence_id for sequence in page.sequences]
            cursor = page.next_cursor
            if not cursor:
                break
        assert listed == names


def test_a_snapshot_is_of_the_moment_at_which_it_is_taken() -> None:
    world = World(40)
    session = world.attached()
    for at in range(3):
        run(world, session, f"a{at}", [at, *range(20)], 6)
    [pool] = world.cache.pools
    before = {(link.hash, link.parent) for link in pool.index.links()}
    work = snapshot_messages(world.cache, "")
    world.cache.calls.remove(session.id, ["a0", "a1"])
    world.cache.evict_pages("pool", None)
    run(world, session, "b", [9] * 20, 6)
    found = [message for message in work if message is not None]
    told = [pair for message in found for pair in zip(message.hashes, message.parent_hashes, strict=True)]
    assert len(told) == 15 and set(told) == before
    assert before != {(link.hash, link.parent) for link in pool.index.links()}


def test_a_snapshot_of_a_large_pool_pauses() -> None:
    world = World(100_000, budget_bytes=1 << 40)
    session = world.attached()
    run(world, session, "a", list(range(8000)), 2001)
    made = list(snapshot_messages(world.cache, "pool"))
    sizes = [len(message.hashes) for message in made if message is not None]
    assert sum(sizes) == 2000 and max(sizes) <= MAX_LINKS and made.count(None) >= 200_000 // 4096
    assert not [message for message in snapshot_messages(world.cache, "other") if message is not None]


def long_sequence(world: World, pages: int) -> tuple[Session, Sequence]:
    session = world.attached()
    tokens = array("I", range(4 * pages))
    world.cache.calls.allocate(session.id, [Opening("a", Prompt(tokens[:1]), pages)], [])
    world.cache.calls.append(session.id, Steps(["a"], [0], [len(tokens)], tokens, [], []))
    return session, session.sequences["a"]


def test_a_long_sequence_is_told_in_slices_and_whole() -> None:
    world = World(3000)
    session, sequence = long_sequence(world, 2500)
    pool, message = world.cache.pool_of(session), pb.Sequence()
    pauses = sum(1 for _ in responses.fill_sequence(message, pool, session, sequence, tokens=True))
    assert pauses >= 2
    assert list(message.page_ids) == sequence.pages and list(message.tokens) == list(sequence.tokens)
    assert list(message.generations) == list(pool.table.generations(sequence.pages))


def test_a_sequence_that_ends_while_it_is_told_is_not_told() -> None:
    """What follows would be the generations of others' pages."""
    world = World(3000)
    session, sequence = long_sequence(world, 2500)
    work = responses.fill_sequence(pb.Sequence(), world.cache.pool_of(session), session, sequence, tokens=True)
    next(work)
    world.cache.calls.remove(session.id, ["a"])
    with pytest.raises(SequenceRemoved):
        next(work)
