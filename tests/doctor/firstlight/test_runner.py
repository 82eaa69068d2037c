"""The steps one after another, as processes: what they report, how they end, and what is skipped after a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.doctor.firstlight import figures, report, runner
from services.doctor.firstlight.runner import Outcome, Step
from tests.polling import until

ROOT = Path(__file__).parents[3]


def ran(monkeypatch: pytest.MonkeyPatch, *codes: str, limit_s: float = 60.0, gates: bool = False) -> list[Outcome]:
    """The outcomes of steps that run ``codes``."""
    popen = subprocess.Popen

    def started(words: list[str], **options: object) -> subprocess.Popen[str]:
        code = codes[int(words[2].rsplit(".", 1)[1])]
        return popen([sys.executable, "-c", code], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", started)
    steps = [Step(f"step {at}", str(at), limit_s, gates) for at in range(len(codes))]
    lines: list[str] = []
    outcomes = runner.run(steps, "tiny", 0, os.environ, lines.append)
    # Findings arrive as they are made.
    for outcome in outcomes:
        for _, sentence in outcome.found:
            assert any(sentence.removeprefix("not run: ") in line for line in lines), sentence
    return outcomes


SAYS = """
from services.doctor.firstlight.step import Report
from tests.polling import until
report = Report()
print("chatter of a library")
report.facts(gpu="a GPU")
report.begin("something")
report.passed("this is right")
report.number("read", "a read", 4.5, "TB/s")
"""


def test_what_a_step_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    [outcome] = ran(monkeypatch, SAYS)
    assert (outcome.state, outcome.found, outcome.facts) == ("passed", [("passed", "this is right")], {"gpu": "a GPU"})
    assert outcome.numbers == [{"key": "read", "name": "a read", "value": 4.5, "unit": "TB/s"}]


def test_a_failure_lets_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ran(monkeypatch, SAYS + "report.failed('this is wrong')", SAYS)
    assert (first.state, second.state) == ("failed", "passed")
    assert first.found[-1] == ("failed", "this is wrong")


def test_without_what_gates_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ran(monkeypatch, SAYS + "report.failed('no GPU')", SAYS, gates=True)
    assert (first.state, second.state) == ("failed", "not run")
    assert "step 0 failed" in second.found[0][1]


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_hang_ends_it_and_the_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The step has a child, as those that share memory do; it must not live on.
    child = tmp_path / "child"
    code = f"{SAYS}\nimport subprocess, sys, threading\nchild = subprocess.Popen(['sleep', '1000'])\n"
    code += f"open({str(child)!r}, 'w').write(str(child.pid))\nreport.begin('a kernel')\nthreading.Event().wait()"
    take, now = runner._take, [0.0]

    def taken(outcome: Outcome, line: str, say: Callable[[str], None]) -> str:
        what = take(outcome, line, say)
        now[0] += 120.0 if what == "a kernel" else 0.0  # in which nothing more comes
        return what

    monkeypatch.setattr(runner, "_take", taken)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second = ran(monkeypatch, code, SAYS, limit_s=120.0)
    assert (first.state, second.state) == ("hung", "not run")
    assert "no end within 120 s (a kernel)" in first.found[-1][1] and "GPU may need a reset" in first.found[-1][1]
    assert second.found == [("skipped", runner.POISONED)]
    # The kernel ends a killed process in its own time.
    until(lambda: not runs(int(child.read_text())), "the step's child lives on")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV during: something: it said nothing"),
        ("import sys; sys.exit('the driver is gone')", "ended with status 1 during: something: the driver is gone"),
    ],
)
def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    [outcome] = ran(monkeypatch, f"{SAYS}\nimport sys; sys.stdout.flush()\n{code}")
    assert outcome.state == "failed"
    assert said in outcome.found[-1][1]


def test_an_exception_of_a_step_is_a_sentence() -> None:
    code = "import sys; from services.doctor.firstlight import step\n"
    code += "def body(report, asked): raise ValueError('a bad plan')\n"
    code += "sys.argv = ['x', 'tiny', '0']; sys.exit(step.run(body))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)) == (3, {"kind": "failed", "found": "ValueError: a bad plan"})


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture
def outcomes() -> list[Outcome]:
    one = Outcome("preflight", facts={"gpu": "AMD Instinct MI300X", "cache": "/home/jane/.cache/x"})
    two = Outcome(
        "tuning",
        "failed",
        1.5,
        [("passed", "written to /home/jane/.cache/rocmforge/t.json"), ("failed", "jane-pc: /dev/kfd is gone, jane")],
        [{"key": "decode-bf16-4", "name": "decode", "value": 4.1, "unit": "TB/s"}],
    )
    return [one, two]


@pytest.mark.parametrize("as_text", [report.as_json, report.as_page])
def test_a_report_says_nobodys_name(
    as_text: Callable[[list[Outcome], str], str], outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_names", lambda: ["jane-pc", "jane"])
    text = as_text(outcomes, "full")
    assert "jane" not in text and "/home" not in text
    assert "/dev/kfd is gone" in text and "MI300X" in text


def test_numbers_stand_beside_what_was_predicted_and_the_h200s(outcomes: list[Outcome]) -> None:
    [number] = json.loads(report.as_json(outcomes, "full"))["numbers"]
    assert number == {
        **{"key": "decode-bf16-4", "name": "decode", "value": 4.1, "unit": "TB/s"},
        **{"h200": 4.274, "predicted": "at most 5.3"},
    }
    assert "| decode | 4.1 | TB/s | at most 5.3 | 4.274 |" in report.as_page(outcomes, "full")
    assert figures.predicted("NVIDIA H200", "decode-bf16-4") == ""
    assert figures.predicted("AMD Instinct MI300X", "prefill-matrix") == "at most 430 to 960"


def test_a_page_begins_with_what_failed(outcomes: list[Outcome]) -> None:
    page = report.as_page(outcomes, "full")
    assert "1 of 2 steps did not pass:\n- **tuning**: " in page
    assert "Everything passed." in report.as_page(outcomes[:1], "full")
