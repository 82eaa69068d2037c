"""Pages on a GPU between processes: a daemon that owns them, engines that map them, and either of them dying."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests.gpu.conftest import Engine, Refused, World
from tests.gpus import ROOT
from tests.polling import until
from tests.processes import Service


def stub(daemon: Service) -> kvcache_pb2_grpc.KvCacheServiceStub:
    return kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)


def pool(daemon: Service) -> pb.PoolStats:
    [only] = stub(daemon).GetStats(pb.GetStatsRequest()).pools
    return only


def opened_at_last(engine: Engine) -> Any:
    """Open as often as it takes: after a connection that failed, gRPC waits a while before it tries the next, and only
    one engine attaches at a time.
    """
    while True:
        try:
            return engine.open()
        except Refused as refused:
            if refused.reason not in ("KVCACHE_DOWN", "ATTACH_BUSY"):
                raise


def allocated_at_last(engine: Engine, name: str, pages: int) -> tuple[Any, list[int]]:
    """Open and allocate as often as it takes: with a lease of a second a call has a third of one, and the lease may end
    before the machine lets anybody use it.
    """
    opened = opened_at_last(engine)
    while True:
        try:
            return opened, engine.allocate(name, pages)
        except Refused as refused:
            if refused.reason == "SESSION_EXPIRED":
                opened = opened_at_last(engine)
            elif refused.reason != "KVCACHE_DOWN":
                raise


def test_engines_share_the_daemons_pages(one: World) -> None:
    daemon = one.daemon()
    writer, reader = one.engine(daemon), one.engine(daemon)
    opened = writer.open()
    assert opened["pages"] == 16
    assert reader.open() == opened
    assert pool(daemon).pool_id == "gpu test/gpu0" and pool(daemon).sessions == 2
    assert writer.allocate("a", 16) == list(range(16))
    for page in (0, 7, 15):
        writer.write(page, page + 1)
    assert [reader.read(page) for page in (0, 7, 15)] == [[1], [8], [16]]
    writer.close()
    assert pool(daemon).sessions == 1
    assert reader.read(15) == [16], "another's mapping is its own"
    reader.close()
    assert pool(daemon).sessions == 0
    assert [event["device"] for event in daemon.events("arena_made")] == ["0"], "one allocation for all of it"
    assert daemon.stop() == 0


def test_engines_that_come_at_the_same_time_all_attach(one: World) -> None:
    daemon = one.daemon()
    engines = [one.engine(daemon) for _ in range(4)]
    with ThreadPoolExecutor(len(engines)) as threads:
        opened = list(threads.map(opened_at_last, engines))
    assert len({answer["epoch"] for answer in opened}) == 1 and pool(daemon).sessions == 4
    engines[0].write(3, 33)
    assert [engine.read(3) for engine in engines] == [[33]] * 4
    assert len(daemon.events("arena_made")) == 1


def test_a_killed_engine_leaves_its_pages_to_the_next(one: World) -> None:
    # The lease and the drain are far longer than this test may take: only the proof of death can free the pages.
    daemon = one.daemon("--drain", "3600")
    victim, witness = one.engine(daemon, ttl_s=600), one.engine(daemon, ttl_s=600)
    victim.open()
    witness.open()
    victim.allocate("a", 3)
    victim.write(1, 99)
    victim.kill()
    until(lambda: pool(daemon).free_pages == 16)
    assert witness.read(1) == [99], "the memory is the daemon's, whoever wrote it"
    heir = one.engine(daemon, ttl_s=600)
    heir.open()
    assert sorted(heir.allocate("b", 16)) == list(range(16))
    assert not stub(daemon).Fsck(pb.FsckRequest()).violations
    heir.kill()
    witness.close()
    until(lambda: not pool(daemon).sessions and not pool(daemon).quarantined_pages)
    stub(daemon).DropPool(pb.DropPoolRequest(pool_id="gpu test/gpu0"))
    assert stub(daemon).GetStats(pb.GetStatsRequest()).arena_bytes == 0


def test_an_engine_outlives_its_daemon_and_attaches_to_the_next(one: World) -> None:
    daemon = one.daemon()
    engine = one.engine(daemon, ttl_s=1)
    first = engine.open()
    engine.write(2, 5)
    daemon.kill()
    # A kernel may be in flight when the daemon dies: what is mapped has to stay.
    assert engine.read(2) == [5]
    engine.write(2, 6)
    until(lambda: not engine.may_launch())
    with pytest.raises(Refused) as caught:
        engine.open()
    assert caught.value.reason == "KVCACHE_DOWN"
    again = one.daemon()
    second, pages = allocated_at_last(engine, "a", 16)
    assert second["epoch"] != first["epoch"] and pages == list(range(16))
    engine.write(2, 7)
    other = one.engine(again)
    other.open()
    assert other.read(2) == [7]


def test_an_engine_that_was_stopped_opens_anew(one: World) -> None:
    daemon = one.daemon("--drain", "1")
    engine = one.engine(daemon, ttl_s=1)
    allocated_at_last(engine, "a", 4)
    engine.signal(signal.SIGSTOP)
    until(lambda: not pool(daemon).sessions)
    engine.signal(signal.SIGCONT)
    assert not engine.may_launch()
    assert len(allocated_at_last(engine, "b", 12)[1]) == 12
    engine.write(3, 1)
    assert engine.read(3) == [1]
    assert [event["event"] for event in daemon.events("arena_made")] == ["arena_made"], "the pool was there still"


#: Takes half of what a GPU has free, tells how much it has in all, and holds it to the end of its input.
HALF = """
import sys
from rocmforge.client.arena.gpu_ipc import Runtime
gpu = Runtime.load().gpu(0)
free, total = gpu.memory()
gpu.allocate(free // 2)
print(total, flush=True)
sys.stdin.read()
"""
LARGE_PAGE_BYTES = 4 << 20  # of 4096 tokens


def test_memory_that_the_gpu_does_not_have_free_is_refused_with_the_numbers(one: World) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HALF],
        cwd=ROOT,
        env=one.host.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        total = int(other.stdout.readline())
        daemon = one.daemon("--memory", str(total))
        pages = total // LARGE_PAGE_BYTES - 1
        engine = one.engine(daemon, pages=pages, ROCMFORGE_TEST_PAGE_SIZE="4096")
        with pytest.raises(Refused) as caught:
            engine.open()
        assert caught.value.reason == "EXCEEDS_BUDGET" and "bytes are free" in caught.value.message
        small = one.engine(daemon)
        assert small.open()["pages"] == 16


def test_a_budget_that_no_gpu_has_ends_the_daemon_at_once(one: World, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "services.kvcache", "--device", "gpu", "--memory", "64TiB"),
            *("--listen", f"unix:{tmp_path}/k.sock"),
        ],
        cwd=ROOT,
        env=one.host.environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 2 and "--memory 70368744177664 bytes" in done.stderr, done.stderr
    assert "the largest GPU has" in done.stderr


OWN = """
import sys
from services.common.errors import GpuError
from rocmforge.client.arena.gpu_ipc import Runtime
from tests.polling import until
gpu = Runtime.load().gpu(0)
pointer = gpu.allocate(1 << 20)
handle = gpu.export(pointer)
try:
    gpu.open(handle)
except GpuError as error:
    print(error.message)
gpu.free(pointer)
"""


def test_a_process_cannot_open_its_own_memory_and_is_told_so(one: World) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN], cwd=ROOT, env=one.host.environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "two processes" in done.stdout, done.stdout


def test_the_contract_of_arenas_holds(one: World) -> None:
    """tests/contract/test_arena.py, in a process that has the GPU."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/contract/test_arena.py",
        "-k",
        "gpu",
    ]
    done = subprocess.run(command, cwd=ROOT, env=one.host.environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout and "skipped" not in done.stdout, done.stdout


# --- two GPUs ---------------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_pool_of_its_own(two: World) -> None:
    daemon = two.daemon()
    first, second = two.engine(daemon, 0), two.engine(daemon, 1)
    assert first.open()["id"] != second.open()["id"]
    first.write(0, 1)
    second.write(0, 2)
    assert (first.read(0), second.read(0)) == ([1], [2])
    pools = stub(daemon).GetStats(pb.GetStatsRequest()).pools
    assert {(one.pool_id, one.device_ordinal) for one in pools} == {("gpu test/gpu0", 0), ("gpu test/gpu1", 1)}


@pytest.mark.parametrize("visible", ["1", "1,0"])
def test_an_engine_that_numbers_its_gpus_otherwise_is_refused(two: World, visible: str) -> None:
    daemon = two.daemon()
    engine = two.engine(daemon, 0, HIP_VISIBLE_DEVICES=visible, CUDA_VISIBLE_DEVICES=visible)
    with pytest.raises(Refused) as caught:
        engine.open()
    assert caught.value.reason == "ATTACH_MISMATCH" and "HIP_VISIBLE_DEVICES" in caught.value.message
    assert pool(daemon).sessions == 0


def test_a_gpu_that_the_daemon_does_not_see_is_refused(two: World) -> None:
    daemon = two.daemon(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="0")
    engine = two.engine(daemon, 1)
    with pytest.raises(Refused) as caught:
        engine.open()
    assert caught.value.reason == "FIELD_INVALID"
    assert "device_ordinal is 1; this daemon's pages are on GPUs, and it has 1" in caught.value.message


def test_nothing_is_left_behind(two: World, tmp_path: Path) -> None:
    """On the stand-in, where device memory can be listed by whom it is of."""
    if two.host.is_real:
        pytest.skip("no GPU tells who has its memory")
    from tests.simulators.rocm import standin

    daemon = two.daemon()
    engine = two.engine(daemon, 1)
    engine.open()
    machine = standin.machine_of(dict(two.host.environment))
    assert len(standin.leftovers(machine)) == 1
    engine.close()
    assert daemon.stop() == 0
    assert standin.leftovers(machine) == []
