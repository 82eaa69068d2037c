"""``--wait``: a command typed right after the one that starts the engine, as in the docs."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine import cli
from services.engine.cli.client import parser
from tests.processes import ROOT, engine, kvcache

MODEL = ROOT / "models" / "shakespeare"
GREEDY = ["--temperature", "0", "--max-tokens", "2"]


def command(name: str, *arguments: str, target: str) -> list[str]:
    return [sys.executable, "-m", "services.engine", name, *arguments, "--target", target]


class Late:
    """Commands that begin before there is an engine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.target = f"unix:{directory}/engine.sock"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(name, *arguments, target=self.target),
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/protos:{ROOT}/clients/python"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    one = Late(tmp_path)
    yield one
    for process in one.started:
        process.kill()
        process.communicate()


def test_commands_wait_for_an_engine_that_starts_late_and_for_the_daemon_it_needs(late: Late) -> None:
    (late.directory / "in.jsonl").write_text('{"prompt": "ROMEO:", "max_tokens": 2}\n')
    waiting = [
        late.start("generate", "ROMEO:", *GREEDY, "--wait", "120"),
        late.start("batch", "in.jsonl", "--output", "out.jsonl", "--wait", "120"),
        late.start("bench", "--requests", "2", "--input-len", "4", "--output-len", "2", "--wait", "120"),
        late.start("models", late.target, "--wait", "120"),
        late.start("submit", "ROMEO:", *GREEDY, "--wait", "120"),
        late.start("chat", "--wait", "120"),
    ]
    daemon = f"unix:{late.directory}/kvcache.sock"
    with engine(late.directory, daemon, model=MODEL, wait=False) as starting:
        # It answers by now, and says that it is starting: without --wait that is how a command fails.
        while "NOT_READY" not in (told := late.start("generate", "ROMEO:").communicate(timeout=60)[1]):
            assert "UNAVAILABLE" in told and starting.process.poll() is None, told
        assert not (late.directory / "out.jsonl").exists(), "nothing is begun before"
        assert [process.poll() for process in waiting] == [None] * len(waiting)
        with kvcache(late.directory):
            ended = [process.communicate("", timeout=120) for process in waiting]
    status = [process.returncode for process in waiting]
    assert status == [0, 0, 0, 0, 0, 1], ended
    assert "has no chat template" in ended[5][1], "and not that there is no engine"
    assert [errors for _, errors in ended[:5]] == [""] * 5, "nothing is said of waiting where nobody looks on"
    assert len((late.directory / "out.jsonl").read_text().splitlines()) == 1


def test_an_engine_that_never_comes_ends_the_wait_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"unix:{tmp_path}/none.sock"
    (tmp_path / "in.jsonl").write_text('{"prompt": "ROMEO:"}\n')
    output = tmp_path / "out.jsonl"
    for name, arguments in (
        ("status", []),
        ("models", [target]),
        ("cancel", ["a"]),
        ("batch", [str(tmp_path / "in.jsonl"), "--output", str(output)]),
    ):
        assert cli.run(name, [*arguments, "--target", target, "--wait", "0.01"]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line == f"rocmforge {name}: NOT_READY: {target}: not serving after 0.01 s: nobody answers"
    assert not output.exists()


def test_another_service_at_the_address_is_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    with kvcache(tmp_path) as daemon:
        for wait_s in ("0.5", "4", "32"):  # in which the daemon has to answer
            assert cli.run("status", ["--target", daemon.address, "--wait", wait_s]) == 1
            if "it answers" in (said := capsys.readouterr().err):
                break
    assert "it answers SERVICE_UNKNOWN" in said


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_wait_is_a_number_of_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run("status", ["--wait", seconds])
    assert caught.value.code == 2 and f"{seconds}: expected seconds, 0 or more" in capsys.readouterr().err


def test_every_command_has_it_and_waits_for_nothing_unless_told_to() -> None:
    assert parser("x", "").parse_args([]).wait == 0.0
    for name in cli.COMMANDS:
        done = subprocess.run(
            command(name, "--help", target=""), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        assert "--wait S" in done.stdout, name


def test_a_terminal_shows_what_is_waited_for_and_an_interrupt_ends_it(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    target = f"unix:{tmp_path}/none.sock"
    process = subprocess.Popen(
        command("status", "--wait", "600", target=target), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    try:
        shown = ""
        while "\n" not in shown:
            shown += os.read(mine, 1000).decode()
        assert shown == f"rocmforge status: waiting for the engine at {target}, at most 600 s\r\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait(60)
        os.close(mine)
