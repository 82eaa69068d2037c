"""Real processes, and what is known of them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvcache.lease.process import ProcessTable, ProcessWitness
from services.kvcache.lease.witness import Process

NAMESPACE = os.readlink("/proc/self/ns/pid")


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def named(pid: int, later: int = 0) -> Process:
    return Process(pid, started(pid) + later, NAMESPACE)


def witness_of(process: Process) -> ProcessWitness:
    witness = ProcessTable().observe(process)
    assert witness is not None
    return witness


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Lives until it is killed, and is not waited for by then."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def ended(child: subprocess.Popen[bytes]) -> None:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture(params=[None, errno.EMFILE, errno.ENOSYS])
def descriptors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Why there is no pidfd to be had, if there is none."""
    failure: int | None = request.param

    def fail(pid: int) -> int:
        raise OSError(failure, "none")

    if failure is not None:
        monkeypatch.setattr(os, "pidfd_open", fail)
    return failure


def test_one_is_gone_when_it_ended_and_not_before(child: subprocess.Popen[bytes], descriptors: int | None) -> None:
    witness = witness_of(named(child.pid))
    assert not witness.gone() and (witness.uid, witness.own) == (os.geteuid(), True)
    child.kill()
    ended(child)
    assert witness.gone(), "a zombie writes nothing"
    child.wait()
    assert witness.gone()
    witness.close()
    witness.close()
    assert witness.gone()


def test_the_pid_of_another_is_of_one_that_is_gone(child: subprocess.Popen[bytes], descriptors: int | None) -> None:
    for later in (-1, 1):
        witness = witness_of(named(child.pid, later))
        assert witness.gone() and witness.uid == -1 and not witness.own
        assert not witness.kill()
    assert child.poll() is None


def test_a_stopped_process_is_alive(child: subprocess.Popen[bytes], descriptors: int | None) -> None:
    witness = witness_of(named(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert not witness.gone()
    witness.close()


def test_a_stopped_process_is_killed_through_its_descriptor(child: subprocess.Popen[bytes]) -> None:
    witness = witness_of(named(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert witness.kill()
    ended(child)
    assert witness.gone()
    child.wait()
    assert witness.kill(), "there is nothing left to kill"
    witness.close()


def test_without_a_descriptor_nobody_is_killed(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.ENOSYS, "none")

    monkeypatch.setattr(os, "pidfd_open", fail)
    assert not witness_of(named(child.pid)).kill()
    assert child.poll() is None


def test_this_process_does_not_kill_itself() -> None:
    assert not witness_of(named(os.getpid())).kill()


def test_a_thread_is_no_process(descriptors: int | None) -> None:
    """It ends before its process does."""
    known, end = threading.Event(), threading.Event()
    ids: list[int] = []

    def body() -> None:
        ids.append(threading.get_native_id())
        known.set()
        end.wait()

    thread = threading.Thread(target=body)
    thread.start()
    known.wait()
    assert ProcessTable().observe(named(ids[0])) is None
    end.set()
    thread.join()


def test_of_another_namespace_nothing_is_known(child: subprocess.Popen[bytes]) -> None:
    process = named(child.pid)
    assert ProcessTable().observe(Process(process.pid, process.start_time, "pid:[1]")) is None
    assert ProcessTable().observe(Process(process.pid, process.start_time, "")) is None


def test_descriptors_are_closed(child: subprocess.Popen[bytes]) -> None:
    def descriptors() -> int:
        """How many of this process are of the child; other threads open and close files meanwhile."""
        found = 0
        for path in Path("/proc/self/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                found += f"\nPid:\t{child.pid}\n" in path.read_text()
        return found

    witness = witness_of(named(child.pid))
    assert descriptors() == 1
    witness.close()
    witness_of(named(child.pid, 1)).close()
    assert descriptors() == 0
