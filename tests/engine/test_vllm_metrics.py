"""Metrics under vLLM's names: what routers read, and that a shared pool which others fill is seen to be full."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocmforge.client.cache import KvCache
from rocmforge.client.demands import Demand, Opening
from services.engine.metrics import PREFIX as OWN
from services.engine.vllm_metrics import PREFIX
from services.kvcache.metrics import PREFIX as KVCACHE
from services.version import VERSION
from tests.engine.running import RunningEngine
from tests.generation import collect, request
from tests.processes import Service, kvcache
from tests.scraping import Scrape, read, scrape, until

DOCS = Path(__file__).parents[2] / "docs" / "routers.md"
FLAGS = ("--metrics", "127.0.0.1:0", "--metrics-names", "vllm", "--pool-pages", "10", "--max-batch", "4")
LABELS = {"model_name": "shakespeare", "engine": "0"}

#: What `promtool check metrics` says of names that are vLLM's, and not ours to choose.
KNOWN = (
    r"vllm:\S+ metric names should not contain ':'",
    r"(vllm:|rocmforge_engine_)iteration_tokens_total non-counter metrics should not have \"_total\" suffix",
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Service]:
    with kvcache(tmp_path, "--session-ttl", "1", "--metrics", "127.0.0.1:0") as one:
        yield one


@pytest.fixture
def engine(tmp_path: Path, daemon: Service) -> Iterator[RunningEngine]:
    with contextlib.closing(RunningEngine(tmp_path, *FLAGS, kvcache=daemon.address)) as one:
        one.start()
        yield one


def look(engine: RunningEngine) -> Scrape:
    bound = engine.engine.metrics_bound
    assert bound
    return scrape(bound)


def test_a_pool_that_another_engine_fills_is_seen_to_be_full_by_an_idle_one(
    engine: RunningEngine, daemon: Service
) -> None:
    def usage(value: float) -> None:
        until(lambda: look(engine), f"{PREFIX}kv_cache_usage_perc", value, **LABELS)
        assert look(engine).value(f"{OWN}pool_usage_perc") == value

    usage(0)
    source = engine.engine._source or engine.engine.loop._source
    other = KvCache(daemon.address, engine.engine.pool_id, source._cache.layout, ttl_s=600)
    other.reopen()
    try:
        other.step([Demand("a", 0, [], 5, 0, Opening([1]))])
        usage(0.5)
        other.step([Demand("b", 0, [], 5, 0, Opening([2]))])
        usage(1)
        assert look(engine).value(f"{OWN}kv_cache_usage_perc") == 0, "of the engine's own pages"
        other.step([], ["a", "b"])
        usage(0)
    finally:
        other.close()
    daemon.kill()
    usage(1)


def test_they_say_what_the_engines_own_say(engine: RunningEngine) -> None:
    for _ in range(2):
        collect(engine.stub.Generate(request([*range(1, 41)], max_tokens=6)))
    engine.idle()
    seen = look(engine)
    same = [
        *("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"),
        *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *(f"time_to_first_token_seconds_{part}" for part in ("count", "sum")),
        *(f"inter_token_latency_seconds_{part}" for part in ("count", "sum")),
        *(f"e2e_request_latency_seconds_{part}" for part in ("count", "sum")),
        *("request_queue_time_seconds_count", "request_prompt_tokens_sum", "request_generation_tokens_sum"),
        "iteration_tokens_total_count",
    ]
    for name in same:
        assert seen.value(PREFIX + name, **LABELS) == seen.value(OWN + name), name
    assert seen.value(f"{PREFIX}prefix_cache_hits_total", **LABELS) == 32
    assert seen.labels(f"{PREFIX}cache_config_info") == [{"block_size": "16", "num_gpu_blocks": "10", **LABELS}]
    ended = {row["finished_reason"] for row in seen.labels(f"{PREFIX}request_success_total")}
    assert ended == {"stop", "length", "abort", "error"}
    assert seen.value(f"{PREFIX}request_success_total", finished_reason="length", **LABELS) == 2
    assert seen.labels(f"{OWN}build_info") == [{"version": VERSION}]
    documented = set(re.findall(rf"`({PREFIX}\w+)`", DOCS.read_text()))
    assert {name for name in names(read(str(engine.engine.metrics_bound))) if name.startswith(PREFIX)} == documented


def names(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def test_they_are_off_unless_asked_for(tmp_path: Path) -> None:
    with contextlib.closing(RunningEngine(tmp_path, "--metrics", "127.0.0.1:0")) as one:
        one.start()
        assert not [name for name in names(read(str(one.engine.metrics_bound))) if name.startswith(PREFIX)]


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing_but_vllms_own_names(engine: RunningEngine, daemon: Service) -> None:
    collect(engine.stub.Generate(request(max_tokens=2)))
    for address, prefix in ((engine.engine.metrics_bound, OWN), (daemon.started()["metrics"], KVCACHE)):
        text = read(str(address))
        assert f"{prefix}build_info" in text
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        said = [line for line in done.stderr.splitlines() if not any(re.fullmatch(known, line) for known in KNOWN)]
        assert said == [] and done.returncode in (0, 3), done.stderr
