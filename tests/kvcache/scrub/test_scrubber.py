"""Published pages whose bytes change are found by a deep Fsck and by hits, and removed with their continuations."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import structlog

from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import GpuError
from services.kvcache.arena.access import Access
from services.kvcache.scrub import scrubber
from tests.kvcache.clients.messages import opening, report
from tests.kvcache.conftest import Running
from tests.kvcache.ongpus import PAGE, OnGpus, read_checksums

PROMPT = list(range(1, 14))  # three whole pages and a token


def fsck(running: Running, *, deep: bool = True) -> pb.FsckResponse:
    return running.stub.Fsck(pb.FsckRequest(deep=deep))


def stats(running: Running, at: int = 0) -> pb.PoolStats:
    return running.stub.GetStats(pb.GetStatsRequest()).pools[at]


def allocate(
    running: Running, session: str, *demands: pb.Demand, removed: tuple[str, ...] = ()
) -> list[pb.SequenceGrant]:
    request = pb.AllocatePagesRequest(session_id=session, demands=demands, remove_sequence_ids=removed)
    return list(running.stub.AllocatePages(request).grants)


def publish(
    running: Running, session: str, name: str, prompt: list[int], *, stays: bool = False, salt: str = ""
) -> list[int]:
    """Run a whole prompt, and end the sequence unless it ``stays``; its pages."""
    [grant] = allocate(running, session, opening(name, prompt, 4, salt=salt))
    steps = report(name, grant.cached_tokens, prompt[grant.cached_tokens :])
    running.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
    if not stays:
        allocate(running, session, removed=(name,))
    return list(grant.page_ids)


def hit(running: Running, session: str, name: str, prompt: list[int] = PROMPT) -> int:
    """Open another sequence with a prompt, and end it; how many tokens were found."""
    [grant] = allocate(running, session, opening(name, prompt, 0))
    allocate(running, session, removed=(name,))
    return grant.cached_tokens


def flip(running: Running, page: int, at: int = 5) -> None:
    """A bit of a page, in the arena's file."""
    [path] = running.config.arena_dir.glob("*.arena")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        arena[page * PAGE + at] ^= 0x10


def flip_on_gpu(running: OnGpus, page: int) -> None:
    """The same, in memory of the fake machine."""
    [block] = [block for block in running.machine.blocks if not block.freed]
    block.buffer[page * PAGE + 5] ^= 0x10


@pytest.fixture
def always(tmp_path: Path) -> Iterator[Running]:
    """A daemon that verifies every hit."""
    with contextlib.closing(Running(tmp_path, "--verify-share", "1")) as one:
        yield one


@pytest.fixture
def never(tmp_path: Path) -> Iterator[Running]:
    """A daemon that verifies no hit."""
    with contextlib.closing(Running(tmp_path, "--verify-share", "0")) as one:
        yield one


def test_a_deep_fsck_reads_every_published_page_and_finds_nothing(never: Running) -> None:
    session = never.session()
    publish(never, session, "a", PROMPT)
    answer = fsck(never)
    assert (answer.verified_pages, list(answer.violations)) == (3, [])
    assert stats(never).verified_pages == 3 and stats(never).corrupted_pages == 0
    assert fsck(never, deep=False).verified_pages == 0


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_deep_fsck_names_a_changed_page_and_removes_it_with_what_is_behind_it(never: Running, at: int) -> None:
    session = never.session()
    pages = publish(never, session, "a", PROMPT)
    other = publish(never, session, "b", [1, 2, 3, 4, 9, 9, 9, 9, 9])  # shares the first page
    assert other[0] == pages[0]
    fsck(never)
    flip(never, pages[at])
    behind = {0: 4, 1: 2, 2: 1}[at]
    with structlog.testing.capture_logs() as logs:
        answer = fsck(never)
    [violation] = answer.violations
    [event] = [log for log in logs if log["event"] == "page_corrupted"]
    assert f"page {pages[at]}, link {event['link']}" in violation and "its bytes have changed" in violation
    assert (event["pool"], event["page"], event["found_by"], event["holders"]) == ("pool", pages[at], "fsck", 0)
    assert [log["pages"] for log in logs if log["event"] == "pages_withdrawn"] == [behind]
    found = stats(never)
    assert (found.corrupted_pages, found.withdrawn_pages, found.cached_pages) == (1, behind, 4 - behind)
    assert hit(never, session, "c") == 4 * at
    assert not fsck(never).violations


