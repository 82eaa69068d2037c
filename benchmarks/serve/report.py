"""The result of a benchmark of serving, as JSON and as lines of text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve.summary import Generators, Kill, Limits, Run, Spread

#: Of the file's fields. One that is removed, renamed or means something else makes another number.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. ``rate`` of a run is planned; the burst, whose requests were all due at once, gave ``capacity``, in
    requests per second, where rates were not given. ``kill`` is None for an engine without a daemon.
    """

    engine: str
    backend: str
    model: str
    trace: str
    seed: int
    divisor: int
    output_divisor: int
    seconds: float
    connections: int
    generators: int
    cores: int
    limits: Limits
    capacity: float | None
    burst: Run | None
    runs: list[Run]
    kill: Kill | None
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Report:
    """What `Report.write` wrote. Raises ValueError naming the file if it is not such a report."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}; expected {SCHEMA}")
        kill = found["kill"]
        if kill is not None:
            kill = Kill(**kill | {"gap_s": _spread(kill["gap_s"]), "run": _run(kill["run"])})
        made = {
            "limits": Limits(**found["limits"]),
            "burst": _run(found["burst"]) if found["burst"] else None,
            "runs": [_run(one) for one in found["runs"]],
            "kill": kill,
        }
        return Report(**found | made)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a report of this benchmark: {error}") from error


def _spread(found: dict[str, float] | None) -> Spread | None:
    return None if found is None else Spread(**found)


def _run(found: dict[str, Any]) -> Run:
    lag = found["generators"]
    late = {name: _spread(lag[name]) for name in ("sends_late_s", "wakes_late_s")}
    latencies = ("ttft_s", "itl_s", "end_to_end_s", "silence_s")
    return Run(**found | {name: _spread(found[name]) for name in latencies} | {"generators": Generators(**lag | late)})


def heading() -> str:
    """Of `line`."""
    cells = ("ttft ms p50", "p90", "p99", "itl ms p50", "p90", "p99")
    return f"{'rate/s':>8}{'good/s':>8}{'good':>6}{'tok/s':>9}{'cached':>8}" + "".join(f"{cell:>12}" for cell in cells)


def line(run: Run) -> str:
    """A run as a line of the table."""
    cells = "".join(
        f"{value * 1e3:12.1f}"
        for spread in (run.ttft_s, run.itl_s)
        for value in ((spread.p50, spread.p90, spread.p99) if spread else ())
    )
    rate = "burst" if run.rate is None else f"{run.rate:.2f}"
    begun = f"{rate:>8}{run.good_per_s:8.2f}{run.good_share:6.0%}{run.tokens_per_s:9.1f}{run.cached_share:8.0%}"
    return begun + cells + "".join(f"  {said}" for said in remarks(run))


def remarks(run: Run) -> Iterator[str]:
    """What to know before the numbers are believed."""
    if run.failed:
        yield "failed: " + ", ".join(f"{count} {reason}" for reason, count in run.failed.items())
    lag = run.generators
    if lag.slow and lag.sends_late_s and lag.wakes_late_s:
        yield (
            f"the generator was slow: it sent {lag.sends_late_s.p99 * 1e3:.1f} ms late and woke "
            f"{lag.wakes_late_s.p99 * 1e3:.1f} ms late (p99)"
        )


def told(kill: Kill) -> str:
    """A kill in a line."""
    gap = f"silent for {kill.gap_s.p50:.2f} s (median), {kill.gap_s.max:.2f} s at most" if kill.gap_s else "none"
    refused = ", ".join(f"{count} {reason}" for reason, count in kill.refused.items()) or "none"
    return (
        f"daemon killed at {kill.killed_at:.1f} s, serving again {kill.serving_at - kill.killed_at:.2f} s later: "
        f"{kill.streams} streams, {kill.lost} lost, {gap}; {kill.waiting} requests were waiting, refused: {refused}"
    )
