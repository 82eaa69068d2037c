# mypy: disable-error-code="attr-defined, misc, valid-type"
"""The real machine: what it says of files, sockets and children; running checks; sharing memory for real."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rocmforge.client.arena.gpu_ipc import Runtime
from services.common.edge.listener import Listener
from services.doctor import check, probe, roundtrip, stack
from services.doctor.check import Check, Finding, Status
from services.doctor.machine import Machine
from tests.fakegpu import Machine as Gpus
from tests.loopback import own_host
from tests.polling import until


@pytest.fixture
def machine() -> Machine:
    return Machine(os.environ)


def test_files(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    (tmp_path / "link").symlink_to("file")
    node = machine.stat(str(path))
    assert node and (node.uid, node.gid) == (os.geteuid(), path.stat().st_gid)
    assert machine.text(str(path)) == "text" and machine.link(str(tmp_path / "link")) == "file"
    assert machine.open_errno(str(path)) == 0
    assert machine.glob(f"{tmp_path}/*") == sorted([str(path), str(tmp_path / "link")])
    assert machine.may_write(str(tmp_path)) and machine.space(str(tmp_path))[1] > 0
    missing = str(tmp_path / "none")
    assert (machine.stat(missing), machine.text(missing), machine.link(missing)) == (None, None, None)
    assert machine.open_errno(missing) == errno.ENOENT and machine.space(missing) == (0, 0)
    assert stack.nearest(machine, tmp_path / "a" / "b") == tmp_path
    assert machine.which("sh") and machine.which("no such program") is None
    assert machine.open_files() > 0


def unknown_host(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_sockets(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_host()  # where the port stays free when it is given back
    with socket.create_server((own, 0)) as server:
        taken = Listener(host=own, port=server.getsockname()[1])
        assert machine.bind_errno(taken) == errno.EADDRINUSE and machine.connect_errno(taken) == 0
    assert machine.bind_errno(taken) == 0, "it is free again"
    assert machine.connect_errno(taken) == errno.ECONNREFUSED
    elsewhere = Listener(host="192.0.2.1", port=1)
    assert machine.bind_errno(elsewhere) == errno.EADDRNOTAVAIL
    with monkeypatch.context() as patch:  # whatever there is of a network to ask, and how long that takes
        patch.setattr(socket, "getaddrinfo", unknown_host)
        nowhere = Listener(host="no.such.host.invalid", port=1)
        assert machine.bind_errno(nowhere) == machine.connect_errno(nowhere) == errno.EADDRNOTAVAIL
    path = Listener(path=tmp_path / "s")
    assert machine.connect_errno(path) == errno.ENOENT
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        assert machine.connect_errno(path) == errno.ECONNREFUSED
        unix.listen()
        assert machine.connect_errno(path) == 0


def test_children(machine: Machine) -> None:
    ran = machine.run(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], 60
    )
    assert (ran.status, ran.output, ran.errors) == (3, "out\n", "err\n")
    assert machine.run(["/no/such/program"], 60).status == 127


def test_a_child_that_hangs_is_killed_with_all_that_it_started(machine: Machine, tmp_path: Path) -> None:
    # The grandchild holds the pipe's other end: it closes when the last of them is gone.
    read, write = os.pipe()
    os.set_inheritable(write, True)
    script = "import os, subprocess, sys; subprocess.run(['sleep', 'infinity'], pass_fds=[int(sys.argv[1])])"
    program = tmp_path / "program.py"
    program.write_text(script)
    popen = subprocess.Popen

    class Passing(popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options, pass_fds=[write])

    subprocess.Popen = Passing
    try:
        ran = machine.run([sys.executable, str(program), str(write)], 0.5)
    finally:
        subprocess.Popen = popen
    os.close(write)
    assert ran.status is None
    assert os.read(read, 1) == b"", "nobody is left"
    os.close(read)


def test_children_end_with_the_doctor(machine: Machine) -> None:
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(machine.run(["sleep", "infinity"], 600)))
    thread.start()
    until(lambda: machine._children)
    machine.kill_children()
    thread.join(30)
    assert done and not machine._children


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_check_that_raises_or_hangs_has_failed() -> None:
    def broken() -> Finding:
        raise ValueError("oops")

    never, next_one = threading.Event(), threading.Event()

    def hanging() -> Finding:
        never.wait()
        return check.ok("at last")

    def fine() -> Finding:
        next_one.set()
        return check.ok("fine")

    found = dict(check.run([Check("a", broken), Check("c", fine)], limit_s=60))
    assert [found[name].status for name in "ac"] == [Status.FAILED, Status.OK]
    assert "ValueError: oops" in found["a"].found
    next_one.clear()
    found = dict(check.run([Check("b", hanging), Check("c", fine)], limit_s=0.2))
    # What comes next is looked at all the same; on a busy machine it may not answer in so little time.
    assert next_one.wait(60) and not never.is_set()
    never.set()
    assert found["b"].status is Status.FAILED and "no answer within 0.2 s" in found["b"].found


def test_findings_are_told() -> None:
    finding = check.failed("what is " * 30, "change " * 30)
    lines = check.as_lines("a name", finding).splitlines()
    assert lines[0].startswith("FAILED   a name                   what is what")
    assert all(len(line) <= 120 for line in lines) and any(line.strip().startswith("-> change") for line in lines)
    assert json.loads(check.as_json("a", check.ok("é"))) == {"check": "a", "status": "ok", "found": "é", "change": ""}
    assert json.loads(check.as_json("a", finding))["status"] == "failed"
    assert check.summary([finding, check.ok(""), check.ok("")]) == "2 ok, 1 FAILED"


# --- sharing memory for real ------------------------------------------------------------------------------------------


def test_shared_memory_goes_round_and_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    finding = roundtrip.file_round_trip(machine, tmp_path / "not" / "yet")
    assert finding.status is Status.OK, finding
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files(machine: Machine) -> None:
    finding = roundtrip.file_round_trip(machine, Path("/proc/self"))
    assert finding.status is Status.FAILED, finding


def opener(monkeypatch: pytest.MonkeyPatch, *, status: int = 0, output: str = "", errors: str = "") -> None:
    done = subprocess.CompletedProcess([], status, output, errors)
    monkeypatch.setattr(roundtrip.subprocess, "run", lambda *_, **__: done)


@pytest.mark.parametrize(
    ("output", "errors", "words"),
    [
        ('{"error": "refused", "seen": ""}', "", "refused"),
        ('{"error": "", "seen": "00"}', "", "sees different memory"),
        ("", "x\nSegmentation fault", "status 0: Segmentation fault"),
    ],
)
def test_an_opener_that_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, errors: str, words: str
) -> None:
    opener(monkeypatch, output=output, errors=errors)
    assert words in roundtrip.own("file", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_an_opener_that_writes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundtrip.secrets, "token_bytes", lambda size: bytes(size))
    opener(monkeypatch, output=json.dumps({"error": "", "seen": bytes(32).hex()}))
    assert "did not arrive" in roundtrip.own("file", str(tmp_path))


def test_an_opener_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("opener", 30)

    monkeypatch.setattr(roundtrip.subprocess, "run", hang)
    assert "did not exit within 30 s" in roundtrip.own("file", str(tmp_path))


def test_gpu_memory_goes_round_between_two_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus()
    owner, other = gpus.process(), gpus.process()
    monkeypatch.setattr(Runtime, "load", owner.runtime)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "load", other.runtime)
            seen = roundtrip.open_device(command[-1])
        return subprocess.CompletedProcess(command, 0, json.dumps({"error": "", "seen": seen.hex()}), "")

    gpus.total = 4 << 20
    monkeypatch.setattr(roundtrip.subprocess, "run", run)
    assert roundtrip.own("gpu", "1") == ""
    assert gpus.used(1) == 0 and not other.mapped


def test_what_goes_wrong_with_a_gpu_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Runtime, "load", Gpus(total=1).process().runtime)
    roundtrip.main("gpu", "0")
    assert "out of memory allocating" in json.loads(capsys.readouterr().out)["error"]
    monkeypatch.setattr(Runtime, "load", Gpus().process(visible=[]).runtime)
    roundtrip.main("open-gpu", "0:00")
    assert "no usable GPU" in json.loads(capsys.readouterr().out)["error"]


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "cupy is not installed" in probe.look().error


def test_the_probe_as_a_process(machine: Machine) -> None:
    found = stack.ask(machine)
    assert found.error or found.cupy
    assert dataclasses.asdict(found)["asked"]
