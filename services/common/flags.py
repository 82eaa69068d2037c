"""Command-line flags that can also be set in the environment and in a file. Shared by both services.

``--max-batch 8`` of a service with the prefix ROCMFORGE_ENGINE is ROCMFORGE_ENGINE_MAX_BATCH=8, and ``max-batch = 8``
in the TOML file that ``--config`` or ROCMFORGE_ENGINE_CONFIG names. A flag beats the environment, which beats the file,
which beats the default. Every bad value is an error that names the flag, the variable or the file and key it came from.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from services.common import configfile
from services.common.errors import InvalidConfiguration
from services.common.parser import Parser
from services.common.serving import LOG_LEVELS, Listener, Tls

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


@dataclass(frozen=True, slots=True)
class Number:
    """A parser of numbers, which a file gives as one of these types."""

    parse: Callable[[str], Any]
    types: tuple[type, ...]

    def __call__(self, text: str) -> Any:
        """Raises ValueError."""
        return self.parse(text)


def whole(low: int, high: int) -> Number:
    """A parser of integers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        digits = text.strip()
        if not re.fullmatch(r"[+-]?\d+", digits) or len(digits) > _DIGITS or not low <= int(digits) <= high:
            raise ValueError(f"want a whole number from {low} to {high}")
        return int(digits)

    return Number(parse, (int,))


def seconds(low: float, high: float) -> Number:
    """A parser of durations in seconds from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text.strip().removesuffix("s"))
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"want seconds from {low:g} to {high:g}")
        return value

    return Number(parse, (int, float))


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


class Settings(Mapping[str, Any]):
    """Values by flag, without dashes in front, and where those come from that are not defaults."""

    def __init__(self, values: dict[str, Any], origins: dict[str, str], file: Path | None) -> None:
        self.origins = origins
        self.file = file
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_default(self, name: str, value: Any) -> Settings:
        """The same, with a default that other settings had to be known for."""
        return Settings({**self._values, name: value}, self.origins, self.file)

    def echo(self) -> dict[str, Any]:
        """All of it, for a log event: the file, every setting, and who set it if somebody did."""
        return {
            "config": None if self.file is None else str(self.file),
            "settings": {name: _plain(value) for name, value in self.items()},
            "origins": self.origins,
        }


@dataclass(frozen=True, slots=True)
class _Option:
    flag: str
    variable: str
    parse: Callable[[str], Any]
    default: Any
    many: bool

    @property
    def types(self) -> tuple[type, ...]:
        """Of its value in a file."""
        if isinstance(self.parse, Number):
            return self.parse.types
        if self.parse is switch:
            return (bool,)
        return (str, int) if self.parse is byte_size else (str,)


class FlagParser:
    """An argparse parser whose options can also be set as ``<prefix>_<NAME>`` in the environment and in a file."""

    def __init__(self, prog: str, description: str, prefix: str) -> None:
        self.parser = Parser(
            prog=prog,
            description=description,
            epilog=f"Every flag can be set in the environment: --some-flag as {prefix}_SOME_FLAG\n"
            "(a flag that may be repeated takes a comma-separated list), and in the TOML file of --config,\n"
            "spelt as here without the dashes in front: some-flag = 8 (seconds and counts as numbers, sizes\n"
            "as numbers or strings, switches as true or false, a flag that may be repeated as an array of\n"
            "strings, all else as strings). A flag beats the environment, which beats the file.",
        )
        self.parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
        self._prefix = prefix
        self._options: dict[str, _Option] = {}

    def add(
        self, flag: str, parse: Callable[[str], Any], default: Any, help: str, *, metavar: str = "X", many: bool = False
    ) -> None:
        """Add an option. ``many`` makes a list of it; ``parse`` is given the text and raises
        ValueError or InvalidConfiguration, saying what it wants.
        """
        name = flag.removeprefix("--")
        self._options[name] = _Option(flag, self._variable(name), parse, default, many)
        # argparse formats help with %, and a default of None says nothing to a reader.
        text = help if default is None else f"{help} (default {_shown(default)})"
        if parse is switch:
            self.parser.add_argument(flag, action="store_const", const="true", help=help)
        else:
            action = "append" if many else "store"
            self.parser.add_argument(flag, action=action, metavar=metavar, help=text.replace("%", "%%"))

    def parse(self, arguments: list[str] | None, environ: Mapping[str, str]) -> Settings:
        """All settings. Raises InvalidConfiguration; an unknown flag ends the process (``services.common.parser``)."""
        given = vars(self.parser.parse_args(arguments))
        known = {self._variable("config"), *(option.variable for option in self._options.values())}
        for found in environ:
            if found.startswith(f"{self._prefix}_") and found not in known:
                raise InvalidConfiguration(f"{found}: no such setting; see --help", field=found)
        path, in_file = self._file(given["config"], environ)
        values, origins = dict[str, Any](), dict[str, str]()
        for name, option in self._options.items():
            flag, variable = given[name.replace("-", "_")], environ.get(option.variable)
            if flag is not None:
                texts = flag if option.many else [flag]
                source = option.flag
                origins[name] = "flag"
            elif variable is not None:
                texts = variable.split(",") if option.many else [variable]
                source = option.variable
                origins[name] = "environment"
            elif path is not None and name in in_file:
                texts = configfile.texts(path, name, in_file[name], option.types, many=option.many)
                source = f"{path}: {name}"
                origins[name] = "file"
            else:
                default = option.default
                values[name] = _parsed(option.parse, default, option.flag) if isinstance(default, str) else default
                continue
            parsed = [_parsed(option.parse, text, source) for text in texts]
            values[name] = parsed if option.many else parsed[0]
        return Settings(values, origins, path)

    def _variable(self, name: str) -> str:
        return f"{self._prefix}_{name.replace('-', '_').upper()}"

    def _file(self, flag: str | None, environ: Mapping[str, str]) -> tuple[Path | None, dict[str, Any]]:
        origin = "--config" if flag is not None else self._variable("config")
        named = flag if flag is not None else environ.get(origin)
        if named is None:
            return None, {}
        if not named:
            raise InvalidConfiguration(f"{origin}: want the path of a file", field=origin)
        return Path(named), configfile.read(Path(named), origin, self._options)


def _parsed(parse: Callable[[str], Any], text: str, origin: str) -> Any:
    try:
        return parse(text)
    except (ValueError, InvalidConfiguration) as error:
        raise InvalidConfiguration(f"{origin} {text}: {error}", field=origin) from error


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shown(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, list) else str(default)


def add_serving_flags(flags: FlagParser, socket_name: str, port: int) -> None:
    """Add the flags of ``services.common.serving``: where to listen, who may call, how long to drain, what to log."""
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
    flags.add(
        "--metrics",
        Listener.parse_tcp,
        None,
        "host:port where Prometheus finds metrics, without TLS; default: none",
        metavar="ADDR",
    )
    flags.add("--grace", seconds(0, 3600), 10.0, "seconds that running calls have to end on SIGTERM", metavar="S")
    flags.add(
        "--log-level",
        one_of(*LOG_LEVELS),
        "info",
        f"the lowest level of events that are logged: {', '.join(LOG_LEVELS)}; debug has every call",
        metavar="L",
    )


def tls_of(values: Mapping[str, Any]) -> Tls | None:
    """The TLS files among parsed values. Raises InvalidConfiguration when only some are given."""
    cert, key, client_ca = values["tls-cert"], values["tls-key"], values["tls-client-ca"]
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise InvalidConfiguration("--tls-cert and --tls-key go together", field="--tls-cert")
    return Tls(cert, key, client_ca)
