# mypy: disable-error-code="attr-defined"
"""Clients and operators that mean ill, or have no luck."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services import healthcheck
from services.common import rpc
from services.common.edge.listener import Listener
from services.common.errors import ExceedsBudget, InvalidConfiguration, PoolUnknown, SequenceMismatch, ServiceError
from services.common.serving import Serving
from services.kvcache.arena import host as arenas
from services.kvcache.arena.host import FileArena, prepare_directory
from services.kvcache.cache.grant import Grant
from services.kvcache.config import Config
from services.kvcache.lease.process import ProcessTable
from services.kvcache.lease.witness import Process
from services.kvcache.pool import budget
from tests.kvcache.cache.demands import Demand, fork, grouped, growth, opening
from tests.kvcache.conftest import LAYOUT_PB, Running
from tests.kvcache.fakes import LAYOUT, World
from tests.polling import until
from tests.processes import ROOT, Service, kvcache


def stub_of(service: Service) -> kvcache_pb2_grpc.KvCacheServiceStub:
    return kvcache_pb2_grpc.KvCacheServiceStub(service.channel)


# --- what clients send ---


@pytest.mark.parametrize("length", [129, 16_000])
def test_an_error_about_a_huge_name_still_tells_its_reason(running: Running, length: int) -> None:
    name = "\U000e0001" * length
    requests = [
        lambda: running.stub.DropPool(pb.DropPoolRequest(pool_id=name)),
        lambda: running.stub.EvictPages(pb.EvictPagesRequest(pool_id=name)),
        lambda: running.stub.ExplainPrefix(pb.ExplainPrefixRequest(pool_id=name, prompt=[1])),
    ]
    for ask in requests:
        with pytest.raises(grpc.RpcError) as failure:
            ask()
        assert isinstance(rpc.error_from(failure.value), PoolUnknown)
    with pytest.raises(grpc.RpcError) as failure:
        running.stub.ListSequences(pb.ListSequencesRequest(cursor=name))
    error = rpc.error_from(failure.value)
    assert (error.reason, error.field) == ("FIELD_INVALID", "cursor")


def test_no_other_prompt_and_salt_pass_for_a_replayed_opening() -> None:
    world = World(8)
    session = world.attached()
    [(_, grant)], _ = world.cache.calls.allocate(session.id, [opening("a", [0x007A7978, 5], 1, "s")], [])
    assert not isinstance(grant, Exception)
    # The same bytes, had they been told apart by a NUL alone: "s", NUL, "xyz", NUL, 5.
    [(_, error)], _ = world.cache.calls.allocate(session.id, [opening("a", [5], 1, "s\0xyz")], [])
    assert isinstance(error, SequenceMismatch)


@pytest.mark.parametrize(("pages", "quota"), [(8, 3), (3, None)])
def test_the_source_of_a_copy_pays_for_the_page_behind_it(pages: int, quota: int | None) -> None:
    world = World(pages)
    session = world.attached(max_pages=quota)

    def ask(demand: Demand) -> object:
        """The answer, if there is one."""
        told, _ = world.cache.calls.allocate(session.id, grouped([demand]), [])
        world.sound()
        return told[0][1] if told else None

    assert isinstance(ask(opening("a", [1, 2, 3], 1)), Grant)
    assert ask(growth("a", 0, [1, 2], 1, known=1)) is None
    assert isinstance(ask(fork("b", "a")), Grant)
    assert isinstance(ask(growth("b", 2, [], 1, known=1)), Grant)
    if quota is None:
        world.cache.calls.remove(session.id, ["a"])
        assert isinstance(ask(opening("c", [9], 1)), Grant)
    # All is held now, the source of b's copy among it; the same call with nothing to let go of is refused.
    assert isinstance(ask(growth("b", 2, [], 2, known=1)), ServiceError)
    assert isinstance(ask(growth("b", 2, [3], 2, known=1)), Grant)


def test_a_pool_that_cannot_be_made_leaves_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(8)

    def no_memory(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(budget, "Pool", no_memory)
    with pytest.raises(MemoryError):
        world.attached()
    assert [arena.closed for arena in world.arenas] == [True]


# --- which process is gone ---

THREAD_OUTLIVES_MAIN = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (print("running", flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def identity(pid: int) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(pid, int(fields[19]), os.readlink("/proc/self/ns/pid"))


def test_a_process_whose_first_thread_ended_is_not_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", THREAD_OUTLIVES_MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"running\n"
        process = identity(child.pid)
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        witness = ProcessTable().observe(process)
        assert witness is not None and not witness.gone()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert witness.gone(), "no thread is left, though nobody has waited for it"
    finally:
        child.kill()
        child.communicate()
    again = ProcessTable().observe(process)
    assert again is not None and again.gone()


def test_a_process_that_proc_hides_is_not_gone(tmp_path: Path) -> None:
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[1]")
    table = ProcessTable(tmp_path)
    assert table.observe(Process(os.getpid(), 1, "pid:[1]")) is None
    for unused in (2**22 + 1, 2**32 - 1):
        witness = table.observe(Process(unused, 1, "pid:[1]"))
        assert witness is not None and witness.gone()


# --- sockets ---


def listen(path: Path) -> Serving:
    return Serving("rocmforge.kvcache.v1.KvCacheService", [Listener(path=path)])


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A server's socket with more callers than it lets wait."""
    path = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        callers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(str(path))
        assert callers[-1].connect_ex(str(path)) == errno.EAGAIN
        yield path
        for caller in callers:
            caller.close()


