"""Memory is zero before somebody else gets it: a pool's on a GPU, and with ``--zero pages`` every page."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from tests.kvcache.cache.stateful.machine import CacheMachine, Direct, examples, new_world
from tests.kvcache.clients.messages import opening, report
from tests.kvcache.conftest import Running
from tests.kvcache.ongpus import PAGE, OnGpus
from tests.polling import until

PROMPT = list(range(1, 10))  # two whole pages and a token
SECRET = b"\xa5" * PAGE


class Machine(CacheMachine):
    """Random histories in which pages are zeroed a few at a time."""

    make_driver = staticmethod(lambda: Direct(new_world(zero_pages=True)))


Machine.TestCase.settings = examples(40)
TestMachine = Machine.TestCase


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A daemon that zeroes pages."""
    with contextlib.closing(Running(tmp_path, "--zero", "pages")) as one:
        yield one


def allocate(running: Running, session: str, *demands: pb.Demand, removed: tuple[str, ...] = ()) -> list[int]:
    request = pb.AllocatePagesRequest(session_id=session, demands=demands, remove_sequence_ids=removed)
    return [page for grant in running.stub.AllocatePages(request).grants for page in grant.page_ids]


def arena(running: Running) -> Path:
    [path] = running.config.arena_dir.glob("*.arena")
    return path


def write(running: Running, pages: list[int]) -> None:
    with arena(running).open("r+b") as file:
        for page in pages:
            file.seek(page * PAGE)
            file.write(SECRET)


def read(running: Running, pages: list[int]) -> set[bytes]:
    """The bytes that are in them."""
    data = arena(running).read_bytes()
    return {data[at : at + 1] for page in pages for at in range(page * PAGE, (page + 1) * PAGE)}


@pytest.mark.parametrize("published", [True, False])
def test_a_page_is_zero_when_another_salt_gets_it(running: Running, published: bool) -> None:
    session = running.session()
    for turn in range(20):
        salt = f"tenant {turn}"
        pages = allocate(running, session, opening(salt, PROMPT, 8, salt=salt))
        assert len(pages) == 8 and read(running, pages) == {b"\0"}, f"turn {turn}"
        write(running, pages)
        if published:
            request = pb.AppendTokensRequest(session_id=session, steps=report(salt, 0, PROMPT))
            running.stub.AppendTokens(request)
        allocate(running, session, removed=(salt,))
    assert not running.stub.Fsck(pb.FsckRequest(deep=True)).violations


def test_of_a_pool_that_is_full_of_cached_pages_too(running: Running) -> None:
    """Every grant evicts, so that nothing could be zeroed ahead."""
    session = running.session()
    for turn in range(12):
        prompt = [turn] * 33
        pages = allocate(running, session, opening(f"{turn}", prompt, 8))
        assert read(running, pages) == {b"\0"}
        write(running, pages)
        running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=report(f"{turn}", 0, prompt[:32])))
        allocate(running, session, removed=(f"{turn}",))
    [pool] = running.stub.GetStats(pb.GetStatsRequest()).pools
    assert pool.cached_pages == 8 and pool.zeroed_pages >= 88


def test_a_second_look_tells_of_no_other_pages(running: Running) -> None:
    session = running.session()
    first = allocate(running, session, opening("a", PROMPT, 8))
    write(running, first)
    allocate(running, session, removed=("a",))
    again = allocate(running, session, opening("b", [5, 5, 5], 6))
    assert read(running, again) == {b"\0"}
    request = pb.GetSequenceRequest(session_id=session, sequence_id="b")
    assert read(running, list(running.stub.GetSequence(request).sequence.page_ids)) == {b"\0"}


def test_nothing_is_told_of_a_page_before_it_is_zero(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    session = running.session()
    write(running, allocate(running, session, opening("a", PROMPT, 8)))
    [pool] = running.daemon.cache.pools
    zero, reached, opened = pool.arena.zero, threading.Event(), threading.Event()

    def late(pages: list[int]) -> None:
        reached.set()
        assert opened.wait(60)
        zero(pages)

    monkeypatch.setattr(pool.arena, "zero", late)
    allocate(running, session, removed=("a",))
    assert reached.wait(60)
    request = pb.AllocatePagesRequest(session_id=session, demands=[opening("b", PROMPT, 8)])
    call = running.stub.AllocatePages.future(request)
    until(lambda: pool.table.held_count)  # the transaction is over, and its answer waits
    assert running.stub.GetStats(pb.GetStatsRequest()).pools[0].held_pages == 8, "others are served"
    assert not call.done()
    opened.set()
    pages = list(call.result(60).grants[0].page_ids)
    assert len(pages) == 8 and read(running, pages) == {b"\0"}


def test_by_default_single_pages_are_left_as_they_are(tmp_path: Path) -> None:
    with contextlib.closing(Running(tmp_path)) as running:
        session = running.session()
        write(running, allocate(running, session, opening("a", PROMPT, 8)))
        allocate(running, session, removed=("a",))
        assert read(running, allocate(running, session, opening("b", PROMPT, 8))) == {b"\xa5"}


def test_the_memory_of_a_gpu_s_pool_begins_as_zeros(tmp_path: Path) -> None:
    """The fake machine's memory is 0xCD when it is allocated, as a runtime's may be another pool's."""
    with contextlib.closing(OnGpus(tmp_path)) as running:
        running.open(0)
        [block] = running.machine.blocks
        assert not any(bytes(block.buffer)[: 8 * PAGE])


def test_pages_of_a_gpu_are_zeroed(tmp_path: Path) -> None:
    with contextlib.closing(OnGpus(tmp_path, "--zero", "pages")) as running:
        opened = running.open(0)
        running.attach(opened)
        [block] = running.machine.blocks
        for turn in range(5):
            pages = allocate(running, opened.session_id, opening(f"{turn}", PROMPT, 8))
            found = bytes(block.buffer)
            assert len(pages) == 8 and not any(found[: 8 * PAGE]), f"turn {turn}"
            block.buffer[: 8 * PAGE] = list(SECRET * 8)
            allocate(running, opened.session_id, removed=(f"{turn}",))


def test_a_gpu_that_does_not_zero_grants_nothing_until_it_does(tmp_path: Path) -> None:
    with contextlib.closing(OnGpus(tmp_path, "--zero", "pages")) as running:
        opened = running.open(0)
        running.attach(opened)
        session = opened.session_id
        allocate(running, session, opening("a", PROMPT, 8))
        running.api.fail["memset"] = 1
        allocate(running, session, removed=("a",))
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                allocate(running, session, opening("b", PROMPT, 8))
            assert rpc.error_from(caught.value).reason == "GPU_ERROR"
        with pytest.raises(grpc.RpcError) as caught:
            running.stub.GetSequence(pb.GetSequenceRequest(session_id=session, sequence_id="b"))
        assert rpc.error_from(caught.value).reason == "GPU_ERROR"
        running.api.fail.clear()
        assert len(allocate(running, session, opening("b", PROMPT, 8))) == 8
