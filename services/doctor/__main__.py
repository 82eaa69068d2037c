"""``python -m services.doctor first-light``: try everything on this machine's GPU, and write a report to send."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.parser import Parser
from services.doctor.firstlight import report, runner, step
from services.launch import typed


def main(words: Sequence[str], steps: Sequence[runner.Step] = runner.STEPS) -> int:
    """Returns the exit status: 0 if everything passed, 1 if not, 2 for invalid flags."""
    flags = _parser(steps).parse_args(list(words))
    chosen = [one for one in steps if not flags.only or one.module in flags.only]
    environ = dict(os.environ)
    environ["PYTHONUNBUFFERED"] = "1"
    if flags.inject:
        environ[step.INJECT] = flags.inject
    out = Path(flags.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out):
            pass
    except OSError as error:
        print(f"first-light: error: --out {out}: {error.strerror}", file=sys.stderr)
        return 2
    # What was measured of shapes without a meaning, or with a fault, is not for engines to find.
    tuning = flags.tuning or (str(out / "tuning.json") if flags.inject or flags.size == "tiny" else "")
    environ[step.TUNING] = str(Path(tuning).absolute()) if tuning else ""
    count = "1 step" if len(chosen) == 1 else f"{len(chosen)} steps"
    print(f"First light on GPU {flags.gpu}: {count}, each in a process of its own. Ctrl-C ends it.", flush=True)
    outcomes = runner.run(
        chosen, flags.size, flags.gpu, environ, lambda line: print(line, flush=True), flags.limit_factor
    )
    page, data = out / "first-light.md", out / "first-light.json"
    page.write_text(report.as_page(outcomes, flags.size), encoding="utf-8")
    data.write_text(report.as_json(outcomes, flags.size), encoding="utf-8")
    states = [outcome.state for outcome in outcomes]
    print(f"\n{', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(states))}.")
    print(f"To read: {page}\nTo attach to an issue: {data}")
    return int(any(state != "passed" for state in states))


def _parser(steps: Sequence[runner.Step]) -> Parser:
    parser = Parser(
        prog=typed("services.doctor"),
        description="Try everything that only a GPU can show, and write a report: a page to read, and JSON to attach "
        "to an issue.\nNeither contains host or user names, or paths of this machine.",
        epilog="Exit status: 0 if everything passed, 1 if not, 2 for invalid flags.",
    )
    parser.add_argument("command", choices=["first-light"], help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=_ordinal, default=0, metavar="N", help="GPU ordinal (default 0)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="size", help="fewer repetitions")
    size.add_argument(
        "--tiny", action="store_const", const="tiny", dest="size", help="shapes that a CPU can run; times mean nothing"
    )
    parser.add_argument(
        "--out", default="first-light", metavar="DIR", help="where the report goes (default first-light)"
    )
    parser.add_argument(
        "--tuning", default="", metavar="PATH", help="where the tuning file goes (default: where engines look for it)"
    )
    names = [one.module for one in steps]
    parser.add_argument("--only", action="append", choices=names, help="run this step only; repeatable")
    # For tests: faults, and other limits than a GPU needs.
    parser.add_argument("--inject", choices=step.FAULTS, default="", help=argparse.SUPPRESS)
    parser.add_argument("--limit-factor", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.set_defaults(size="full")
    return parser


def _ordinal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{text!r} is not a GPU ordinal, 0 to 255")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