def test_a_hit_finds_it_before_it_is_served(always: Running) -> None:
    session = always.session()
    pages = publish(always, session, "a", PROMPT)
    fsck(always)
    assert hit(always, session, "b") == 12
    flip(always, pages[1])
    with structlog.testing.capture_logs() as logs:
        assert hit(always, session, "c") == 4
    assert [log["found_by"] for log in logs if log["event"] == "page_corrupted"] == ["hit"]
    fsck(always)  # waits until what is behind it is gone
    assert stats(always).withdrawn_pages == 2
    again = publish(always, session, "d", PROMPT)
    assert again[0] == pages[0] and hit(always, session, "e") == 12, "it is computed anew, and cached as ever"


def test_without_verification_of_hits_it_is_served_until_a_deep_fsck(never: Running) -> None:
    session = never.session()
    pages = publish(never, session, "a", PROMPT)
    fsck(never)
    flip(never, pages[0])
    assert hit(never, session, "b") == 12
    assert fsck(never).violations and hit(never, session, "c") == 0


def test_a_changed_page_that_is_in_use_is_given_to_nobody_else(always: Running) -> None:
    session = always.session()
    pages = publish(always, session, "a", PROMPT, stays=True)
    fsck(always)
    flip(always, pages[0])
    with structlog.testing.capture_logs() as logs:
        assert hit(always, session, "b") == 0
    assert [log["holders"] for log in logs if log["event"] == "page_corrupted"] == [1]
    assert not [one for one in fsck(always).violations if "bytes" not in one]
    # It goes on with its pages, and nothing that it computes is cached.
    steps = report("a", 13, [1, 2, 3])
    always.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, steps=steps))
    assert stats(always).held_pages == 4 and hit(always, session, "c", [*PROMPT, 1, 2, 3, 4]) == 0
    allocate(always, session, removed=("a",))
    assert (stats(always).free_pages, stats(always).cached_pages) == (8, 0)
    assert not fsck(always).violations


def test_what_is_written_in_a_page_before_it_is_published_counts(never: Running) -> None:
    """A page has the checksum of its last life, not of an earlier one."""
    session = never.session()
    pages = publish(never, session, "a", PROMPT)
    fsck(never)
    never.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool"))
    flip(never, pages[0])
    assert sorted(publish(never, session, "b", PROMPT)) == sorted(pages)
    assert not fsck(never).violations


def test_two_salts_have_pages_of_their_own(never: Running) -> None:
    session = never.session()
    mine = publish(never, session, "a", PROMPT[:5], salt="mine")
    publish(never, session, "b", PROMPT[:5], salt="yours")
    fsck(never)
    flip(never, mine[0])
    assert len(fsck(never).violations) == 1
    assert stats(never).cached_pages == 1


def test_a_daemon_without_checksums_says_so(tmp_path: Path) -> None:
    with contextlib.closing(Running(tmp_path, "--checksums", "off", "--verify-share", "1")) as running:
        session = running.session()
        publish(running, session, "a", PROMPT)
        assert hit(running, session, "b") == 12 and not fsck(running, deep=False).violations
        with pytest.raises(grpc.RpcError) as caught:
            fsck(running)
        error = rpc.error_from(caught.value)
        assert (error.reason, error.field) == ("FIELD_INVALID", "deep") and "--checksums" in error.message


def test_not_all_of_very_many_are_named(never: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "MOST_NAMED", 2)
    session = never.session()
    pages = [publish(never, session, f"{first}", [first] * 5)[0] for first in range(5)]
    fsck(never)
    for page in pages:
        flip(never, page)
    answer = fsck(never)
    assert len(answer.violations) == 3 and answer.violations[2] == "3 more pages have changed since they were published"
    assert stats(never).corrupted_pages == 5


