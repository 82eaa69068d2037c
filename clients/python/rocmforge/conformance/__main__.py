"""Try a client against a daemon, law by law.

    python -m rocmforge.conformance --daemon ADDRESS -- COMMAND

Exit status: 0 if the client keeps every law, 1 if not, 2 when the suite cannot run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rocmforge.client.errors import ServiceError
from rocmforge.conformance.laws import LAWS, Law
from rocmforge.conformance.stage import stage
from rocmforge.conformance.subject import Failed


def verdict(law: Law, daemon: str, command: Sequence[str]) -> str:
    """Why the client does not keep the law; empty if it does. Raises ServiceError when the daemon cannot be used."""
    try:
        with stage(daemon, command) as one:
            law.trial(one)
    except Failed as failed:
        return str(failed)
    return ""


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rocmforge.conformance",
        description="Try whether a client of the KV-cache daemon keeps the laws of docs/clients.md.",
        epilog="Exit status: 0 if the client keeps every law, 1 if not, 2 when the suite cannot run.",
    )
    parser.add_argument("--daemon", required=True, metavar="ADDRESS", help="the daemon's unix socket: unix:PATH")
    names = [law.name for law in LAWS]
    parser.add_argument("--law", action="append", choices=names, help="try this one alone; may be repeated")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the client, after --")
    arguments = parser.parse_args(list(words))
    broken = 0
    for law in LAWS:
        if arguments.law and law.name not in arguments.law:
            continue
        try:
            why = verdict(law, arguments.daemon, arguments.command)
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
