"""What every test shares: in CI a test may be skipped for lack of a GPU and for nothing else, and none that hypothesis
runs fails because the machine was slow.

A test that needs a device skips with a reason that begins with "no GPU". Any other skip means that CI is missing
something, and would otherwise pass for ever without having run.

With ROCMFORGE_TEST_GPU set a GPU is what the run is for: having none ("no GPU: ...") is no excuse then. Having too few
("no GPU 1: ...") still is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import tools
from tests.fast import is_fast

# Whatever else the profile says that hypothesis has chosen, in CI or elsewhere.
hypothesis.settings.register_profile("any pace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any pace")

ALLOWED = "no GPU"
NONE = "no GPU:"
WANTED = "ROCMFORGE_TEST_GPU"

_unexplained: list[str] = []
_lacking: list[str] = []

# A shell without job control has what it runs in the background ignore Ctrl-C, as would all that the tests start, and
# some of them are interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: The folders whose files take longest, in the order in which processes get them: so that what is left at the end, when
#: some have nothing more to do, is short.
FIRST = ("gpu", "rocm", "simulators", "models", "e2e", "kernels", "kvcache")
FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fast."""
    parser.addoption("--fast", action="store_true", help="only what tests/fast.py calls fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast, leave files out by the rule of tests/fast.py."""
    if config.getoption("--fast") and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return None if is_fast(collection_path) else True
    return None


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Sort the files, and leave the order within each; with --fast, leave out what hypothesis runs."""
    if config.getoption("--fast"):
        searches = [item for item in items if item.get_closest_marker("hypothesis")]
        config.hook.pytest_deselected(items=searches)
        items[:] = [item for item in items if item not in searches]
    rank = {name: at for at, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(FOLDER).parts[0], len(FIRST)))


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "needs(*tools): skipped without these tools of scripts/tools.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that lacks a tool, before its fixtures are made."""
    tools.need(*(name for mark in item.iter_markers("needs") for name in mark.args))


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure (xfail) is reported as a skip too, but it did run.
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    _lacking.append(reason)
    if not reason.startswith(ALLOWED) or (os.environ.get(WANTED) and reason.startswith(NONE)):
        _unexplained.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that was skipped."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a whole module that was skipped."""
    _note(report)


def _strict() -> bool:
    return bool(os.environ.get("CI") or os.environ.get(WANTED))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that skipped what it should not, in CI or where a GPU is wanted."""
    if _unexplained and _strict():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """List those skips where they are errors; last, after pytest's own list, say what was not shown."""
    yield
    if _unexplained and _strict():
        where = "a run for the GPU" if os.environ.get(WANTED) else "CI"
        terminalreporter.section(f'skipped, and not for "{ALLOWED}": {where} fails on these', red=True)
        for line in _unexplained:
            terminalreporter.line(line)
    if told := tools.told(_lacking):
        terminalreporter.line(told, yellow=True)