# --- on GPUs ----------------------------------------------------------------------------------------------------------


def attached(running: OnGpus) -> str:
    opened = running.open(0)
    running.attach(opened)
    return opened.session_id


def test_on_a_gpu(tmp_path: Path) -> None:
    with contextlib.closing(OnGpus(tmp_path, "--verify-share", "1")) as running:
        session = attached(running)
        pages = publish(running, session, "a", PROMPT)
        assert (fsck(running).verified_pages, hit(running, session, "b")) == (3, 12)
        flip_on_gpu(running, pages[1])
        assert hit(running, session, "c") == 4
        fsck(running)
        assert (stats(running).corrupted_pages, stats(running).withdrawn_pages) == (1, 2)


def test_a_kernel_that_does_not_run_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    def fails(gpu: Gpu, pointer: int, page_bytes: int, pages: list[int]) -> list[int]:
        raise GpuError("no compiler")

    running = OnGpus(tmp_path, "--verify-share", "1")
    running.daemon.read_checksums = fails
    with contextlib.closing(running), structlog.testing.capture_logs() as logs:
        session = attached(running)
        publish(running, session, "a", PROMPT)
        assert list(fsck(running).violations) == ["pool pool/gpu0: its pages cannot be verified: no compiler"]
        publish(running, session, "b", [9, 9, 9, 9, 9])
        assert hit(running, session, "c") == 12
        assert fsck(running).verified_pages == 0
    assert len([log for log in logs if log["event"] == "checksums_failed"]) == 1


# --- others meanwhile -------------------------------------------------------------------------------------------------


class Gate:
    """Blocks readers of pages until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, gpu: Gpu, pointer: int, page_bytes: int, pages: list[int]) -> list[int]:
        found = read_checksums(gpu, pointer, page_bytes, pages)
        self.reached.set()
        assert self.opened.wait(60)
        return found


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[OnGpus, Gate]]:
    gate = Gate()
    running = OnGpus(tmp_path, "--verify-share", "0")
    running.daemon.read_checksums = gate
    with contextlib.closing(running):
        yield running, gate
        gate.opened.set()


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_page_given_up_while_it_is_read_gets_no_checksum(gated: tuple[OnGpus, Gate]) -> None:
    running, gate = gated
    session = attached(running)
    pages = publish(running, session, "a", PROMPT[:5])
    assert gate.reached.wait(60)
    running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool/gpu0"))
    flip_on_gpu(running, pages[0])
    assert publish(running, session, "b", PROMPT[:5])[0] == pages[0]
    gate.opened.set()
    assert not fsck(running).violations


def test_others_are_served_while_pages_are_read(gated: tuple[OnGpus, Gate]) -> None:
    running, gate = gated
    session = attached(running)
    publish(running, session, "a", PROMPT)
    deep = in_thread(lambda: fsck(running))
    assert gate.reached.wait(60)
    assert hit(running, session, "b") == 12
    gate.opened.set()
    deep.join(60)
    assert not deep.is_alive() and stats(running).verified_pages == 3


def test_a_pool_may_be_dropped_while_its_pages_wait_to_be_read(gated: tuple[OnGpus, Gate]) -> None:
    """The memory is freed after the read in progress, and no other read begins."""
    running, gate = gated
    opened = running.open(0)
    running.attach(opened)
    publish(running, opened.session_id, "a", PROMPT)
    assert gate.reached.wait(60)
    running.end(opened)
    dropped = in_thread(lambda: running.stub.DropPool(pb.DropPoolRequest(pool_id="pool/gpu0")))
    assert not any(block.freed for block in running.machine.blocks)
    gate.opened.set()
    dropped.join(60)
    assert not dropped.is_alive() and all(block.freed for block in running.machine.blocks)
    publish(running, attached(running), "b", PROMPT)
    assert fsck(running).verified_pages == 3


def test_access_ends_at_once_however_often_it_is_asked_for() -> None:
    access = Access()
    with access.ending():
        pass
    with pytest.raises(ValueError, match="closed"), access.held():
        pass
