"""``make chaos`` and ``make soak``: run a schedule of faults, write a report, fail on any finding."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from tests.chaos import report
from tests.chaos.run import Run
from tests.chaos.schedule import KINDS, faults
from tests.processes import ROOT

#: A soak ends no process after this part of it, so that the memory of those that live can be watched.
UNREST = 0.25


def main(arguments: list[str] | None = None) -> int:
    """Run and report. Returns the exit status: 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults come (default 60)")
    parser.add_argument("--seed", type=int, help="of the schedule; drawn and printed by default")
    parser.add_argument(
        "--soak", action="store_true", help=f"end processes in the first {UNREST:.0%}% of the time only"
    )
    parser.add_argument("--faults", help=f"the kinds of faults, of {', '.join(KINDS)}; default: all")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "chaos", help="folder (default build/chaos)")
    flags = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 31) if flags.seed is None else flags.seed
    kinds = set(flags.faults.split(",") if flags.faults else KINDS)
    try:
        schedule = faults(seed, flags.seconds, kinds, processes_until_s=flags.seconds * UNREST if flags.soak else None)
    except ValueError as error:
        parser.error(str(error))
    print(f"seed {seed}: {len(schedule)} faults in {flags.seconds:g} s", flush=True)
    outcome = Run(seed, flags.seconds, schedule, say=lambda line: print(line, flush=True)).go()
    name = "soak" if flags.soak else "chaos"
    report.write(outcome, flags.report, name)
    print(report.as_markdown(outcome))
    print(f"The report is in {flags.report}: {name}.md, {name}.json and two plots")
    return 1 if outcome.verdict.findings else 0


if __name__ == "__main__":
    sys.exit(main())
