"""Where the client says what happens to its session: to the standard library's logging, or to what is passed in."""

from __future__ import annotations

import logging
from typing import Any, Protocol


class EventLog(Protocol):
    """Takes events by name, with their values as keywords. A logger of structlog is one."""

    def info(self, event: str, **values: Any) -> Any:
        """Something that is as it should be."""

    def warning(self, event: str, **values: Any) -> Any:
        """Something that the client can do without."""

    def error(self, event: str, **values: Any) -> Any:
        """Something that somebody must look at."""


class LoggedEvents:
    """Events as lines ``event name=value ...`` of a logger of the standard library."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, event: str, **values: Any) -> None:
        """Log it at INFO."""
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        """Log it at WARNING."""
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        """Log it at ERROR."""
        self._log(logging.ERROR, event, values)

    def _log(self, level: int, event: str, values: dict[str, Any]) -> None:
        words = (event, *(f"{name}={value!r}" for name, value in values.items()))
        self._logger.log(level, "%s", " ".join(words))


#: The events of a client that is given no other log: the logger ``rocmforge.client``.
LOGGED = LoggedEvents(logging.getLogger("rocmforge.client"))
