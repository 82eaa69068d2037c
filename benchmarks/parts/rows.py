"""The results of an engine benchmark, one number per row: printed, saved as JSON, checked against a target, plotted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurement ``name`` of ``part``: ``value`` in ``unit``.

    ``ratio`` is relative to what ``detail`` names; ``bar`` is its required minimum or, with ``most``, maximum.
    """

    part: str
    name: str
    value: float
    unit: str
    ratio: float | None = None
    bar: float | None = None
    most: bool = False
    detail: str = ""

    @property
    def missed(self) -> bool:
        """Whether the ratio is on the wrong side of its bar."""
        if self.bar is None or self.ratio is None:
            return False
        return self.ratio > self.bar if self.most else self.ratio < self.bar


def line(row: Row) -> str:
    """A row of the table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    bar = "" if row.bar is None else f"{'<=' if row.most else '>='} {row.bar:g}"
    missed = "  MISSED" if row.missed else ""
    return f"{row.part:12} {row.name:38} {row.value:12,.2f} {row.unit:9} {ratio:>7} {bar:>7}  {row.detail}{missed}"


def as_json(row: Row) -> str:
    """A row as one line of JSON."""
    return json.dumps(dataclasses.asdict(row))


def read(path: Path) -> list[Row]:
    """The rows that ``--json`` wrote to a file; other lines are ignored."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Row(**json.loads(one)) for one in lines if one.startswith('{"part"')]


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plot each part's rows in a PNG file in ``folder``. Needs matplotlib, which is in the extra ``bench``.

    Plots ratios if all of a part's rows have one, else values; grouped by unit.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for part in dict.fromkeys(row.part for row in rows):
        ours = [row for row in rows if row.part == part]
        units = list(dict.fromkeys(row.unit for row in ours))
        heights = [sum(row.unit == unit for row in ours) for unit in units]
        figure, panes = pyplot.subplots(
            len(units), 1, figsize=(8, 0.32 * len(ours) + 0.9 * len(units)), squeeze=False,
            gridspec_kw={"height_ratios": heights},
        )  # fmt: skip
        for axes, unit in zip(panes[:, 0], units, strict=True):
            kept = [row for row in ours if row.unit == unit]
            axes.barh(range(len(kept)), [row.value for row in kept], color=_colours(kept))
            axes.set_yticks(range(len(kept)), [row.name for row in kept], fontsize=8)
            axes.invert_yaxis()
            axes.set_xlabel(unit)
            axes.grid(True, axis="x", alpha=0.3)
            for place, row in enumerate(kept):
                if row.ratio is not None:
                    axes.text(row.value, place, f" {row.ratio:.2f}", va="center", fontsize=8)
            axes.set_xlim(right=1.12 * max(row.value for row in kept))
        figure.tight_layout()
        drawn.append(folder / f"engine-{part}.png")
        figure.savefig(drawn[-1], dpi=90)
        pyplot.close(figure)
    return drawn


def _colours(rows: Iterable[Row]) -> list[str]:
    return ["tab:red" if row.missed else "tab:gray" if "transformers" in row.name else "tab:blue" for row in rows]
