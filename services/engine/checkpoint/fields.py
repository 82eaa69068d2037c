"""What a model's file says about it, key by key, each value checked as it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.common.errors import ModelInvalid
from services.engine.checkpoint.placeholders import HEAD_BYTES, refuse_placeholder

_MAX_FILE_BYTES = 1 << 20
_MAX_SIZE = 1 << 24  # of any one dimension; keeps products far from 64 bits


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one JSON object, or of a GGUF file's metadata; every complaint names file, key and value."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def of(cls, path: Path) -> Fields:
        """Those of a JSON file. Raises ``ModelInvalid`` when it is none."""
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ModelInvalid(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
            raw = path.read_bytes()
        except OSError as error:
            raise ModelInvalid(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            values = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            refuse_placeholder(path, raw[:HEAD_BYTES])
            raise ModelInvalid(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelInvalid(f"{path} is not a JSON object")
        return cls(path, values)

    def has(self, key: str) -> bool:
        """Whether there is a value, and not null."""
        return self.values.get(key) is not None

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ``ModelInvalid`` about a key."""
        found = shortened(self.values[key]) if key in self.values else "missing"
        raise ModelInvalid(f"{self.path}: {self.prefix}{key[:100]} is {found}: {why}")

    def require(self, key: str, only: Any, default: Any) -> None:
        """Refuse every value but ``only``; without the key it is ``default``."""
        if self.values.get(key, default) != only:
            self.refuse(key, f"only {json.dumps(only)} is served")

    def integer(self, key: str, *, least: int = 1, most: int = _MAX_SIZE, default: int | None = None) -> int:
        """A whole number from ``least`` to ``most``; required unless there is a default."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(key, f"it must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A number from ``low`` to ``high``; required unless there is a default."""
        value = self.optional_number(key, low, high)
        if value is None:
            if default is None:
                self.refuse(key, f"it must be a number from {low:g} to {high:g}")
            return default
        return value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """A number from ``low`` to ``high``, or None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        # An int too large for a float would raise in isfinite, so the range is checked first; NaN fails it.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """No token, one, or a list of them."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                self.refuse(key, f"it must hold token ids from 0 to {vocab_size - 1}")
        return tuple(ids)


def shortened(value: Any) -> str:
    """A value as JSON, as much of it as a message has room for."""
    return json.dumps(value, default=str)[:100]
