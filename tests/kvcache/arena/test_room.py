"""What the daemon says of a budget that its file system, or its GPUs, cannot hold: at its start, and of each arena."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.errors import ExceedsBudget, InvalidConfiguration
from services.kvcache.arena.host import FileArena
from services.kvcache.arena.room import Room, check_directory, check_gpus, default_memory
from services.kvcache.config import MEMORY, Config
from tests.fakegpu import Machine
from tests.kvcache.conftest import LAYOUT_PB
from tests.kvcache.fakes import LAYOUT
from tests.kvcache.ongpus import OnGpus
from tests.processes import Service

MIB = 1 << 20


def statvfs(blocks: int, free: int) -> Callable[[Path], Any]:
    """A file system of so many MiB."""

    def told(path: Path) -> Any:
        return SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=MIB)

    return told


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_room_of_a_directory_that_is_still_to_be_made_is_that_of_its_file_system(tmp_path: Path) -> None:
    found, there = Room.of(tmp_path / "none" / "arena"), os.statvfs(tmp_path)
    assert found is not None and found.total == there.f_blocks * there.f_frsize


def test_a_file_system_without_bounds_or_that_tells_nothing_has_no_room_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(path)

    for answer in (statvfs(0, 0), refused):
        monkeypatch.setattr(os, "statvfs", answer)
        assert Room.of(tmp_path) is None
    check_directory(tmp_path, 1 << 60, None)
    assert default_memory(256 * MIB, None) == 256 * MIB


def test_a_budget_beyond_the_file_system_is_refused_and_one_it_just_holds_is_not(tmp_path: Path) -> None:
    there = Room(total=64 * MIB, free=64 * MIB)
    with structlog.testing.capture_logs() as events:
        check_directory(tmp_path, 64 * MIB, there)
    assert events == []
    with pytest.raises(InvalidConfiguration) as caught:
        check_directory(tmp_path, 64 * MIB + 1, there)
    message = caught.value.message
    assert caught.value.field == "--memory" and str(tmp_path) in message
    assert f"--memory {64 * MIB + 1} bytes" in message and f"has only {64 * MIB} bytes (64 MiB)" in message
    for remedy in ("lower --memory", "another --arena-dir", "--shm-size"):
        assert remedy in message


def test_a_budget_beyond_what_is_free_is_logged_with_the_numbers(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as events:
        check_directory(tmp_path, 32 * MIB, Room(total=64 * MIB, free=31 * MIB))
    [event] = events
    assert (event["event"], event["log_level"]) == ("arena_room_short", "warning")
    assert (event["memory_bytes"], event["free_bytes"], event["total_bytes"]) == (32 * MIB, 31 * MIB, 64 * MIB)
    assert "free space" in event["change"]


def test_the_default_is_three_quarters_of_a_small_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*flags: str) -> int:
        return Config.read(
            ["--arena-dir", str(tmp_path), "--listen", "unix:/run/k.sock", *flags], {}
        ).limits.budget_bytes

    assert MEMORY == "256MiB"
    monkeypatch.setattr(os, "statvfs", statvfs(1024, 0))
    assert read() == 256 * MIB
    monkeypatch.setattr(os, "statvfs", statvfs(64, 64))
    assert read() == 48 * MIB
    assert read("--memory", "256MiB") == 256 * MIB, "what is said counts"
    assert read("--device", "gpu") == 256 * MIB, "its pages are not there"
    told = Config.read(["--arena-dir", str(tmp_path), "--listen", "unix:/run/k.sock"], {}).echo
    assert told["settings"]["memory"] == 48 * MIB and "memory" not in told["origins"]


def test_an_arena_that_does_not_fit_says_what_is_free_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "statvfs", statvfs(64, 3))
    with pytest.raises(ExceedsBudget) as caught:
        FileArena(tmp_path, "a", LAYOUT, 8, 1)
    message = caught.value.message
    assert f"No space left on device, with {3 * MIB} of its {64 * MIB} bytes free; free space there, or" in message
    assert "lower --memory" in message
    assert caught.value.metadata["free_bytes"] == str(3 * MIB)
    assert list(tmp_path.iterdir()) == []


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_budget_that_no_gpu_has_is_refused_and_contexts_are_not_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"--memory 1048577 bytes .*: the largest GPU has only 1048576 bytes"
    ):
        OnGpus(tmp_path, "--memory", str(MIB + 1), total=MIB)
    running = OnGpus(tmp_path, "--memory", str(MIB), total=MIB)
    assert not {"setDevice", "memGetInfo"} & set(running.api.calls)
    running.close()


def test_gpus_smaller_than_the_largest_are_logged() -> None:
    api = Machine(total=2 * MIB).process()
    api.getDeviceProperties = lambda ordinal: {"totalGlobalMem": 2 * MIB >> ordinal}  # type: ignore[method-assign]
    gpus = [api.gpu(0), api.gpu(1)]
    with structlog.testing.capture_logs() as events:
        check_gpus(gpus, MIB)
        assert events == []
        check_gpus(gpus, MIB + 1)
    [event] = events
    assert (event["event"], event["device"], event["total_bytes"]) == ("gpu_room_short", 1, MIB)


# --- the process, on a file system of 4 MiB ---------------------------------------------------------------------------

TMPFS = 'mount -t tmpfs -o size=4m,mode=0700 tmpfs "$1" && head -c "$2" /dev/zero >"$1/other" && shift 2 && exec "$@"'

#: Where nothing may be mounted: the same answers as such a tmpfs gives.
INJECTED = """
import errno, os, runpy, sys
from types import SimpleNamespace
free = (4 << 20) - int(sys.argv[1])
os.statvfs = lambda path: SimpleNamespace(f_blocks=1024, f_bavail=free // 4096, f_frsize=4096)
allocate = os.posix_fallocate
def posix_fallocate(descriptor, offset, size):
    if size > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    allocate(descriptor, offset, size)
os.posix_fallocate = posix_fallocate
sys.argv = sys.argv[3:]  # -m and the module's name stay behind
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def _may_mount(directory: Path) -> list[str] | None:
    """A command that runs another where it may mount; None where this user may not."""
    unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
    with contextlib.suppress(FileNotFoundError):
        command = [*unshare, "sh", "-c", TMPFS, "sh", str(directory), "0", "true"]
        if subprocess.run(command, capture_output=True, timeout=60).returncode == 0:
            return unshare
    return None


class Small:
    """Daemons with their arenas on a file system of 4 MiB, of which something else has ``taken`` bytes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.arenas = directory / "arena"
        self.arenas.mkdir(mode=0o700)
        self._unshare = _may_mount(self.arenas)

    @contextlib.contextmanager
    def daemon(self, *flags: str, taken: int = 0) -> Iterator[Service]:
        words = ["--arena-dir", str(self.arenas), *flags]
        launcher: Sequence[str] = [sys.executable, "-c", INJECTED, str(taken)]
        if self._unshare is not None:
            launcher = [*self._unshare, "sh", "-c", TMPFS, "sh", str(self.arenas), str(taken), sys.executable]
        log = self.directory / "kvcache.log"
        log.unlink(missing_ok=True)
        service = Service("services.kvcache", self.directory / "k.sock", words, log, launcher=launcher)
        try:
            yield service
        finally:
            service.close()


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path)


def test_a_daemon_that_never_fits_ends_at_once_with_both_numbers(small: Small) -> None:
    with small.daemon("--memory", "5MiB") as daemon:
        assert daemon.process.wait(60) == 2
        assert (
            f"--memory {5 * MIB} bytes (5 MiB): the file system of --arena-dir {small.arenas} has only" in daemon.log()
        )
        assert f"{4 * MIB} bytes (4 MiB); " in daemon.log() and "Traceback" not in daemon.log()


def test_the_default_fits_a_small_file_system(small: Small) -> None:
    with small.daemon() as daemon:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.wait_serving().channel)
        assert stub.GetStats(pb.GetStatsRequest()).budget_bytes == 3 * MIB
        opened = stub.OpenSession(pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB))
        assert 2 * MIB < opened.arena.size_bytes <= 3 * MIB
        assert not daemon.events("arena_room_short")


def test_too_little_that_is_free_is_logged_at_the_start_and_told_to_the_engine_that_needs_it(small: Small) -> None:
    with small.daemon("--memory", "3MiB", taken=2 * MIB) as daemon:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.wait_serving().channel)
        [event] = daemon.events("arena_room_short")
        assert (event["memory_bytes"], event["free_bytes"], event["total_bytes"]) == (3 * MIB, 2 * MIB, 4 * MIB)
        with pytest.raises(grpc.RpcError) as caught:
            stub.OpenSession(pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB))
        error = rpc.error_from(caught.value)
        assert error.reason == "EXCEEDS_BUDGET" and "of its 4194304 bytes free; free space there" in error.message
        fits = stub.OpenSession(pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB, pool_pages=8))
        assert fits.arena.size_bytes
