"""Try a client against a daemon, law by law.

    python -m rocmforge.conformance --daemon ADDRESS -- COMMAND

Exit status: 0 if the client keeps every law, 1 if not, 2 when the suite cannot run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rocmforge.client.errors import InvalidConfiguration, ServiceError
from rocmforge.client.transport.tls import client_tls
from rocmforge.conformance.laws import LAWS, Law
from rocmforge.conformance.stage import Daemon, stage
from rocmforge.conformance.subject import Failed


def verdict(law: Law, daemon: Daemon, command: Sequence[str]) -> str:
    """Why the client does not keep the law; empty if it does. Raises ServiceError when the daemon cannot be used."""
    try:
        with stage(daemon, command) as one:
            law.trial(one)
    except Failed as failed:
        return str(failed)
    return ""


def _daemon(arguments: argparse.Namespace) -> Daemon:
    """The daemon that is named. Raises InvalidConfiguration for flags or files that cannot be used."""
    tls = client_tls(arguments.ca, arguments.cert, arguments.key, arguments.name, flags=("--ca", "--cert", "--key"))
    if tls is None and arguments.name:
        raise InvalidConfiguration("--name needs --ca", field="--name")
    if tls is not None and arguments.daemon.startswith("unix:"):
        raise InvalidConfiguration(f"--ca: {arguments.daemon} is not a TCP address", field="--ca")
    return Daemon(arguments.daemon, tls, arguments.gpu)


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rocmforge.conformance",
        description="Try whether a client of the KV-cache daemon keeps the laws of docs/clients.md.",
        epilog="Exit status: 0 if the client keeps every law, 1 if not, 2 when the suite cannot run.",
    )
    parser.add_argument("--daemon", required=True, metavar="ADDRESS", help="the daemon: unix:PATH or HOST:PORT")
    for flag, text in (
        ("--ca", "PEM CA certificate that must have signed the daemon's: TLS"),
        ("--cert", "PEM certificate to show to it"),
        ("--key", "PEM private key of --cert"),
    ):
        parser.add_argument(flag, type=Path, metavar="FILE", help=text)
    parser.add_argument("--name", default="", help="name that its certificate must have; default: the host in --daemon")
    parser.add_argument("--gpu", type=int, metavar="N", help="ordinal of the GPU to have the pages on; needs CuPy")
    names = [law.name for law in LAWS]
    parser.add_argument("--law", action="append", choices=names, help="try this one alone; may be repeated")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the client, after --")
    arguments = parser.parse_args(list(words))
    try:
        daemon = _daemon(arguments)
    except InvalidConfiguration as error:
        parser.error(error.message)
    broken = 0
    for law in LAWS:
        if arguments.law and law.name not in arguments.law:
            continue
        try:
            why = verdict(law, daemon, arguments.command)
        except ServiceError as error:
            print(f"rocmforge.conformance: {error.message}", file=sys.stderr)
            return 2
        broken += bool(why)
        print(f"{'BROKEN' if why else 'kept':<7} {law.name:<11} a client {law.sentence}", flush=True)
        if why:
            print(f"{'':<19} {why}", flush=True)
    count = len(arguments.law or LAWS)
    print(f"{count - broken} of {count} laws kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
