"""A run as a page: Markdown, JSON, and memory over time as SVG."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.observer import Series
from tests.chaos.run import Outcome
from tests.chaos.schedule import KINDS

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 260, 60, 30
COLOURS = {"daemon": "#c0392b", "engine-1": "#2471a3", "engine-2": "#1e8449"}
PAGES = ("free", "held", "cached", "quarantined")
PAGE_COLOURS = ("#bbbbbb", "#2471a3", "#1e8449", "#c0392b")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All of it, for programs."""
    verdict = outcome.verdict
    return {
        "seed": outcome.seed,
        "seconds": outcome.seconds,
        "healed_at_s": round(outcome.healed_at_s, 2),
        "ended_at_s": round(outcome.ended_at_s, 2),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "faults": [str(fault) for fault in outcome.faults],
        "history": verdict.history,
        "counts": dict(sorted(verdict.counts.items())),
        "calls": dict(sorted(outcome.calls.items())),
        "findings": [
            {"at_s": round(one.at_s, 2), "what": one.what, "detail": one.detail, "history": one.history}
            for one in verdict.findings
        ],
        "processes": {
            name: [(round(at, 1), memory, descriptors) for at, memory, descriptors in series.points]
            for name, series in outcome.series.items()
        },
        "pages": [(round(at, 1), *counts) for at, *counts in outcome.pages],
    }


def as_markdown(outcome: Outcome) -> str:
    """A summary, for people; the plots are files beside it."""
    verdict, counts = outcome.verdict, outcome.verdict.counts
    kinds = Counter(fault.kind for fault in outcome.faults)
    hostile = sum(many for what, many in counts.items() if what.startswith("hostile"))
    forwarded, harmed = outcome.calls.get("forwarded", 0), sum(outcome.calls.get(harm, 0) for harm in _HARMS)
    said = f"**{len(verdict.findings)} findings**" if verdict.findings else "No finding"
    lines = [
        f"{said}: seed {outcome.seed}, {outcome.seconds:g} s of faults, and "
        f"{outcome.ended_at_s - outcome.healed_at_s:.1f} s from the last of them until all was as it had been.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| `{kind}` | {kinds[kind]} |" for kind in KINDS if kinds[kind]),
        "",
        "| of the clients | |",
        "|---|---|",
        *(f"| {what} | {counts.get(what, 0):,} |" for what in CLIENTS),
        f"| acts of the hostile caller | {hostile:,} |",
        f"| Fsck, and the sum of the pages | {counts.get('looks', 0):,} times |",
        f"| calls of the engines forwarded, harmed | {forwarded:,}, {harmed:,} |",
        "",
        "| process | runs | longest run | its memory when warm, MiB | at its end | descriptors then |",
        "|---|---|---|---|---|---|",
        *_process_rows(outcome.series),
    ]
    if verdict.findings:
        lines += ["", "```", verdict.told(), "```"]
    return "\n".join(lines) + "\n"


CLIENTS = ("streams whole", "streams given up", "watchers left", "attempts cut", "tokens")
_HARMS = ("lose-requests", "lose-replies", "repeat-calls", "replay-calls-late")


def _process_rows(series: dict[str, Series]) -> list[str]:
    rows = []
    for name in COLOURS:
        runs = [one for run, one in series.items() if run.startswith(f"{name}.") and one.points]
        if not runs:
            continue
        longest = max(runs, key=lambda one: one.points[-1][0] - one.points[0][0]).points
        middle = longest[len(longest) // 5]
        lived = longest[-1][0] - longest[0][0]
        memory = f"{middle[1] / 2**20:.1f} | {longest[-1][1] / 2**20:.1f}"
        rows.append(f"| {name} | {len(runs)} | {lived:.0f} s | {memory} | {middle[2]}, {longest[-1][2]} |")
    return rows


# --- plots ------------------------------------------------------------------------------------------------------------


def _scaled(points: Sequence[tuple[float, float]], most_x: float, most_y: float) -> str:
    return " ".join(
        f"{LEFT + x / most_x * (WIDTH - LEFT - 10):.1f},{HEIGHT - BOTTOM - y / most_y * (HEIGHT - BOTTOM - 24):.1f}"
        for x, y in points
    )


def plot(title: str, unit: str, lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]) -> str:
    """An SVG of lines ``(name, colour, points)`` over seconds; lines of one name share its place in the legend."""
    most_x = max((x for _, _, points in lines for x, _ in points), default=1.0) or 1.0
    most_y = 1.1 * max((y for _, _, points in lines for _, y in points), default=1.0) or 1.0
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="14" font-size="13">{title}</text>',
    ]
    for part in range(5):
        x, y = most_x * part / 4, most_y * part / 4
        at_x, at_y = _scaled([(x, y)], most_x, most_y).split(",")
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{at_y}" y2="{at_y}" stroke="#eeeeee"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{float(at_y) + 4:.1f}" text-anchor="end">{y:.0f}</text>')
        drawn.append(f'<text x="{at_x}" y="{HEIGHT - 12}" text-anchor="middle">{x:.0f} s</text>')
    drawn.append(f'<text x="{LEFT - 6}" y="14" text-anchor="end">{unit}</text>')
    names = list(dict.fromkeys((name, colour) for name, colour, _ in lines))
    for at, (name, colour) in enumerate(names):
        drawn.append(f'<text x="{WIDTH - 100 * (len(names) - at)}" y="14" fill="{colour}">{name}</text>')
    for _, colour, points in lines:
        drawn.append(f'<polyline fill="none" stroke="{colour}" points="{_scaled(points, most_x, most_y)}"/>')
    return "\n".join([*drawn, "</svg>", ""])


def write(outcome: Outcome, folder: Path, name: str = "chaos") -> None:
    """Write ``NAME.md``, ``NAME.json``, ``NAME-memory.svg`` and ``NAME-pages.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    memory = [
        (run.partition(".")[0], COLOURS[run.partition(".")[0]], [(at, used / 2**20) for at, used, _ in series.points])
        for run, series in outcome.series.items()
    ]
    pages = [
        (kind, colour, [(point[0], float(point[1 + at])) for point in outcome.pages])
        for at, (kind, colour) in enumerate(zip(PAGES, PAGE_COLOURS, strict=True))
    ]
    (folder / f"{name}.md").write_text(as_markdown(outcome))
    (folder / f"{name}.json").write_text(json.dumps(as_json(outcome)) + "\n")
    (folder / f"{name}-memory.svg").write_text(plot("Anonymous memory of each process", "MiB", memory))
    (folder / f"{name}-pages.svg").write_text(plot("Pages of the pool", "pages", pages))
