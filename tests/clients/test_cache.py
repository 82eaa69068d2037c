# mypy: disable-error-code="index, union-attr"
"""The session with a daemon: proof of the memory, the lease by our own clock, silence and restarts."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rocmforge.client import cache as kvclient
from rocmforge.client.arena.announced import Announced
from rocmforge.client.arena.host import map_pages
from rocmforge.client.cache import KvCache
from rocmforge.client.demands import STEP_TOKENS, Demand, Grant, Opening
from rocmforge.client.errors import (
    AttachMismatch,
    ExceedsPool,
    InvalidConfiguration,
    KvCacheDown,
    LayoutMismatch,
    SequenceUnknown,
    SessionExpired,
)
from rocmforge.client.layout import PageLayout
from rocmforge.client.lease import LEASE_SHARE, Lease, LeaseKeeper
from rocmforge.client.messages import grants as messages_grants
from rocmforge.client.options import Options
from rocmforge.client.process import process_identity
from rocmforge.client.step import Attempt
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.clients.recorder import Recorder
from tests.engine.fakes import Clock
from tests.kvcache.conftest import Running
from tests.polling import until
from tests.processes import kvcache

LAYOUT = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="f32")
CALL_S = kvclient.MAX_CALL_S  # as it is outside of these tests
OPENING = Demand("a", start=0, tokens=[], total_pages=2, known_pages=0, opening=Opening([1, 2, 3]))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are waited for however slow this machine is; a test that is about giving up says so."""
    monkeypatch.setattr(kvclient, "MAX_CALL_S", 60.0)
    monkeypatch.setattr(kvclient, "CLOSE_S", 60.0)
    monkeypatch.setattr(kvclient, "call_s", lambda lease: 60.0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(daemon: Running, clock: Clock) -> Iterator[KvCache]:
    one = made(daemon, clock=clock)
    yield one
    one.close()


def address(daemon: Running) -> str:
    return str(daemon.config.listeners[0])


def made(daemon: Running, **options: Any) -> KvCache:
    options.setdefault("pool_pages", 8)
    return KvCache(address(daemon), "pool", LAYOUT, **options)


# --- calls ---------------------------------------------------------------------------------------------------------


def test_prompts_too_long_for_one_call_are_sent_in_several(source: KvCache) -> None:
    source.reopen()
    source.start_step([OPENING], []).result()
    long = {name: [number] * (STEP_TOKENS // 2 + 1) for number, name in enumerate("bcd")}
    openings = [dataclasses.replace(OPENING, sequence_id=name, opening=Opening(long[name])) for name in long]
    too_long = dataclasses.replace(OPENING, sequence_id="x", opening=Opening([7] * (STEP_TOKENS + 1)))
    fork = Demand("e", start=0, tokens=[], total_pages=0, known_pages=0, parent="d")
    grants = source.start_step([openings[0], too_long, *openings[1:], fork], ["a"]).result()
    assert [grant.sequence_id for grant in grants] == ["b", "x", "c", "d", "e"]
    assert [len(grant.pages) for grant in grants] == [2, 0, 2, 2, 0], "the removal came first, and freed two of eight"
    assert [type(grant.error) for grant in grants] == [type(None), ExceedsPool, type(None), type(None), type(None)]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_is_the_daemon_s(daemon: Running, source: KvCache) -> None:
    source.reopen()
    assert source.pages.numpy().kv.shape == (8, 2, 2, 1, 4, 2) and source.pages.numpy().kv.dtype == np.float32
    assert source.epoch == daemon.daemon.epoch and source.total_pages == 8
    source.pages.numpy().kv[5, 1, 0, 0, 3] = [1.5, -2.0]
    other = made(daemon)
    other.reopen()
    assert other.pages.numpy().kv[5, 1, 0, 0, 3].tolist() == [1.5, -2.0]
    other.close()


def arena(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A made-up arena of two pages followed by a canary."""
    page = LAYOUT.page_bytes
    path = tmp_path / "arena"
    path.write_bytes(bytes(2 * page) + bytes(range(32)) + bytes(32))
    path = changes.pop("path", path)
    told = {"total_pages": 2, "page_bytes": page, "canary_offset": 2 * page, "size_bytes": 2 * page + 64}
    return {"path": path, "layout": LAYOUT, "announced": Announced(**{**told, **changes})}


def test_the_canary_is_read_and_answered(tmp_path: Path) -> None:
    told = arena(tmp_path)
    pages, seen = map_pages(**told)
    assert seen == bytes(range(32)) and pages.total_pages == 2
    assert told["path"].read_bytes()[-32:] == bytes(255 - byte for byte in range(32))


@pytest.mark.parametrize(
    "changes",
    [
        {"page_bytes": 4},
        {"total_pages": 0},
        {"total_pages": 3},
        {"size_bytes": 10**9},
        {"canary_offset": 2**40},
        {"path": Path("/proc/none/arena")},
        {"path": Path("/dev")},
    ],
    ids=str,
)
def test_memory_that_is_not_as_announced_is_not_touched(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(AttachMismatch):
        map_pages(**arena(tmp_path, **changes))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    told = arena(tmp_path)
    (tmp_path / "link").symlink_to(told["path"])
    with pytest.raises(AttachMismatch):
        map_pages(**{**told, "path": tmp_path / "link"})


def test_who_we_are() -> None:
    found = process_identity()
    assert found is not None
    pid, start_time, namespace = found
    assert pid == os.getpid() and start_time > 0 and namespace.startswith("pid:[")
    assert process_identity(Path("/proc/none")) is None


def test_a_pool_of_another_shape(daemon: Running, source: KvCache) -> None:
    source.reopen()
    other = KvCache(address(daemon), "pool", PageLayout(8, 2, 1, 2, "f32"))
    with pytest.raises(LayoutMismatch):
        other.reopen()
    other.close()


def test_types_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="pages of f64 are not supported"):
        KvCache("unix:/run/x.sock", "pool", PageLayout(4, 1, 1, 2, "f64"))


# --- the lease --------------------------------------------------------------------------------------------------------


def test_a_connection_takes_what_a_client_takes() -> None:
    options = list(inspect.signature(KvCache.__init__).parameters.values())
    keywords = [one.name for one in options if one.kind is inspect.Parameter.KEYWORD_ONLY]
    assert list(Options.__annotations__) == keywords


def test_without_a_session_nothing_can_be_launched_or_asked(source: KvCache) -> None:
    assert not source.may_write()
    with pytest.raises(SessionExpired):
        source.start_step([], [])
    with pytest.raises(SessionExpired):
        _ = source.pages


@pytest.mark.parametrize("reply_s", [0.0, 1.0, 30.0])
def test_the_last_step_ends_before_the_daemon_gives_its_pages_away(
    daemon: Running, clock: Clock, reply_s: float
) -> None:
    """The daemon counts its lease from when a call arrives, at the earliest when it was sent, however late the reply
    is. A step that is launched at the last moment has a seventh of the lease left.
    """
    ttl_s = 100.0
    source = made(daemon, clock=clock, ttl_s=ttl_s)
    source._keeper.start = lambda: None  # type: ignore[method-assign]
    source.reopen()

    def pass_by(seconds: float) -> None:
        clock.now += seconds
        daemon.now += seconds

    pass_by(10.0)
    sent_at, cache = clock.now, daemon.daemon.cache
    exchange = source.start_step([OPENING], [])
    source._caller.submit(int).result(60)  # the call before it was made, so it has arrived
    pass_by(reply_s)
    assert exchange.result()[0].error is None
    launched_at = clock.now
    while source.may_write():
        launched_at = clock.now
        assert clock.now < sent_at + ttl_s
        pass_by(0.25)
    assert launched_at > sent_at + ttl_s / 2, "and it is of use that long"
    daemon.now += launched_at + ttl_s / 7 - clock.now
    daemon.sweep()
    assert cache.expired_sessions == 0
    daemon.now += sent_at + ttl_s - (launched_at + ttl_s / 7)
    daemon.sweep()
    assert cache.expired_sessions == 1, "that is when the daemon's lease ends"
    source.close()


def test_a_call_renews_from_when_it_was_sent(daemon: Running, clock: Clock) -> None:
    source = made(daemon, clock=clock, ttl_s=600)
    source._keeper.start = lambda: None  # type: ignore[method-assign]
    source.reopen()
    began = clock.now
    clock.now += 50
    exchange = source.start_step([OPENING], [])
    clock.now += 100  # the reply took its time
    assert exchange.result()[0].error is None
    clock.now = began + 50 + 600 * LEASE_SHARE - 1
    assert source.may_write()
    clock.now += 1
    assert not source.may_write()
    source.close()


def test_the_lease_is_kept_without_any_call_of_the_engine_s(daemon: Running, clock: Clock) -> None:
    source = made(daemon, clock=clock, ttl_s=1)
    renewed = threading.Event()
    renew = source._keeper._renew

    def observed(lease: Lease) -> None:
        renew(lease)
        renewed.set()

    source._keeper._renew = observed
    source.reopen()
    for _ in range(3):
        clock.now += 0.7
        assert renewed.wait(60)
        renewed.clear()
        assert source.may_write()
    source.close()


def test_silence_is_asked_again_and_logged_once(clock: Clock, log: Recorder) -> None:
    lease, attempts = Lease(epoch=1, ttl_s=0.01, renewed_at=clock.now - 1), list[Lease]()
    enough = threading.Event()

    def silence(renewed: Lease) -> None:
        attempts.append(renewed)
        if len(attempts) == 5:
            enough.set()
        raise KvCacheDown("silence")

    keeper = LeaseKeeper(lambda: lease, silence, clock, log)
    keeper.start()
    keeper.start()
    assert enough.wait(30)
    keeper.close()
    assert not lease.expired and log.names() == ["lease_not_renewed"]


def test_silence_lasts_from_the_first_renewal_that_failed_until_a_call_succeeds(clock: Clock, log: Recorder) -> None:
    lease = Lease(epoch=1, ttl_s=0.01, renewed_at=clock.now - 1)
    began, attempts, enough = clock.now, list[int](), threading.Event()

    def silence(renewed: Lease) -> None:
        attempts.append(1)
        clock.now += 0.001
        if len(attempts) == 3:
            enough.set()
        raise KvCacheDown("silence")

    keeper = LeaseKeeper(lambda: lease, silence, clock, log)
    keeper.start()
    assert enough.wait(30)
    keeper.close()
    assert lease.silent_since == began
    lease.renewed(clock.now, epoch=1)
    assert lease.silent_since is None


def test_a_session_heard_to_be_over_launches_nothing_more(daemon: Running, clock: Clock) -> None:
    source = made(daemon, clock=clock, ttl_s=1)
    source.reopen()
    daemon.now += 2
    daemon.sweep()
    clock.now += 0.7  # by which it would last
    until(lambda: not source.may_write())  # the lease's thread finds out
    with pytest.raises(SessionExpired):
        source.start_step([], []).result()
    source.reopen()
    assert source.may_write()
    source.close()


def test_a_step_that_is_refused_for_its_session_is_the_last(daemon: Running, source: KvCache, clock: Clock) -> None:
    """The lease's thread has no reason to call yet, and its clock says that there is time."""
    source.reopen()
    daemon.now += 11
    daemon.sweep()
    assert source.may_write()
    with pytest.raises(SessionExpired):
        source.step([])
    assert not source.may_write()


def test_a_reply_becomes_grants_beside_the_engines_thread(source: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    source.reopen()
    source.start_step([OPENING], []).result()
    made, grants = list[list[Grant]](), messages_grants
    done = threading.Event()

    def watched(*reply: Any) -> list[Grant]:
        made.append(grants(*reply))
        done.set()
        return made[-1]

    monkeypatch.setattr("rocmforge.client.cache.grants", watched)
    known = dataclasses.replace(OPENING, opening=None, total_pages=2, known_pages=2)
    exchange = source.start_step([known, dataclasses.replace(known, sequence_id="b")], [])
    assert done.wait(60), "nobody has asked for the result"
    told, refused = exchange.result()
    assert (told.sequence_id, told.pages, told.error) == ("a", (), None)
    assert isinstance(refused.error, SequenceUnknown) and refused.sequence_id == "b"
    assert made == [[told, refused]]


# --- replies that do not come -----------------------------------------------------------------------------------------


class Silent(grpc.RpcError):
    """A call that nobody answered."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "silence"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Lossy:
    """Stands before a future: the call was served, and its reply is lost."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self) -> Any:
        self._future.result()
        raise Silent


def losing(source: KvCache, replies: int) -> list[pb.AllocatePagesRequest]:
    """Lose the next replies; collects what was sent."""
    send, sent = source.send, list[pb.AllocatePagesRequest]()

    def lossy(parts: Any, lease: Any, traceparent: str) -> Any:
        sent.extend(request for request, _ in parts)
        future = send(parts, lease, traceparent)
        return Lossy(future) if len(sent) <= replies else future

    source.send = lossy  # type: ignore[method-assign]
    return sent


def test_a_lost_reply_is_asked_for_again_in_the_same_words(daemon: Running, source: KvCache) -> None:
    source.reopen()
    sent = losing(source, 1)
    [grant] = source.start_step([OPENING], ["gone"]).result()
    assert grant.pages == (0, 1)
    assert len(sent) == 2 and sent[0] == sent[1]
    assert daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].held_pages == 2


def test_after_a_bounded_number_of_lost_replies_nobody_is_there(source: KvCache) -> None:
    source.reopen()
    sent = losing(source, 100)
    with pytest.raises(KvCacheDown):
        source.start_step([OPENING], []).result()
    assert len(sent) == 2
    assert source.may_write()  # the lease lasts


def test_nobody_at_the_address(tmp_path: Path) -> None:
    source = KvCache(f"unix:{tmp_path}/none.sock", "pool", LAYOUT)
    with pytest.raises(KvCacheDown) as caught:
        source.reopen()
    assert "none.sock" in caught.value.message and caught.value.retry_after_s
    source.close()


def test_a_daemon_that_is_slow_to_greet_has_the_whole_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is busy when it is connected to is not one that is not there."""
    monkeypatch.setattr(kvclient, "MAX_CALL_S", CALL_S)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "busy.sock"))
        listener.listen()
        source = KvCache(f"unix:{tmp_path / 'busy.sock'}", "pool", LAYOUT)
        with pytest.raises(KvCacheDown, match="Deadline Exceeded"):
            source.reopen()
        source.close()


def test_another_run_of_the_daemon_is_another_epoch(daemon: Running, source: KvCache) -> None:
    source.reopen()
    daemon.daemon.cache.epoch += 1
    with pytest.raises(SessionExpired):
        source.start_step([], []).result()
    assert not source.may_write()


def mappings(directory: Path) -> int:
    """How many arenas below a directory this process maps; the daemon, too, runs in it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(directory / "arena") in line for line in lines)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is freed but what no name refers to any more: a cycle may wait for the collector as long as it likes."""
    gc.disable()
    yield
    gc.enable()


def test_a_lost_session_s_memory_is_unmapped_when_the_daemon_is_gone(
    tmp_path: Path, clock: Clock, uncollected: None
) -> None:
    """Or the next daemon's arena may not fit beside it in a file system that has room for one."""
    daemon = Running(tmp_path)
    source = made(daemon, clock=clock)
    source.reopen()
    losing(source, 100)
    for _ in range(3):
        with pytest.raises(KvCacheDown):
            source.start_step([OPENING], []).result()
    before = mappings(tmp_path)
    daemon.close()
    assert mappings(tmp_path) == before - 1 == 1
    with pytest.raises(KvCacheDown):
        source.reopen()
    assert mappings(tmp_path) == 0
    source.close()


def test_memory_that_could_not_be_attached_is_unmapped(
    source: KvCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    call = source._call

    def refused(method: str, *given: Any) -> Any:
        if method == "AttachSession":
            raise AttachMismatch("other memory")
        return call(method, *given)

    monkeypatch.setattr(source, "_call", refused)
    try:
        source.reopen()
    except AttachMismatch as error:
        kept = error  # as a log or a refusal may, with every frame that it came through
    assert mappings(tmp_path) == 1, kept


# --- who makes a call -------------------------------------------------------------------------------------------------


def test_a_call_that_nobody_has_begun_is_made_by_who_asks_for_its_reply() -> None:
    busy, made_by = threading.Event(), list[int]()

    def call() -> str:
        made_by.append(threading.get_ident())
        return "reply"

    with ThreadPoolExecutor(1) as caller:
        blocking = caller.submit(busy.wait)
        assert Attempt(caller, call).result() == "reply"
        assert made_by == [threading.get_ident()]
        busy.set()
        blocking.result()
    assert len(made_by) == 1, "the other thread makes it no second time"


def test_a_call_under_way_is_waited_for() -> None:
    begun, end, made_by = threading.Event(), threading.Event(), list[int]()

    def call() -> str:
        made_by.append(threading.get_ident())
        begun.set()
        end.wait()
        raise Silent

    with ThreadPoolExecutor(1) as caller:
        attempt = Attempt(caller, call)
        begun.wait()
        end.set()
        with pytest.raises(Silent):
            attempt.result()
    assert len(made_by) == 1 and made_by != [threading.get_ident()]


# --- giving back ------------------------------------------------------------------------------------------------------


def sessions(daemon: Running) -> int:
    return int(daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].sessions)


def test_closing_ends_the_session_and_its_sequences(daemon: Running) -> None:
    source = made(daemon)
    source.reopen()
    source.start_step([OPENING], []).result()
    assert sessions(daemon) == 1
    source.close()
    pool = daemon.stub.GetStats(pb.GetStatsRequest()).pools[0]
    assert (pool.sessions, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)


def test_closing_twice_is_closing_once_also_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session that the first could not close is not the second's to close: its channel is gone."""
    monkeypatch.setattr(kvclient, "CLOSE_S", 0.2)
    with kvcache(tmp_path) as daemon:
        source = KvCache(daemon.address, "p", LAYOUT)
        source.reopen()
        source.step([OPENING])
        daemon.kill()
        source.close()
        source.close()
        assert not source.may_write()
        with pytest.raises(SessionExpired):
            source.step([OPENING])


def test_a_session_that_is_closed_is_not_opened_again(daemon: Running) -> None:
    source = made(daemon)
    source.reopen()
    source.close()
    with pytest.raises(SessionExpired, match="closed"):
        source.reopen()
    assert sessions(daemon) == 0


def test_opening_anew_ends_the_session_before(daemon: Running, source: KvCache) -> None:
    source.reopen()
    source.start_step([OPENING], []).result()
    source.reopen()
    assert sessions(daemon) == 1
    assert daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].held_pages == 0


def test_a_session_whose_memory_is_wrong_is_not_left_behind(
    daemon: Running, source: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise AttachMismatch("other memory")

    monkeypatch.setattr("rocmforge.client.cache.map_pages", wrong)
    with pytest.raises(AttachMismatch):
        source.reopen()
    assert sessions(daemon) == 0


def lost(daemon: Running) -> list[pb.LostSession]:
    return list(daemon.stub.GetStats(pb.GetStatsRequest()).lost_sessions)


def lose(daemon: Running) -> None:
    daemon.now += 11
    daemon.sweep()
    daemon.now += 100
    daemon.sweep()


def test_opening_anew_vouches_for_a_session_that_was_lost_long_ago(daemon: Running, source: KvCache) -> None:
    source.reopen()
    source.start_step([OPENING], []).result()
    lose(daemon)
    [one] = lost(daemon)
    assert (one.quarantined_pages, one.pid, one.fence) == (2, os.getpid(), pb.FENCE_ALIVE)
    source.reopen()
    assert lost(daemon) == []
    assert daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].free_pages == 8


def test_no_session_is_opened_before_the_last_one_was_heard_to_be_closed(
    daemon: Running, source: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would vouch for its pages."""
    source.reopen()
    source.start_step([OPENING], []).result()
    lose(daemon)
    call, closes = source._timed, list[str]()

    def deaf(method: str, request: Any, timeout_s: float) -> Any:
        if method == "CloseSession":
            closes.append(request.session_id)
            if len(closes) < 3:
                raise Silent
        return call(method, request, timeout_s)

    monkeypatch.setattr(source, "_timed", deaf)
    for _ in range(2):
        with pytest.raises(KvCacheDown):
            source.reopen()
    assert sessions(daemon) == 0 and len(lost(daemon)) == 1
    source.reopen()
    assert len(set(closes)) == 1 and sessions(daemon) == 1 and lost(daemon) == []


def test_a_close_that_is_refused_is_not_asked_for_again(source: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    source.reopen()
    call = source._call

    def refusing(method: str, request: Any, timeout_s: float) -> Any:
        if method == "CloseSession":
            raise SequenceUnknown("no")
        return call(method, request, timeout_s)

    monkeypatch.setattr(source, "_call", refusing)
    source.reopen()
    assert source.may_write()
