"""Calls in flight by identity, so that one caller's cannot take the place of all others'."""

from __future__ import annotations

from services.common.access.identity import Identity
from services.common.errors import TooManyCalls


class InFlight:
    """At most ``most`` calls of one identity at a time, streams included; any number with None."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._counts: dict[str, int] = {}  # by text, whose hash is kept

    def begin(self, caller: Identity) -> TooManyCalls | None:
        """Begin a call, whose end must be passed to ``end``; or the reason why it must not begin."""
        count = self._counts.get(caller.text, 0)
        if self.most is not None and count >= self.most:
            return TooManyCalls(
                f"{caller} has {count} calls in flight, the limit of one identity", identity=caller, limit=self.most
            )
        self._counts[caller.text] = count + 1
        return None

    def end(self, caller: Identity) -> None:
        """A call that had begun is over."""
        count = self._counts[caller.text] - 1
        if count:
            self._counts[caller.text] = count
        else:
            del self._counts[caller.text]
