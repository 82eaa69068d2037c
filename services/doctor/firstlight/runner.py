"""Runs the steps in order, each in a process group of its own with a time limit, and tells what they say as it comes.

A kernel that hangs cannot be stopped, and may leave the GPU unusable for every process: after a step that ran over its
limit no other step is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services import launch

#: Seconds that a killed process has to end. One in the middle of a system call of the driver may not.
REAP_S = 5.0
POISONED = "not run: the step before hung, and the GPU may need a reset"


@dataclass(frozen=True, slots=True)
class Step:
    """``module`` of this folder; ``limit_s`` seconds in all. ``gates``: without it nothing later can work."""

    title: str
    module: str
    limit_s: float
    gates: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of a step: ``passed``, ``failed``, ``hung`` or ``not run``; what it said, in order."""

    title: str
    state: str = "passed"
    seconds: float = 0.0
    found: list[tuple[str, str]] = field(default_factory=list)  # passed, failed or skipped; a sentence
    numbers: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


#: The steps, in order: each needs less to work than those after it.
STEPS = (
    Step("preflight", "preflight", 180, gates=True),
    Step("every kernel against NumPy", "arithmetic", 300),
    Step("memory shared by two processes", "sharing", 180),
    Step("replay against eager", "replaying", 60),
    Step("copy and read bandwidth", "bandwidth", 60),
    Step("tuning", "tuner", 300),
    Step("the engine's tokens", "generation", 240),
    Step("decode and prefill against the roofline", "ceilings", 120),
)


def run(
    steps: Sequence[Step],
    size: str,
    gpu: int,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    limit_factor: float = 1.0,
) -> list[Outcome]:
    """Run ``steps``; ``say`` is given lines as they come. ``limit_factor`` multiplies the limits."""
    outcomes: list[Outcome] = []
    stopped = ""
    for at, step in enumerate(steps, 1):
        say(f"[{at}/{len(steps)}] {step.title}")
        if stopped:
            outcome = Outcome(step.title, "not run", found=[("skipped", stopped)])
            say(f"    {'not run':<8} {stopped.removeprefix('not run: ')}")
        else:
            words = launch.python(f"services.doctor.firstlight.{step.module}", size, str(gpu))
            outcome = _run(step, words, environ, say, step.limit_s * limit_factor)
            if outcome.state == "hung":
                stopped = POISONED
            elif outcome.state == "failed" and step.gates:
                stopped = f"not run: {step.title} failed, without which nothing can work"
        outcomes.append(outcome)
    return outcomes


def _run(
    step: Step, words: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None], limit_s: float
) -> Outcome:
    outcome, began, doing = Outcome(step.title), time.monotonic(), ""
    process = subprocess.Popen(
        words, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_lines, args=(process, lines), daemon=True),
        threading.Thread(target=_last, args=(process, errors), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.0, began + limit_s - time.monotonic()))
            except queue.Empty:
                outcome.state = "hung"
                what = f" ({doing})" if doing else ""
                reason = (
                    f"no end within {limit_s:g} s{what}: it was killed, and the GPU may need a reset before it is used"
                )
                outcome.found.append(("failed", reason))
                say(f"    {'HUNG':<8} {reason}")
                break
            if line is None:
                break
            doing = _take(outcome, line, say) or doing
        if outcome.state != "hung":
            _ended(outcome, process, errors, readers[1], doing, say)
    finally:
        _kill(process)
    outcome.seconds = round(time.monotonic() - began, 1)
    if outcome.state == "passed" and any(kind == "failed" for kind, _ in outcome.found):
        outcome.state = "failed"
    return outcome


def _take(outcome: Outcome, line: str, say: Callable[[str], None]) -> str:
    """Take what a step said. Returns what it has begun, if that is what it said."""
    try:
        entry = json.loads(line)
        kind = entry["kind"]
    except (ValueError, KeyError, TypeError):
        return ""  # a library's chatter
    if kind == "begin":
        return str(entry["what"])
    if kind == "facts":
        outcome.facts |= entry["facts"]
    elif kind == "number":
        outcome.numbers.append({name: entry[name] for name in ("key", "name", "value", "unit")})
        say(f"    {entry['value']:>10.4g} {entry['unit']:<10} {entry['name']}")
    elif kind in ("passed", "failed", "skipped"):
        outcome.found.append((kind, str(entry["found"])))
        say(f"    {'ok' if kind == 'passed' else kind.upper() if kind == 'failed' else kind:<8} {entry['found']}")
    return ""


def _ended(
    outcome: Outcome,
    process: subprocess.Popen[str],
    errors: list[str],
    reader: threading.Thread,
    doing: str,
    say: Callable[[str], None],
) -> None:
    """Tell of a process that ended without having said that something failed."""
    try:
        status = process.wait(REAP_S)
    except subprocess.TimeoutExpired:
        outcome.state = "hung"
        outcome.found.append(("failed", "the process said all it had to and does not end; the GPU may need a reset"))
        say(f"    {'HUNG':<8} {outcome.found[-1][1]}")
        return
    if status and not any(kind == "failed" for kind, _ in outcome.found):
        reader.join(REAP_S)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        what = f" during: {doing}" if doing else ""
        reason = f"the process {how}{what}: {errors[-1] if errors else 'it said nothing'}"
        outcome.found.append(("failed", reason))
        say(f"    {'FAILED':<8} {reason}")


def _lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _last(process: subprocess.Popen[str], errors: list[str]) -> None:
    """Keep the last line of what a process complains of."""
    for line in process.stderr or ():
        if line.strip():
            errors[:] = [line.strip()]


def _kill(process: subprocess.Popen[str]) -> None:
    """End the step with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
