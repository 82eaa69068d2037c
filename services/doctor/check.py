"""What a check finds, how checks are run, and how their findings are told: as a table, or as one JSON object a line."""

from __future__ import annotations

import enum
import json
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

#: Seconds a check has. The longest wait for child processes of their own, which have less.
CHECK_S = 90.0

_WIDTH = 120


class Status(enum.Enum):
    """How a check ended; as it is printed."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found and, unless all is well, what to change."""

    status: Status
    found: str
    change: str = ""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(Status.OK, found)


def warning(found: str, change: str) -> Finding:
    """It will run, and there is something to know."""
    return Finding(Status.WARNING, found, change)


def failed(found: str, change: str) -> Finding:
    """It will not run as told."""
    return Finding(Status.FAILED, found, change)


def skipped(why: str) -> Finding:
    """There is nothing to check."""
    return Finding(Status.SKIPPED, why)


def fault(needed: bool, found: str, change: str) -> Finding:
    """Something is wrong: a failure where it is ``needed``, a warning where nothing was asked of it."""
    return (failed if needed else warning)(found, change)


@dataclass(frozen=True, slots=True)
class Check:
    """A name, and what to look at."""

    name: str
    look: Callable[[], Finding]


def run(checks: Sequence[Check], limit_s: float = CHECK_S) -> Iterator[tuple[str, Finding]]:
    """Names and findings, one after the other. A check that raises, or does not end in time, has failed."""
    for check in checks:
        yield check.name, _bounded(check, limit_s)


def _bounded(check: Check, limit_s: float) -> Finding:
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look())
        except Exception as error:
            found.append(failed(f"the check itself failed: {type(error).__name__}: {error}", "report this as a bug"))

    # A thread that hangs in the kernel cannot be ended: it is left behind, and ends with the process.
    thread = threading.Thread(target=look, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not found:
        return failed(
            f"no answer within {limit_s:g} s: something below hangs", "look at the kernel's log (dmesg) for the reason"
        )
    return found[0]


def as_json(name: str, finding: Finding) -> str:
    """One object: ``check``, ``status`` (ok, warning, failed, skipped), ``found`` and ``change``."""
    told = {"check": name, "status": finding.status.value.lower(), "found": finding.found, "change": finding.change}
    return json.dumps(told, ensure_ascii=False)


def as_lines(name: str, finding: Finding) -> str:
    """A row of the table: status, name, what was found, and below it what to change."""
    head, indent = f"{finding.status.value:<8} {name:<24} ", " " * 34
    text = textwrap.fill(finding.found, _WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    if finding.change:
        arrow = indent[:-3] + "-> "
        text += "\n" + textwrap.fill(
            finding.change, _WIDTH, initial_indent=arrow, subsequent_indent=indent, break_long_words=False
        )
    return text


def summary(findings: Sequence[Finding]) -> str:
    """How many there were of each status."""
    counts = [(status, sum(finding.status is status for finding in findings)) for status in Status]
    return ", ".join(f"{count} {status.value}" for status, count in counts if count)
