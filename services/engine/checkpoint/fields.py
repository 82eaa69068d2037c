"""Typed, validated access to the keys of a model's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.common.errors import ModelInvalid
from services.engine.checkpoint.placeholders import HEAD_BYTES, refuse_placeholder

_MAX_FILE_BYTES = 1 << 20
_MAX_SIZE = 1 << 24  # of any dimension; keeps products far below 64 bits


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one JSON object, or of a GGUF file's metadata. Every error names the file, the key and the value."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def of(cls, path: Path) -> Fields:
        """Read a JSON file. Raises ``ModelInvalid`` when it is not a JSON object."""
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
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise ``ModelInvalid`` for a key."""
        found = shortened(self.values[key]) if key in self.values else "missing"
        raise ModelInvalid(f"{self.path}: {self.prefix}{key[:100]} is {found}: {why}")

    def require(self, key: str, only: Any, default: Any) -> None:
        """Raise ``ModelInvalid`` for any value but ``only``; a missing key counts as ``default``."""
        if self.values.get(key, default) != only:
            self.refuse(key, f"only {json.dumps(only)} is supported")

    def integer(self, key: str, *, least: int = 1, most: int = _MAX_SIZE, default: int | None = None) -> int:
        """Returns an integer from ``least`` to ``most``; required unless there is a default."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(key, f"it must be an integer from {least} to {most}")
        return value

    def number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Returns a number from ``low`` to ``high``; required unless there is a default."""
        value = self.optional_number(key, low, high)
        if value is None:
            if default is None:
                self.refuse(key, f"it must be a number from {low:g} to {high:g}")
            return default
        return value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Returns a number from ``low`` to ``high``, or None when it is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        # The range check also rejects NaN, and integers too large for a float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """Returns a boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Returns token ids given as null, one id, or a list."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                self.refuse(key, f"it must have token ids from 0 to {vocab_size - 1}")
        return tuple(ids)


def shortened(value: Any) -> str:
    """Returns a value as JSON, truncated for an error message."""
    return json.dumps(value, default=str)[:100]
