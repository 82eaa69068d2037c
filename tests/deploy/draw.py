"""``python -m tests.deploy.draw FILE``: the dashboard's panels, drawn from its queries after a minute of real load."""

from __future__ import annotations

import sys
import threading
import time

import matplotlib

from tests.deploy.observed import Prometheus, filled, observed, panels

matplotlib.use("Agg")
from matplotlib import pyplot

SECONDS = 75


def main() -> None:
    """Run the load, ask and draw."""
    with observed() as prometheus:
        threading.Event().wait(SECONDS)
        draw(prometheus, sys.argv[1])


def draw(prometheus: Prometheus, path: str) -> None:
    """One picture of all panels, each as the dashboard lays it out."""
    now = time.time()
    shown = panels()
    figure, axes = pyplot.subplots(len(shown) // 3, 3, figsize=(15, 12), layout="constrained")
    for panel, axis in zip(shown, axes.flat, strict=True):
        lines = []
        for target in panel["targets"]:
            found = prometheus.ask(
                "query_range",
                query=filled(target["expr"]),
                start=str(now - SECONDS + 12),
                end=str(now),
                step="1s",
            )["result"]
            for series in found:
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                times = [float(at) - now for at, _ in series["values"]]
                lines.append((label, times, [float(value) for _, value in series["values"]]))
        if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal":
            axis.stackplot(
                lines[0][1], *[values for _, _, values in lines], labels=[one[0] for one in lines], alpha=0.7
            )
        else:
            for label, times, values in lines:
                axis.plot(times, values, label=label)
        axis.set_title(panel["title"], fontsize=11)
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend
        unit = {"s": "seconds", "percentunit": "share", "reqps": "1/s"}.get(
            panel["fieldConfig"]["defaults"]["unit"], ""
        )
        axis.set_ylabel(unit, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, loc="upper left")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
