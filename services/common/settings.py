"""Settings, each declared once as a field of a frozen dataclass; read from flags, the environment and a file.

In a program with the prefix ROCMFORGE_ENGINE, ``max_batch: int = setting(whole(1, 1024), 32, "requests that run at a
time")`` is set by ``--max-batch 8``, by ROCMFORGE_ENGINE_MAX_BATCH=8, or by ``max-batch = 8`` in the TOML file that
``--config`` or ROCMFORGE_ENGINE_CONFIG names. Flags override the environment, which overrides the file, which overrides
the default. An invalid value is an error that names the flag, the variable, or the file and key it came from.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import InvalidConfiguration
from services.common.parser import Parser
from services.common.values import Kind, switch

#: Size limit of a settings file.
MAX_FILE_BYTES = 64 * 1024

_KEY = "setting"
_TYPES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a float",
    bool: "a boolean",
    list: "an array",
    dict: "a table",
}


@dataclass(frozen=True, slots=True)
class Program:
    """The program that the settings belong to: its command, its description and the prefix of its variables."""

    name: str
    description: str
    prefix: str

    def variable(self, name: str) -> str:
        """The environment variable of a setting."""
        return f"{self.prefix}_{name.replace('-', '_').upper()}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A declaration: ``name`` is the flag without its leading dashes, and the key in a file; ``field`` is the
    dataclass's field.

    With ``many`` the flag may be repeated, and the value is a list. ``default`` is a value, a string to parse, or a
    callable that returns either when settings are read.
    """

    name: str
    field: str
    kind: Kind
    default: Any
    help: str
    metavar: str
    many: bool

    @property
    def flag(self) -> str:
        """The flag with its leading dashes."""
        return f"--{self.name}"

    def make_default(self) -> Any:
        """The default, unparsed."""
        return self.default() if callable(self.default) else self.default


@dataclass(frozen=True, slots=True)
class Row:
    """A setting as a row of a table. ``default`` is empty if there is none or ``help`` describes it."""

    name: str
    flag: str
    variable: str
    type: str
    default: str
    help: str


def setting(kind: Kind, default: Any, help: str, *, name: str = "", metavar: str = "X", many: bool = False) -> Any:
    """Declare a field as a setting; ``name`` defaults to the field's name with dashes."""
    return dataclasses.field(metadata={_KEY: Setting(name, "", kind, default, help, metavar, many)})


def declared(config: type) -> list[Setting]:
    """All settings of a dataclass, in field order."""
    found = []
    for field in dataclasses.fields(config):
        if (one := field.metadata.get(_KEY)) is not None:
            name = one.name or field.name.replace("_", "-")
            found.append(dataclasses.replace(one, name=name, field=field.name))
    return found


def table(config: type, program: Program) -> list[Row]:
    """The documentation of every setting, one row each."""
    return [
        Row(
            one.name,
            one.flag,
            program.variable(one.name),
            f"{one.kind.summary}; repeatable" if one.many else one.kind.summary,
            _shown(one),
            one.help,
        )
        for one in declared(config)
    ]


class Values:
    """The values read, by dataclass field, and by name the origin of each that is not a default."""

    def __init__(self, settings: Sequence[Setting], found: dict[str, Any], origins: dict[str, str], file: Path | None):
        self.fields = found
        self._settings = settings
        self._origins = origins
        self._file = file

    def echo(self) -> dict[str, Any]:
        """Everything, for a log event: the file, every setting, and the origin of each that is not a default."""
        return {
            "config": None if self._file is None else str(self._file),
            "settings": {one.name: _plain(self.fields[one.field]) for one in self._settings},
            "origins": self._origins,
        }


def read(config: type, program: Program, arguments: list[str] | None, environ: Mapping[str, str]) -> Values:
    """Read all settings of a dataclass. Raises InvalidConfiguration.

    An unknown flag ends the process (``services.common.parser``).
    """
    settings = declared(config)
    given = vars(_parser(settings, program).parse_args(arguments))
    known = {program.variable("config"), *(program.variable(one.name) for one in settings)}
    for found in environ:
        if found.startswith(f"{program.prefix}_") and found not in known:
            raise InvalidConfiguration(f"{found}: no such setting; see --help", field=found)
    path, in_file = _file(given["config"], program.variable("config"), environ, [one.name for one in settings])
    fields, origins = dict[str, Any](), dict[str, str]()
    for one in settings:
        flag, variable = given[one.name.replace("-", "_")], program.variable(one.name)
        if flag is not None:
            texts, source, origins[one.name] = flag if one.many else [flag], one.flag, "flag"
        elif variable in environ:
            text = environ[variable]
            texts, source, origins[one.name] = text.split(",") if one.many else [text], variable, "environment"
        elif path is not None and one.name in in_file:
            texts, source, origins[one.name] = _texts(path, one, in_file[one.name]), f"{path}: {one.name}", "file"
        else:
            default = one.make_default()
            fields[one.field] = _parsed(one.kind, default, one.flag) if isinstance(default, str) else default
            continue
        parsed = [_parsed(one.kind, text, source) for text in texts]
        fields[one.field] = parsed if one.many else parsed[0]
    return Values(settings, fields, origins, path)


