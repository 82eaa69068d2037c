"""Where structlog's events go: lines on stderr."""

from __future__ import annotations

import contextlib
import sys

import structlog

#: From the most verbose to the least.
LOG_LEVELS = ("debug", "info", "warning", "error")


class _Lines:
    """Writes to stderr and drops lines that fail: a full disk or a closed pipe must not stop the service."""

    def msg(self, text: str) -> None:
        """Write one line."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")  # one write per line: several threads may log
            sys.stderr.flush()

    debug = info = warning = error = critical = exception = log = msg


def configure_logging(level: str = "info") -> None:
    """Log structlog events at ``level``, one of `LOG_LEVELS`, and above to stderr: coloured lines on a terminal, one
    JSON object per line otherwise.
    """
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not sys.stderr.isatty():
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Lines,
        cache_logger_on_first_use=True,
    )
    for name, module in list(sys.modules.items()):
        # A logger that has been used has kept the level it had then.
        if name.partition(".")[0] in ("services", "kernels") and "log" in vars(module):
            vars(module)["log"].__dict__.pop("bind", None)
