"""An event log that remembers."""

from __future__ import annotations

from typing import Any


class Recorder:
    """Keeps the events that a client logs, each with its level."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def info(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, "level": "info", **values})

    def warning(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, "level": "warning", **values})

    def error(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, "level": "error", **values})

    def names(self) -> list[str]:
        """The events, in order."""
        return [event["event"] for event in self.events]
