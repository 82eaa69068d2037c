"""Settings from a file: TOML whose keys are the names of flags."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.common.errors import InvalidConfiguration

MAX_BYTES = 64 * 1024

_TYPES: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number with a fraction",
    bool: "true or false",
    list: "an array",
    dict: "a table",
}


def read(path: Path, origin: str, known: Iterable[str]) -> dict[str, Any]:
    """What the file sets, by name without dashes in front. ``origin`` is what named the file.

    Raises InvalidConfiguration when it cannot be read, is no TOML, is larger than ``MAX_BYTES`` or sets what is not
    ``known``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidConfiguration(f"{origin} {path}: cannot be read: {problem}", field=origin) from error
    if len(data) > MAX_BYTES:
        raise InvalidConfiguration(
            f"{origin} {path}: is too large; it may have {MAX_BYTES} bytes", field=origin, limit=MAX_BYTES
        )
    try:
        settings = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidConfiguration(f"{origin} {path}: is not UTF-8 (at line {line})", field=origin) from error
    except (ValueError, RecursionError) as error:
        raise InvalidConfiguration(f"{origin} {path}: is no TOML: {error}", field=origin) from error
    names = set(known)
    for name in settings:
        if name not in names:
            meant = name.lstrip("-").replace("_", "-")
            hint = f"it is called {meant}" if meant in names else "see --help"
            raise InvalidConfiguration(f"{path}: {name}: no such setting; {hint}", field=name)
    return settings


def texts(path: Path, name: str, value: Any, types: tuple[type, ...], *, many: bool) -> list[str]:
    """One setting's value, or its values when it may have ``many``, as flags spell them.

    Raises InvalidConfiguration when it is none of the ``types``.
    """
    wanted = " or ".join(_TYPES[kind] for kind in types)
    if many and type(value) is not list:
        raise InvalidConfiguration(f"{path}: {name}: is {_kind(value)}; want an array, each entry {wanted}", field=name)
    items = value if many else [value]
    for item in items:
        # Not isinstance: to Python true is a whole number.
        if type(item) not in types:
            where = "has" if many else "is"
            raise InvalidConfiguration(f"{path}: {name}: {where} {_kind(item)}; want {wanted}", field=name)
    return [str(item).lower() if type(item) is bool else str(item) for item in items]


def _kind(value: Any) -> str:
    return _TYPES.get(type(value), "a date or a time")
