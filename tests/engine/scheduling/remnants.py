"""Where an object still knows a name: a walk over everything it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

OURS = ("services.", "tests.")


def places(root: object, name: str) -> list[str]:
    """Paths from ``root`` to strings that contain ``name``, through containers and objects of this project."""
    found, seen = [], {id(root)}
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, thing = todo.pop()
        if isinstance(thing, str):
            if name in thing:
                found.append(path)
            continue
        for step, child in _children(thing):
            if isinstance(child, str) or id(child) not in seen:
                seen.add(id(child))
                todo.append((path + step, child))
    return sorted(found)


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield "{}", key
            yield f"[{key if isinstance(key, str) else '*'}]", value
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        for value in list(thing):
            yield "[*]", value
    elif type(thing).__module__.startswith(OURS):
        names = {*getattr(thing, "__dict__", ()), *(n for kind in type(thing).__mro__ for n in _slots(kind))}
        for attribute in names:
            if hasattr(thing, attribute):
                yield f".{attribute}", getattr(thing, attribute)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