def _parser(settings: Iterable[Setting], program: Program) -> Parser:
    parser = Parser(
        prog=program.name,
        description=program.description,
        epilog=f"Every flag can be set in the environment: --some-flag as {program.prefix}_SOME_FLAG\n"
        "(a repeatable flag takes a comma-separated list), or in the TOML file of --config, without the\n"
        "leading dashes: some-flag = 8 (seconds and counts are numbers, sizes are integers or strings,\n"
        "switches are booleans, repeatable flags are arrays of strings, everything else is a string).\n"
        "Flags override the environment, which overrides the file.",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    for one in settings:
        if one.kind is switch:
            parser.add_argument(one.flag, action="store_const", const="true", help=one.help)
            continue
        # argparse expands % in help, and a default of None would tell a reader nothing.
        default = _shown(one)
        text = f"{one.help} (default {default})" if default else one.help
        action = "append" if one.many else "store"
        parser.add_argument(one.flag, action=action, metavar=one.metavar, help=text.replace("%", "%%"))
    return parser


def _file(
    flag: str | None, variable: str, environ: Mapping[str, str], known: Iterable[str]
) -> tuple[Path | None, dict[str, Any]]:
    origin = "--config" if flag is not None else variable
    named = flag if flag is not None else environ.get(variable)
    if named is None:
        return None, {}
    if not named:
        raise InvalidConfiguration(f"{origin}: expected the path of a file", field=origin)
    return Path(named), _read_file(Path(named), origin, known)


def _read_file(path: Path, origin: str, known: Iterable[str]) -> dict[str, Any]:
    """The settings in the file, by name. ``origin`` is the flag or variable that named the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidConfiguration(f"{origin} {path}: cannot be read: {problem}", field=origin) from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidConfiguration(
            f"{origin} {path}: too large; the limit is {MAX_FILE_BYTES} bytes", field=origin, limit=MAX_FILE_BYTES
        )
    try:
        found = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidConfiguration(f"{origin} {path}: not valid UTF-8 (at line {line})", field=origin) from error
    except (ValueError, RecursionError) as error:
        raise InvalidConfiguration(f"{origin} {path}: not valid TOML: {error}", field=origin) from error
    names = set(known)
    for name in found:
        if name not in names:
            meant = name.lstrip("-").replace("_", "-")
            hint = f"did you mean {meant}?" if meant in names else "see --help"
            raise InvalidConfiguration(f"{path}: {name}: no such setting; {hint}", field=name)
    return found


def _texts(path: Path, one: Setting, value: Any) -> list[str]:
    """A setting's value or values in a file, as the strings that flags would have."""
    wanted = " or ".join(_TYPES[kind] for kind in one.kind.types)
    if one.many and type(value) is not list:
        raise InvalidConfiguration(
            f"{path}: {one.name}: is {_type(value)}; expected an array, each entry {wanted}", field=one.name
        )
    items = value if one.many else [value]
    for item in items:
        # Not isinstance: in Python, bool is a subclass of int.
        if type(item) not in one.kind.types:
            where = "has" if one.many else "is"
            raise InvalidConfiguration(f"{path}: {one.name}: {where} {_type(item)}; expected {wanted}", field=one.name)
    return [str(item).lower() if type(item) is bool else str(item) for item in items]


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "a date or a time")


def _parsed(parse: Callable[[str], Any], text: str, origin: str) -> Any:
    try:
        return parse(text)
    except (ValueError, InvalidConfiguration) as error:
        raise InvalidConfiguration(f"{origin} {text}: {error}", field=origin) from error


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shown(one: Setting) -> str:
    default = one.make_default()
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return "" if default is None or one.kind is switch else str(default)
