"""The Prometheus rules and the Grafana dashboard: they are valid, fire when they should, and find what they ask for."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from services.engine.metrics import PREFIX as ENGINE
from services.kvcache.metrics import PREFIX as KVCACHE
from tests.deploy.observed import DEPLOY, observed, panels
from tests.processes import ROOT

RULES = (DEPLOY / "rules.yml").read_text()
TESTS = (DEPLOY / "rules.test.yml").read_text()
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES, re.MULTILINE)


@pytest.mark.needs("promtool")
def test_rules_are_valid_and_fire_when_they_should() -> None:
    for command in (("check", "rules", "rules.yml"), ("test", "rules", "rules.test.yml")):
        done = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    assert len(ALERTS) > 10
    for alert in ALERTS:
        cases = re.findall(rf"- alertname: {alert}\n +eval_time: \w+\n( +exp_alerts:)?", TESTS)
        assert sorted(bool(case) for case in cases) == [False, True], alert


def test_every_metric_named_is_documented() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    named = set(re.findall(rf"\b((?:{ENGINE}|{KVCACHE})\w+)", RULES + (DEPLOY / "dashboard.json").read_text()))
    assert len(named) > 20
    for name in named:
        assert f"`{re.sub('_(bucket|sum|count)$', '', name)}`" in documented or f"`{name}`" in documented, name


@pytest.mark.needs("prometheus")
def test_every_query_finds_series_under_load() -> None:
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(queries) > 15
    recorded = re.findall(r"^ +- record: (\S+)$", RULES, re.MULTILINE)
    with observed() as prometheus:
        deadline = time.monotonic() + 120
        empty = {*queries, *recorded}
        while empty:
            empty = {query for query in empty if not _has_numbers(prometheus.series(query))}
            assert time.monotonic() < deadline, f"without series: {sorted(empty)}"
        [group] = [group for group in prometheus.ask("rules")["groups"] if group["name"] == "rocmforge-alerts"]
        assert {rule["name"] for rule in group["rules"]} == set(ALERTS)
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
        assert {target["health"] for target in prometheus.ask("targets")["activeTargets"]} == {"up"}


def _has_numbers(series: list[dict[str, list[str]]]) -> bool:
    return any(one["value"][1] != "NaN" for one in series)
