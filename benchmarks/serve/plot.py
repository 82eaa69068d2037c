"""One page of plots of one or more reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve.report import Report
from benchmarks.serve.summary import Run, Spread


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write an SVG or PNG file, by the suffix. Needs matplotlib, which is in the extra ``bench``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(2, 2, figsize=(11, 8))
    for number, report in enumerate(reports):
        colour = f"C{number}"
        _latency(panes[0, 0], report, "ttft_s", colour)
        _latency(panes[0, 1], report, "itl_s", colour)
        rates = [run.rate for run in report.runs]
        panes[1, 0].plot(rates, [run.good_per_s for run in report.runs], "o-", color=colour, label=report.engine)
        panes[1, 1].plot(rates, [run.tokens_per_s for run in report.runs], "o-", color=colour, label=report.engine)
        if report.kill is not None and report.kill.gap_s is not None:
            kill = report.kill
            said = f"{report.engine}: {kill.streams} streams silent for {report.kill.gap_s.p50:.1f} s, {kill.lost} lost"
            panes[1, 1].plot(kill.run.rate, kill.run.tokens_per_s, "x", color=colour, label=f"daemon killed; {said}")
    limits = reports[0].limits
    for pane, limit in ((panes[0, 0], limits.ttft_s), (panes[0, 1], limits.itl_s)):
        pane.axhline(limit * 1e3, color="0.6", linestyle=":", label="limit")
        pane.set_yscale("log")
    panes[1, 0].axline((0, 0), slope=1, color="0.6", linestyle=":", label="all requests good")
    titles = (
        "time to first token, ms: p50, p90, p99",
        "inter-token latency, ms: p50, p90, p99",
        f"good requests per second: first token in {limits.ttft_s * 1e3:g} ms, then {limits.itl_s * 1e3:g} ms a token",
        "tokens per second",
    )
    for pane, title in zip(panes.flat, titles, strict=True):
        pane.set_title(title, fontsize=9)
        pane.set_xlabel("requests per second, planned")
        pane.set_xlim(left=0)
        pane.grid(True, alpha=0.3)
        pane.legend(fontsize=7)
    for pane in panes[1]:
        pane.set_ylim(bottom=0)
    figure.tight_layout()
    # Nothing in the file depends on when it was drawn.
    figure.savefig(path, dpi=90, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _latency(pane: Any, report: Report, name: str, colour: str) -> None:
    """Three lines: the median is the strongest."""
    found: list[tuple[Run, Spread]] = [(run, spread) for run in report.runs if (spread := getattr(run, name))]
    for part, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
        heights = [getattr(spread, part) * 1e3 for _, spread in found]
        label = report.engine if part == "p50" else None
        pane.plot([run.rate for run, _ in found], heights, "o" + style, color=colour, markersize=3, label=label)
