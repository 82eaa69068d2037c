"""What a newcomer meets first: ``make run`` and ``make up`` as processes, interrupted, misled and cut off."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT

PATH = f"{ROOT}:{ROOT}/protos:{ROOT}/clients/python"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short name, since sockets are made below it; empty again when the demo is over."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        yield Path(name)


SCRIPT = ROOT / "scripts" / "demo.py"


def demo(
    command: str, temporary: Path, environment: dict[bytes, bytes] | None = None, script: Path = SCRIPT
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environb.items() if name != b"PROMPT"}
    places = {b"TMPDIR": os.fsencode(temporary), b"XDG_RUNTIME_DIR": os.fsencode(temporary)}
    return subprocess.Popen(
        [sys.executable, str(script), command],
        env={
            **inherited,
            **places,
            b"PYTHONPATH": os.fsencode(PATH),
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def told(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    output, errors = process.communicate(timeout=240)
    return output.decode(), errors.decode()


def processes_of(temporary: Path) -> list[str]:
    """Command lines that name the directory."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes()
        except OSError:
            continue
        if os.fsencode(temporary) in command:
            found.append(command.decode(errors="replace"))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupted_run_leaves_nothing(temporary: Path, number: signal.Signals, times: int) -> None:
    # A prompt that a pipe has no room for: nothing is generated, nor is the demo over, before that is read here.
    process = demo("run", temporary, {b"PYTHONUNBUFFERED": b"1", b"PROMPT": b"x" * 100_000})
    assert process.stdout is not None
    while b"services.engine" not in process.stdout.readline():
        pass
    for _ in range(times):
        process.send_signal(number)
    _, errors = told(process)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert processes_of(temporary) == []
    assert list(temporary.iterdir()) == []


FINALIZED = """
import os, signal, sys, threading
import grpc
from scripts import demo

def interrupted():
    os.kill(os.getpid(), signal.SIGTERM)

class Swallows:
    def __del__(self):  # as of gRPC's channels
        try:
            interrupted()
        except BaseException:
            pass

class Drops:
    def __del__(self):  # as of gRPC's calls
        interrupted()

def run(prompt):
    with demo.interrupts.allowed():
        if prompt == "swallowed":
            Swallows()
            raise grpc.RpcError
        Drops()
        threading.Event().wait(600)

demo.run = run
sys.exit(demo.main(["run"]))
"""


@pytest.mark.parametrize("how", ["swallowed", "dropped"])
def test_an_interrupt_in_a_finalizer_is_one_still(how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": PATH, "PROMPT": how}
    done = subprocess.run(
        [sys.executable, "-c", FINALIZED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")


def test_a_prompt_that_is_not_text(temporary: Path) -> None:
    process = demo("run", temporary, {b"PROMPT": b"ab\xff"})
    output, errors = told(process)
    assert process.returncode == 1
    assert output == ""
    assert errors.strip() == "PROMPT is not UTF-8: invalid start byte at byte 2"


def test_a_terminal_that_lacks_the_prompts_characters(temporary: Path) -> None:
    process = demo("run", temporary, {b"PROMPT": "caf\u00e9".encode(), b"PYTHONIOENCODING": b"ascii"})
    output, errors = told(process)
    assert (process.returncode, errors) == (0, "")
    assert "caf?" in output


def test_a_reader_that_leaves(temporary: Path) -> None:
    process = demo("run", temporary)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(240) == 1
    assert errors == b""
    assert processes_of(temporary) == []
    assert list(temporary.iterdir()) == []


def test_up_does_not_take_anothers_daemon_for_its_own(temporary: Path) -> None:
    """A copy of the script keeps its pid files beside itself, not in this checkout."""
    (temporary / "scripts").mkdir()
    script = Path(shutil.copy(SCRIPT, temporary / "scripts"))
    (temporary / "rocmforge").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(temporary / "rocmforge/kvcache.sock"))
        another.listen()
        process = demo("up", temporary, script=script)
        _, errors = told(process)
    assert process.returncode == 1
    assert errors.strip().endswith("somebody else's kvcache is serving there; stop it first")
    assert list((temporary / ".run").iterdir()) == []


def test_up_and_down_of_one_checkout_take_turns(temporary: Path) -> None:
    (temporary / "scripts").mkdir()
    script = Path(shutil.copy(SCRIPT, temporary / "scripts"))
    checkout = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(checkout, fcntl.LOCK_EX)
        process = demo("down", temporary, script=script)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
    finally:
        os.close(checkout)
    output, errors = told(process)
    assert (process.returncode, errors) == (0, "") and output.count("not running") == 2