async def start_and_stop(path: Path) -> None:
    serving = listen(path)
    try:
        await serving.start()
    finally:
        await serving.drain(0)


def test_a_server_too_busy_to_answer_keeps_its_socket(full: Path) -> None:
    inode = full.stat().st_ino
    with pytest.raises(InvalidConfiguration, match="another server is listening there"):
        asyncio.run(start_and_stop(full))
    assert full.stat().st_ino == inode


def test_a_server_that_lost_its_path_leaves_the_new_owner_alone(tmp_path: Path) -> None:
    asyncio.run(lose_the_path(tmp_path / "k.sock"))
    assert list(tmp_path.iterdir()) == []


async def lose_the_path(path: Path) -> None:
    first, second = listen(path), listen(path)
    await first.start()
    path.unlink()
    await second.start()
    await first.drain(0)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    await second.drain(0)


def test_a_stale_socket_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    asyncio.run(start_and_stop(path))
    path.write_text("precious")
    with pytest.raises(InvalidConfiguration, match="is not a socket"):
        asyncio.run(start_and_stop(path))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["k%41.sock", "k\udcff.sock"])
def test_a_path_that_grpc_would_read_as_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfiguration, match="UTF-8 and without %"):
        Config.read(["--listen", f"unix:{tmp_path}/{name}"], {})


# --- settings ---


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--memory", "1" + "0" * 400 + ".5"], {}, r"^--memory 10+\.5: expected a size .* to 9223372036854775807"),
        (["--memory", "9" * 5000], {}, "^--memory 9+: expected a size .* to 9223372036854775807"),
        (["--memory", "0"], {}, "^--memory 0: expected a size .* from 1 to"),
        (["--max-sessions", "9" * 5000], {}, "^--max-sessions 9+: expected an integer from 1 to 65536"),
        ([], {"ROCMFORGE_KVCACHE_LISTEN": "nonsense"}, "^ROCMFORGE_KVCACHE_LISTEN nonsense: expected unix:"),
        (["--arena-dir", "/run/\udcff"], {}, "^--arena-dir .*: expected a directory whose name is UTF-8"),
    ],
    ids=["fraction", "digits", "nothing", "whole", "variable", "bytes"],
)
def test_wild_settings_are_refused_by_name_and_limit(flags: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        Config.read(flags, environ)


def test_sizes_are_exact_where_floats_are_not() -> None:
    flags = ["--listen", "unix:/run/k.sock", "--memory", "8388607.9999990TiB"]
    assert Config.read(flags, {}).limits.budget_bytes == 83886079999990 * 2**40 // 10**7


def test_engines_elsewhere_are_told_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.read(["--arena-dir", "arena"], {}).arena_dir == tmp_path / "arena"


def test_the_health_check_goes_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvcache(tmp_path, "--listen", "127.0.0.1:0") as daemon:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert healthcheck.main([daemon.tcp(), "--timeout", "60"]) == 0, capsys.readouterr().err


# --- memory ---

KILLED_WHILE_RESERVING = """
import os, signal, sys
from pathlib import Path
from services.kvcache.arena.host import FileArena
from services.kvcache.pool.layout import PageLayout
from tests.polling import until
os.posix_fallocate = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
FileArena(Path(sys.argv[1]), "a", PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, dtype="f32"), 1, 1)
"""


def test_a_daemon_killed_while_it_reserves_memory_leaves_nothing_for_good(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", KILLED_WHILE_RESERVING, str(tmp_path)], cwd=ROOT)
    assert child.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    assert len(prepare_directory(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_arena_being_made_is_nobodys_to_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, first = arenas.fcntl.flock, threading.Event()

    def clear_before_the_first_lock(descriptor: object, how: int) -> None:
        if not first.is_set():
            first.set()
            assert prepare_directory(tmp_path) == ["a.arena"]
        lock(descriptor, how)

    monkeypatch.setattr(arenas.fcntl, "flock", clear_before_the_first_lock)
    arena = FileArena(tmp_path, "a", LAYOUT, 1, 1)
    assert Path(arena.file_path).stat().st_size == arena.size_bytes
    assert prepare_directory(tmp_path) == []
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_file_itself_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arenas.os, "open", full)
    with pytest.raises(ExceedsBudget, match="No space left"):
        FileArena(tmp_path, "a", LAYOUT, 1, 1)


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    for mode, refused in ((0o777, True), (0o770, True), (0o1777, True), (0o755, False)):
        tmp_path.chmod(mode)
        if refused:
            with pytest.raises(InvalidConfiguration, match=r"--arena-dir .* other users"):
                prepare_directory(tmp_path)
        else:
            prepare_directory(tmp_path)


# --- a log that nobody takes ---


def test_a_daemon_whose_log_is_gone_serves_expires_and_stops(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    address = f"unix:{tmp_path}/k.sock"
    daemon = subprocess.Popen(
        [sys.executable, "-m", "services.kvcache", "--listen", address, "--arena-dir", str(tmp_path / "arena")],
        cwd=ROOT,
        stderr=writing,
    )
    os.close(writing)
    try:
        healthcheck.wait_serving(address, alive=lambda: daemon.poll() is None, timeout_s=60)
        os.close(reading)
        with grpc.insecure_channel(address) as channel:
            stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
            for lost in (1, 2):
                request = pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB, pool_pages=8)
                request.ttl.FromSeconds(1)
                stub.OpenSession(request)
                until(lambda lost=lost: stub.GetStats(pb.GetStatsRequest()).expired_sessions == lost)  # type: ignore[misc]
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        assert not list((tmp_path / "arena").iterdir())
    finally:
        daemon.kill()
        daemon.wait()
