"""Command-line flags that can also be set by environment variables. Shared by both services.

``--max-batch 8`` of a service with the prefix ROCMFORGE_ENGINE is ROCMFORGE_ENGINE_MAX_BATCH=8. A flag beats the
environment, which beats the default. Every bad value is an error that names the flag or variable it came from.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from services.errors import InvalidConfiguration
from services.serving import Listener, Tls

#: What an offset in a file can be.
MAX_BYTES = 2**63 - 1

_DIGITS = 40  # more than any sensible number has, and than int() takes gladly
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def byte_size(text: str) -> int:
    """Bytes from ``256MiB``, ``1.5GiB``, ``4096``. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    # Fractions: a float would round large sizes, and overflow on wild ones.
    size = int(Fraction(found[1]) * unit) if found and unit and len(found[1]) <= _DIGITS else 0
    if not 1 <= size <= MAX_BYTES:
        raise ValueError(f"want a size such as 256MiB, 1GiB or a number of bytes, from 1 to {MAX_BYTES}")
    return size


def whole(low: int, high: int) -> Callable[[str], int]:
    """A parser of integers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        digits = text.strip()
        if not re.fullmatch(r"[+-]?\d+", digits) or len(digits) > _DIGITS or not low <= int(digits) <= high:
            raise ValueError(f"want a whole number from {low} to {high}")
        return int(digits)

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    """A parser of durations in seconds from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text.strip().removesuffix("s"))
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"want seconds from {low:g} to {high:g}")
        return value

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    """A parser of one word of a few."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"want {' or '.join(words)}")
        return text

    return parse


def switch(text: str) -> bool:
    """A parser of yes and no."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("want true or false")


def runtime_dir() -> Path:
    """Where sockets lie unless told otherwise: private to the user."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) / "rocmforge" if os.path.isabs(base) else Path(f"/tmp/rocmforge-{os.getuid()}")


class FlagParser:
    """An argparse parser whose options also read ``<prefix>_<NAME>`` from the environment."""

    def __init__(self, prog: str, description: str, prefix: str) -> None:
        self.parser = argparse.ArgumentParser(
            prog=prog,
            description=description,
            epilog=f"Every flag can be set in the environment: --some-flag as {prefix}_SOME_FLAG "
            "(a flag that may be repeated takes a comma-separated list).",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._prefix = prefix
        self._options: dict[str, tuple[str, Callable[[str], Any], Any, bool]] = {}

    def add(
        self, flag: str, parse: Callable[[str], Any], default: Any, help: str, *, metavar: str = "X", many: bool = False
    ) -> None:
        """Add an option. ``many`` makes a list of it; ``parse`` is given the text and raises
        ValueError or InvalidConfiguration, saying what it wants.
        """
        name = flag.removeprefix("--").replace("-", "_")
        self._options[name] = (flag, parse, default, many)
        # argparse formats help with %, and a default of None says nothing to a reader.
        text = help if default is None else f"{help} (default {_shown(default)})"
        if parse is switch:
            self.parser.add_argument(flag, action="store_const", const="true", help=help)
        else:
            action = "append" if many else "store"
            self.parser.add_argument(flag, action=action, metavar=metavar, help=text.replace("%", "%%"))

    def parse(self, arguments: list[str] | None, environ: Mapping[str, str]) -> dict[str, Any]:
        """Values by name. Raises InvalidConfiguration; an unknown flag ends the process as argparse does."""
        given = vars(self.parser.parse_args(arguments))
        values: dict[str, Any] = {}
        for name, (flag, parse, default, many) in self._options.items():
            variable = f"{self._prefix}_{name.upper()}"
            raw, origin = given[name], flag
            if raw is None and variable in environ:
                raw, origin = environ[variable], variable
                raw = raw.split(",") if many else raw
            if raw is None:
                values[name] = _parsed(parse, default, flag) if isinstance(default, str) else default
                continue
            parsed = [_parsed(parse, text, origin) for text in (raw if many else [raw])]
            values[name] = parsed if many else parsed[0]
        known = {f"{self._prefix}_{name.upper()}" for name in self._options}
        for variable in environ:
            if variable.startswith(f"{self._prefix}_") and variable not in known:
                raise InvalidConfiguration(f"{variable}: no such setting; see --help", field=variable)
        return values


def _parsed(parse: Callable[[str], Any], text: str, origin: str) -> Any:
    try:
        return parse(text)
    except (ValueError, InvalidConfiguration) as error:
        raise InvalidConfiguration(f"{origin} {text}: {error}", field=origin) from error


def _shown(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, list) else str(default)


def add_serving_flags(flags: FlagParser, socket_name: str, port: int) -> None:
    """Add the flags of ``services.serving``: where to listen, who may call, how long to drain."""
    default = [Listener(path=runtime_dir() / socket_name), Listener(host="127.0.0.1", port=port)]
    flags.add(
        "--listen", Listener.parse, default, "unix:/path or host:port; may be repeated", many=True, metavar="ADDR"
    )
    flags.add("--tls-cert", Path, None, "PEM certificate for the TCP listeners", metavar="FILE")
    flags.add("--tls-key", Path, None, "PEM key of --tls-cert", metavar="FILE")
    flags.add(
        "--tls-client-ca", Path, None, "PEM authority that clients' certificates must be signed by", metavar="FILE"
    )
    flags.add("--insecure", switch, False, "allow addresses beyond this host without mutual TLS")
    flags.add("--grace", seconds(0, 3600), 10.0, "seconds that running calls have to end on SIGTERM", metavar="S")


def tls_of(values: Mapping[str, Any]) -> Tls | None:
    """The TLS files among parsed values. Raises InvalidConfiguration when only some are given."""
    cert, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise InvalidConfiguration("--tls-cert and --tls-key go together", field="--tls-cert")
    return Tls(cert, key, client_ca)
