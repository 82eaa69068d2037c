"""``python -m services.top``: watch a daemon and its engines in the terminal."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rocmforge.client.transport.paths import check_socket
from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration
from services.common.listening import runtime_dir
from services.common.parser import Parser
from services.launch import typed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for invalid arguments."""
    flags = _parser().parse_args(arguments)
    engines = flags.engine or [f"unix:{runtime_dir() / 'engine.sock'}"]
    try:
        for flag, target in (("--kvcache", flags.kvcache), *(("--engine", one) for one in engines)):
            kind, _, path = target.partition(":")
            if kind == "unix":
                check_socket(Path(path), flag)
        from services.top.app import Top
        from services.top.looking import Looker
    except InvalidConfiguration as error:
        return _refuse(error.message)
    except ModuleNotFoundError as error:
        if error.name not in ("textual", "rich"):
            raise
        return _refuse(f"needs {error.name}: pip install 'rocmforge[top]'")
    if not sys.stdout.isatty():
        return _refuse("its output must be a terminal")
    looker = Looker(flags.kvcache, engines)
    try:
        Top(looker, flags.interval).run()
    finally:
        looker.close()
    return 0


def _refuse(why: str) -> int:
    print(f"rocmforge top: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    runtime = runtime_dir()
    parser = Parser(
        prog=typed("services.top"),
        description="Watch a KV-cache daemon and its engines, over unix sockets or TCP without TLS. Its key `e` "
        "explains what is shown. In the daemon it takes the role of a viewer.",
    )
    parser.add_argument(
        "--kvcache",
        type=_address,
        default=f"unix:{runtime / 'kvcache.sock'}",
        metavar="ADDR",
        help="the daemon, unix:/path or host:port (default %(default)s)",
    )
    parser.add_argument(
        "--engine",
        type=_address,
        action="append",
        metavar="ADDR",
        help=f"an engine, unix:/path or host:port; repeatable (default unix:{runtime / 'engine.sock'})",
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between looks (default %(default)g)"
    )
    return parser


def _address(text: str) -> str:
    try:
        return str(Listener.parse(text))
    except InvalidConfiguration as error:
        raise argparse.ArgumentTypeError("expected unix:/path or host:port") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("expected seconds from 0.1 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
