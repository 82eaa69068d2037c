"""What every test shares: in CI a test may be skipped for lack of a GPU and for nothing else.

A test that needs a device skips with a reason that begins with "no GPU". Any other skip means that CI is missing
something, and would otherwise pass for ever without having run.
"""

from __future__ import annotations

import os

import pytest

ALLOWED = "no GPU"

_unexplained: list[str] = []


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure (xfail) is reported as a skip too, but it did run.
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ALLOWED):
        _unexplained.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that was skipped."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a whole module that was skipped."""
    _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a CI run that skipped what it should not."""
    if _unexplained and os.environ.get("CI"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List those skips, as errors where they are errors."""
    if _unexplained and os.environ.get("CI"):
        terminalreporter.section(f'skipped, and not for "{ALLOWED}": CI fails on these', red=True)
        for line in _unexplained:
            terminalreporter.line(line)
