"""Checks, their findings, running them, and printing findings as a table or as JSON Lines."""

from __future__ import annotations

import enum
import json
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

#: Time limit of a check in seconds. The slowest checks wait for child processes, whose own limits are lower.
CHECK_S = 90.0

_WIDTH = 120


class Status(enum.Enum):
    """The outcome of a check, as printed."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found and, unless it passed, what to change."""

    status: Status
    found: str
    change: str = ""


def ok(found: str) -> Finding:
    """The check passed."""
    return Finding(Status.OK, found)


def warning(found: str, change: str) -> Finding:
    """The service will run, but the reader should know something."""
    return Finding(Status.WARNING, found, change)


def failed(found: str, change: str) -> Finding:
    """The service will not run as configured."""
    return Finding(Status.FAILED, found, change)


def skipped(why: str) -> Finding:
    """There is nothing to check."""
    return Finding(Status.SKIPPED, why)


def fault(needed: bool, found: str, change: str) -> Finding:
    """A problem: a failure if the component is ``needed``, a warning otherwise."""
    return (failed if needed else warning)(found, change)


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    look: Callable[[], Finding]


def run(checks: Sequence[Check], limit_s: float = CHECK_S) -> Iterator[tuple[str, Finding]]:
    """Run the checks in order, yielding names and findings. A check that raises or times out has failed."""
    for check in checks:
        yield check.name, _bounded(check, limit_s)


def _bounded(check: Check, limit_s: float) -> Finding:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look())
        except Exception as error:
            found.append(failed(f"the check itself failed: {type(error).__name__}: {error}", "report this as a bug"))

    # A thread that hangs in the kernel cannot be stopped: it is abandoned, and ends with the process.
    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not found:
        return failed(
            f"no answer within {limit_s:g} s: a system call hangs", "look in the kernel log (dmesg) for the reason"
        )
    return found[0]


def as_json(name: str, finding: Finding) -> str:
    """One JSON object: ``check``, ``status`` (ok, warning, failed, skipped), ``found`` and ``change``."""
    record = {"check": name, "status": finding.status.value.lower(), "found": finding.found, "change": finding.change}
    return json.dumps(record, ensure_ascii=False)


def as_lines(name: str, finding: Finding) -> str:
    """A row of the table: status, name, the finding, and what to change on the lines below."""
    head, indent = f"{finding.status.value:<8} {name:<24} ", " " * 34
    text = textwrap.fill(finding.found, _WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    if finding.change:
        arrow = indent[:-3] + "-> "
        text += "\n" + textwrap.fill(
            finding.change, _WIDTH, initial_indent=arrow, subsequent_indent=indent, break_long_words=False
        )
    return text


def summary(findings: Sequence[Finding]) -> str:
    """The number of findings by status."""
    counts = [(status, sum(finding.status is status for finding in findings)) for status in Status]
    return ", ".join(f"{count} {status.value}" for status, count in counts if count)
