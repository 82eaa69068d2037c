"""The HIP sources as passed to a compiler: one text without includes, and the macros that specialize it.

A kernel declares in its comments the defines it accepts, and the variants that must compile for every target::

    // defines: RF_TYPE=F32|F16|BF16 RF_PAGE_SIZE=1..
    // variants: RF_TYPE=F16|BF16 RF_PAGE_SIZE=16

``1..`` is any integer from 1. A line of variants stands for all its combinations; there may be several lines, and an
empty one is the source without defines. ``RF_WAVE`` comes from the device and is never declared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "hip"

_INCLUDE = re.compile(r'^#include "common\.h"$', re.MULTILINE)
_DECLARED = re.compile(r"^// (defines|variants):(.*)$", re.MULTILINE)


def names() -> list[str]:
    """Return the kernels' names: ``norm`` for norm.hip, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.hip"))


def inlined(text: str, file: str) -> str:
    """Inline common.h in ``text``, of the file named ``file``; the compiler still reports their original lines.

    Raises ValueError for a text that does not include it, or that includes anything else.
    """
    match = _INCLUDE.search(text)
    if not match or text.count("#include") != 1:
        raise ValueError(f'{file}: a kernel includes "common.h", and nothing else')
    # The one line of the header that only makes sense in a file of its own.
    header = (FOLDER / "common.h").read_text(encoding="utf-8").replace("#pragma once", "", 1)
    line = text.count("\n", 0, match.start()) + 2
    before, after = text[: match.start()], text[match.end() + 1 :]
    return f'#line 1 "{file}"\n{before}#line 1 "common.h"\n{header}\n#line {line} "{file}"\n{after}'


def read(name: str) -> str:
    """Return the whole text of kernel ``name``. Raises ValueError if there is none."""
    path = FOLDER / f"{name}.hip"
    if not path.is_file():
        raise ValueError(f"kernel {name!r}: must be one of {', '.join(names())}")
    return inlined(path.read_text(encoding="utf-8"), path.name)


def checked(text: str, defines: Mapping[str, str | int], file: str) -> dict[str, str]:
    """Return ``defines`` as text, sorted by name.

    Raises ValueError for a name or a value that the source does not declare, which the compiler would accept silently.
    """
    declared = {name: values for kind, line in _lines(text, file) if kind == "defines" for name, values in line.items()}
    given = {name: str(value) for name, value in sorted(defines.items())}
    for name, value in given.items():
        if name not in declared:
            raise ValueError(f"{file}: {name}={value}: no such define; it has {', '.join(declared) or 'none'}")
        if not any(_allows(allowed, value) for allowed in declared[name]):
            raise ValueError(f"{file}: {name}={value}: must be one of {', '.join(declared[name])}")
    return given


def variants(text: str, file: str) -> list[dict[str, str]]:
    """Return the distinct sets of defines that ``text`` must compile with for every target."""
    found = []
    for kind, line in _lines(text, file):
        if kind == "variants":
            for values in itertools.product(*line.values()):
                variant = checked(text, dict(zip(line, values, strict=True)), file)
                if variant not in found:
                    found.append(variant)
    return found


def _lines(text: str, file: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The kind of each declaration line, and its names with their values."""
    for kind, line in _DECLARED.findall(text):
        parsed = {}
        for word in line.split():
            name, equals, values = word.partition("=")
            if not name or not equals or not values:
                raise ValueError(f"{file}: // {kind}: {word!r} is not NAME=VALUE|VALUE")
            parsed[name] = values.split("|")
        yield kind, parsed


def _allows(allowed: str, value: str) -> bool:
    if allowed.endswith(".."):
        return value.isdecimal() and int(value) >= int(allowed.removesuffix(".."))
    return value == allowed
