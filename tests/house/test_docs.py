"""Docs that state facts about the code are held to them."""

from __future__ import annotations

import re
from pathlib import Path

from services.common import errors
from services.engine.scheduling.retry_after import LEAST_S, MOST_S

ROOT = Path(__file__).parents[2]


def table(page: str) -> set[tuple[str, str, str, str]]:
    """Reason, status, retry and meaning of each row of a page's table of errors."""
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| (.*) \| (.*) \|$", page, re.MULTILINE)
    return {(reason, code, retry.strip(), meaning) for reason, code, retry, meaning in rows}


def rows(names: list[str]) -> set[tuple[str, str, str, str]]:
    """What a table has to say of these errors."""
    expected = set()
    for kind in (getattr(errors, name) for name in names):
        retry = f"after {kind.retry_after_s:g} s" if kind.retry_after_s else ""
        if kind is errors.QueueFull:
            retry = f"{LEAST_S:g} to {MOST_S:g} s, estimated"
        expected.add((kind.reason, kind.code, retry, kind.__doc__.strip().splitlines()[0]))
    return expected


def names_between(begin: str, end: str | None) -> list[str]:
    section = (ROOT / "services" / "common" / "errors.py").read_text().split(begin)[1]
    return re.findall(r"^class (\w+)", section.split(end)[0] if end else section, re.MULTILINE)


def test_the_daemons_error_table_is_the_codes() -> None:
    names = ["FieldInvalid", "Internal", *names_between("# --- the KV-cache daemon", "# --- the engine")]
    assert table((ROOT / "docs" / "daemon.md").read_text()) == rows(names)


def test_the_engines_error_table_is_the_codes() -> None:
    own = set(names_between("# --- the engine", None)) - {"ModelInvalid"}  # which ends the start, and no call
    assert table((ROOT / "docs" / "api.md").read_text()) == rows(["FieldInvalid", "Internal", "ExceedsPool", *own])


def test_every_rpc_of_the_engine_has_an_example() -> None:
    proto = (ROOT / "protos" / "rocmforge" / "engine" / "v1" / "engine.proto").read_text()
    page = (ROOT / "docs" / "api.md").read_text()
    methods = re.findall(r"^  rpc (\w+)\(", proto, re.MULTILINE)
    assert methods
    assert [name for name in methods if f"rocmforge.engine.v1.EngineService/{name}\n" not in page] == []


def test_structures_names_every_module() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    for top in ("services", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            if not path.name.startswith("__"):
                rows = text.split(f"| `{folder}/` |")[-1]
                assert f"`{path.name}`" in rows, f"docs/structures.md does not say what {folder}/{path.name} is"


def test_alerts_are_on_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    tables, alerts = page.split("## What to alert on")
    told = dict(re.findall(r"^\| `(rocmforge_\w+)` \| (\w+) \|", tables, re.MULTILINE))
    asked = re.findall(r"rocmforge_\w+", alerts)
    assert told and asked
    for name in asked:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in told or told.get(family) == "histogram", f"an alert is on {name}"
    short = re.findall(r"`(\w+(?:_seconds|_total))`", alerts)
    assert all(any(name.endswith(one) for name in told) for one in short)


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
