# mypy: disable-error-code="arg-type, misc"
"""The daemon with its pages on GPUs: which GPU, whose turn, what is refused, and when memory is given back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import structlog

from rocmforge.client.arena.gpu_ipc import Runtime
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import ExceedsBudget, InvalidConfiguration, ServiceError
from services.kvcache.api.requests import read_layout
from services.kvcache.arena.device import GRANULE_BYTES, DeviceArena
from services.kvcache.config import Config
from services.kvcache.pool.budget import CANARY_SLOT_BYTES
from services.kvcache.server import Daemon
from tests.fakegpu import OUT_OF_MEMORY, Machine
from tests.kvcache.clients.messages import opening
from tests.kvcache.conftest import LAYOUT_PB
from tests.kvcache.ongpus import CANARIES, PAGE, OnGpus


@pytest.fixture
def running(tmp_path: Path) -> Iterator[OnGpus]:
    """Two GPUs of 1 MiB, and a budget of 1 MiB."""
    one = OnGpus(tmp_path)
    yield one
    one.close()
    assert [one.machine.used(device) for device in (0, 1)] == [0, 0], "a daemon that ends gives everything back"


def refused(call: Callable[[], Any]) -> ServiceError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return rpc.error_from(caught.value)


def test_a_pool_is_one_allocation_exported_once(running: OnGpus) -> None:
    first = running.open(1)
    assert first.pool_id == "pool/gpu1"
    assert (first.arena.device_ordinal, first.arena.device_id) == (1, "0000:83:00.0")
    assert len(first.arena.device_ipc_handle) == 64 and not first.arena.file_path
    assert first.arena.size_bytes == running.arena_bytes()
    running.attach(first)
    second = running.open(1)
    running.attach(second)
    assert second.arena.device_ipc_handle == first.arena.device_ipc_handle
    assert second.arena.canary_offset != first.arena.canary_offset
    assert (running.api.calls.count("malloc"), running.api.calls.count("ipcGetMemHandle")) == (1, 1)
    assert running.machine.used(1) == running.arena_bytes() and running.machine.used(0) == 0
    [pool] = running.stub.GetStats(pb.GetStatsRequest()).pools
    assert (pool.pool_id, pool.device_ordinal, pool.sessions) == ("pool/gpu1", 1, 2)


@pytest.mark.parametrize(("total", "allocated"), [(4 << 20, 4 << 20), (3 << 20, None)])
def test_an_arena_is_allocated_in_whole_granules_of_the_driver(total: int, allocated: int | None) -> None:
    # Else the engine's mapping of it is made of the smallest pages there are, at half the speed.
    machine = Machine(total=total)
    layout = read_layout(LAYOUT_PB)
    pages = GRANULE_BYTES // layout.page_bytes

    def make() -> DeviceArena:
        return DeviceArena(machine.process().gpu(0), layout, pages, 4)

    if allocated is None:
        with pytest.raises(ExceedsBudget, match="does not fit on GPU 0"):
            make()
        assert machine.used(0) == 0
        return
    arena = make()
    assert (machine.used(0), arena.size_bytes) == (allocated, GRANULE_BYTES + 4 * CANARY_SLOT_BYTES)
    arena.close()
    assert machine.used(0) == 0


def test_the_daemon_makes_the_device_current_before_it_touches_it(running: OnGpus) -> None:
    running.attach(running.open(1))
    touching = [at for at, name in enumerate(running.api.calls) if name in ("malloc", "memcpy", "ipcGetMemHandle")]
    assert touching
    assert all(running.api.calls[at - 1] == "setDevice" for at in touching)


def test_pages_are_granted_and_shared_as_ever(running: OnGpus) -> None:
    opened = running.open(0)
    running.attach(opened)
    request = pb.AllocatePagesRequest(session_id=opened.session_id, demands=[opening("a", range(9), 3)])
    assert list(running.stub.AllocatePages(request).grants[0].page_ids) == [0, 1, 2]
    explain = pb.ExplainPrefixRequest(pool_id=opened.pool_id, prompt=range(9))
    assert running.stub.ExplainPrefix(explain).pages[0].outcome == pb.PAGE_OUTCOME_NEVER_SEEN
    assert not running.stub.Fsck(pb.FsckRequest()).violations


def test_namesakes_on_two_gpus_are_two_pools_with_a_budget_each(running: OnGpus) -> None:
    most = ((1 << 20) - CANARIES) // PAGE
    for device in (0, 1):
        running.attach(running.open(device, pool_pages=most))
    stats = running.stub.GetStats(pb.GetStatsRequest())
    assert {pool.pool_id for pool in stats.pools} == {"pool/gpu0", "pool/gpu1"}
    assert stats.arena_bytes == 2 * running.arena_bytes(most) > stats.budget_bytes
    assert not running.stub.Fsck(pb.FsckRequest()).violations
    error = refused(lambda: running.open(1, pool_id="other"))
    assert (error.reason, error.field) == ("EXCEEDS_BUDGET", "pool_pages")


@pytest.mark.parametrize(
    ("device", "words"), [(None, "is unset; this daemon's pages are on GPUs"), (2, "is 2; .* has 2: it must be 0 to 1")]
)
def test_the_gpu_has_to_be_one_of_the_daemons(running: OnGpus, device: int | None, words: str) -> None:
    error = refused(lambda: running.open(device))
    assert (error.reason, error.field) == ("FIELD_INVALID", "device_ordinal")
    assert error.metadata["limit"] == "1"
    assert re.search(words, error.message)


# --- one attaches at a time -------------------------------------------------------------------------------------------


def test_the_next_engine_waits_until_the_first_has_attached(running: OnGpus) -> None:
    first = running.open(0)
    for device in (0, 1):
        error = refused(lambda device=device: running.open(device, pool_id="other"))
        assert (error.code, error.reason, error.retry_after_s) == ("RESOURCE_EXHAUSTED", "ATTACH_BUSY", 0.2)
    assert len(running.stub.GetStats(pb.GetStatsRequest()).pools) == 1, "what was refused changed nothing"
    running.attach(first)
    running.attach(running.open(0))


def test_an_engine_that_leaves_or_is_slow_does_not_keep_others_waiting_for_ever(running: OnGpus) -> None:
    running.end(running.open(0))
    slow = running.open(0, pid=7, ttl={"seconds": 600})
    running.now += 9.9
    assert refused(lambda: running.open(0)).reason == "ATTACH_BUSY"
    running.now += 0.2
    running.attach(running.open(0))
    assert refused(lambda: running.attach(slow)).reason == "SESSION_EXPIRED", "it opens anew"


def test_an_engine_killed_while_it_attaches_does_not_keep_the_next_out(running: OnGpus) -> None:
    child = subprocess.Popen(["sleep", "infinity"])
    start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    namespace = os.readlink(f"/proc/{child.pid}/ns/pid")
    process = pb.ProcessIdentity(pid=child.pid, start_time=start, pid_namespace=namespace)
    fields = {"pool_id": "pool", "layout": LAYOUT_PB, "pool_pages": 8, "device_ordinal": 0}
    running.stub.OpenSession(pb.OpenSessionRequest(process=process, ttl={"seconds": 600}, **fields))
    running.sweep()
    assert refused(lambda: running.open(0)).reason == "ATTACH_BUSY"
    child.kill()
    child.wait(30)
    running.sweep()
    running.attach(running.open(0))


def test_an_engine_that_saw_no_reply_may_open_again_at_once(running: OnGpus) -> None:
    running.open(0, pid=7)
    assert refused(lambda: running.open(0, pid=8)).reason == "ATTACH_BUSY"
    running.attach(running.open(0, pid=7))


# --- failing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["memGetInfo", "malloc", "ipcGetMemHandle", "memcpy", "setDevice"])
def test_a_gpu_that_fails_an_opening_is_told_and_nothing_is_left(running: OnGpus, function: str) -> None:
    running.api.fail[function] = 999
    error = refused(lambda: running.open(0))
    assert (error.code, error.reason) == ("INTERNAL", "GPU_ERROR")
    assert error.message.startswith("GPU 0: ") and f"{function}: hipError999" in error.message
    assert "\n" not in error.message
    del running.api.fail[function]
    running.attach(running.open(0))
    assert running.machine.used(0) == running.arena_bytes()


def test_a_gpu_that_fails_while_attaching(running: OnGpus) -> None:
    opened = running.open(0)
    running.api.fail["memcpy"] = 999
    assert refused(lambda: running.attach(opened)).reason == "GPU_ERROR"
    del running.api.fail["memcpy"]
    running.attach(opened)


def test_other_memory_is_no_proof(running: OnGpus) -> None:
    opened = running.open(0)
    request = pb.AttachSessionRequest(session_id=opened.session_id, seen=bytes(32))
    assert refused(lambda: running.stub.AttachSession(request)).reason == "ATTACH_MISMATCH"
    seen = running.api.gpu(0).read(running.machine.blocks[0].address + opened.arena.canary_offset, 32)
    request.seen = seen  # the canary is known, and its complement not written
    error = refused(lambda: running.stub.AttachSession(request))
    assert error.reason == "ATTACH_MISMATCH" and "complement" in error.message


def test_what_the_gpu_has_no_room_for_is_refused_with_the_numbers(tmp_path: Path) -> None:
    size = 4 * PAGE + CANARIES
    running = OnGpus(tmp_path, "--memory", str(2 * size), total=2 * size)
    running.machine.process().gpu(0).allocate(size)
    error = refused(lambda: running.open(0, pool_pages=5))
    assert (error.reason, error.field) == ("EXCEEDS_BUDGET", "pool_pages")
    assert f"{size} of its {2 * size} bytes are free; lower the daemon's --memory" in error.message
    assert error.metadata["wanted_bytes"] == str(size + PAGE)
    assert running.api.calls.count("malloc") == 0
    # Memory that somebody else takes between the question and the allocation.
    running.api.fail["malloc"] = OUT_OF_MEMORY
    assert refused(lambda: running.open(0, pool_pages=4)).reason == "EXCEEDS_BUDGET"
    running.close()


def test_memory_that_cannot_be_given_back_is_logged(tmp_path: Path) -> None:
    running = OnGpus(tmp_path)
    running.attach(running.open(0))
    running.api.fail["free"] = 999
    with structlog.testing.capture_logs() as events:
        running.close()
    assert [event["event"] for event in events if event["log_level"] == "error"] == ["arena_not_freed"]


# --- when memory is given back ----------------------------------------------------------------------------------------


def test_an_idle_pool_gives_way_on_its_own_gpu_only(running: OnGpus) -> None:
    half = (1 << 19) // PAGE
    for device in (0, 1):
        opened = running.open(device, pool_pages=half)
        running.attach(opened)
        running.end(opened)
    running.open(1, pool_id="upgraded", pool_pages=2 * half - CANARIES // PAGE)
    assert {pool.pool_id for pool in running.stub.GetStats(pb.GetStatsRequest()).pools} == {
        "pool/gpu0",
        "upgraded/gpu1",
    }


def test_a_lost_engines_memory_stays_until_somebody_vouches(running: OnGpus) -> None:
    """Nobody holds a page; yet freeing memory that another process has mapped is undefined."""
    running.attach(running.open(0, pid=7))
    most = ((1 << 20) - CANARIES) // PAGE
    for seconds in (11, 31, 10_000_000):
        running.now += seconds
        running.sweep()
    stats = running.stub.GetStats(pb.GetStatsRequest())
    [lost] = stats.lost_sessions
    assert stats.expired_sessions == 1 and lost.fence == pb.FENCE_UNSEEN and not lost.HasField("pid")
    error = refused(lambda: running.stub.DropPool(pb.DropPoolRequest(pool_id="pool/gpu0")))
    assert error.reason == "POOL_IN_USE" and "mapped" in error.message
    assert refused(lambda: running.open(0, pool_id="other", pool_pages=most)).reason == "EXCEEDS_BUDGET"
    assert running.machine.used(0) == running.arena_bytes()
    again = running.open(0)  # another engine may come back to the warm pool meanwhile
    running.attach(again)
    running.end(again)
    assert refused(lambda: running.open(0, pool_id="other", pool_pages=most)).reason == "EXCEEDS_BUDGET"
    running.stub.ReleaseQuarantine(pb.ReleaseQuarantineRequest(session_handle=lost.session_handle))
    running.open(0, pool_id="other", pool_pages=most)
    assert running.machine.used(0) == running.arena_bytes(most)


# --- no GPU -----------------------------------------------------------------------------------------------------------


def daemon_error(tmp_path: Path, load: Callable[[], Runtime]) -> InvalidConfiguration:
    config = Config.read(["--device", "gpu", "--listen", f"unix:{tmp_path}/k.sock"], {})
    with pytest.raises(InvalidConfiguration) as caught:
        Daemon(config, load_runtime=load)
    assert caught.value.field == "--device" and caught.value.message.startswith("--device gpu: ")
    return caught.value


def test_without_a_gpu(tmp_path: Path) -> None:
    error = daemon_error(tmp_path, Machine().process(visible=[]).runtime)
    assert "no usable GPU: hipErrorNoDevice" in error.message and "doctor" in error.message


def test_without_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    message = daemon_error(tmp_path, Runtime.load).message
    assert "cupy is not installed: pip install -c constraints.txt -e '.[rocm]'" in message


def test_with_a_cupy_that_finds_no_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libamdhip64.so.7: cannot open shared object file\\n\\nhelp')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    message = daemon_error(tmp_path, Runtime.load).message
    assert "libamdhip64.so.7: cannot open shared object file; is the runtime" in message and "help" not in message


def test_with_a_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = ModuleType("cupy")
    cupy.cuda = ModuleType("cupy.cuda")
    cupy.cuda.runtime = Machine().process()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert [Runtime.load().gpu(at).id for at in range(Runtime.load().count())] == ["0000:03:00.0", "0000:83:00.0"]
    with pytest.raises(InvalidConfiguration, match="GPU 2: out of range; there are 2"):
        Runtime.load().gpu(2)
