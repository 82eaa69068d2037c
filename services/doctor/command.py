"""What both doctor commands share: flags, report and exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.parser import Parser
from services.doctor import check
from services.doctor.check import Check, Finding, Status
from services.doctor.machine import Machine
from services.launch import typed


@dataclass(frozen=True, slots=True)
class Options:
    """``peer`` is the other service's process id; ``rest`` are the service's own flags, which configure the checks."""

    peer: int | None
    json: bool
    rest: list[str]


def options(module: str, other: str, words: Sequence[str]) -> Options:
    """Parse the doctor's own flags; an invalid one ends the process (``services.common.parser``)."""
    parser = Parser(
        prog=f"{typed(module)} doctor",
        description="Check whether this machine can run the service, and say what to change if it cannot.\n"
        "Changes nothing and leaves nothing behind.",
        epilog=f"All other flags, and the environment, are those of `{typed(module)}`:\n"
        "pass the ones that the service is started with.\n\n"
        "Exit status: 0 if no check failed, 1 if one did, 2 for invalid flags.",
    )
    parser.add_argument(
        "--peer", type=_pid, metavar="PID", help=f"process id of the {other}: check whether the two can share memory"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per check and line")
    known, rest = parser.parse_known_args(list(words))
    return Options(known.peer, known.json, rest)


def _pid(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id")
    return int(text)


def report(machine: Machine, title: str, checks: Sequence[Check], as_json: bool) -> int:
    """Run the checks and print each finding as its check ends. Returns the exit status."""

    def on_signal(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, on_signal)
    findings: list[Finding] = []
    try:
        if not as_json:
            print(title, flush=True)
        for name, finding in check.run(checks):
            findings.append(finding)
            print((check.as_json if as_json else check.as_lines)(name, finding), flush=True)
        if not as_json:
            print(check.summary(findings))
    except BrokenPipeError:
        # The reader has closed the pipe. Python would complain at exit that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        machine.kill_children()
    return int(any(finding.status is Status.FAILED for finding in findings))
