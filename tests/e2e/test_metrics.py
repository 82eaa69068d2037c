"""Both services as processes: their metrics agree with their calls' answers and with each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from services.engine.metrics import PREFIX as ENGINE
from services.kvcache.metrics import PREFIX as KVCACHE
from tests.e2e.conftest import MODEL, Pair
from tests.generation import collect, request
from tests.processes import Service, engine, kvcache
from tests.scraping import Scrape, read, scrape

PROMPT = "KING RICHARD III:\n" + "A horse! a horse! my kingdom for a horse! " * 5


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The daemon gets the metrics address from its environment, the engine from a file."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        directory = Path(name)
        file = directory / "engine.toml"
        file.write_text('metrics = "localhost:0"')
        environment = {**os.environ, "ROCMFORGE_KVCACHE_METRICS": "127.0.0.1:0"}
        with kvcache(directory, environment=environment) as daemon:
            with engine(directory, daemon.address, "--config", str(file), model=MODEL) as one:
                yield Pair(daemon, one, directory)


def address(service: Service) -> str:
    return str(service.started()["metrics"])


def look(pair: Pair) -> tuple[Scrape, Scrape]:
    return scrape(address(pair.engine)), scrape(address(pair.daemon))


def test_the_two_agree_with_their_calls_and_with_each_other(pair: Pair) -> None:
    prompts = [PROMPT, *(f"Act {at}. " * 12 for at in range(7))]
    batch = engine_pb2.BatchGenerateRequest(requests=[request(prompt, 20) for prompt in prompts])
    assert not any(item.HasField("error") for item in pair.stub.BatchGenerate(batch))
    finish = collect(pair.stub.Generate(request(PROMPT, 20)))[2]
    assert finish.usage.cached_tokens > 0
    lengths = [len(pair.stub.Tokenize(engine_pb2.TokenizeRequest(text=prompt)).token_ids) for prompt in prompts]
    prompt_tokens = sum(lengths) + lengths[0]

    mine, theirs = look(pair)
    stats, pool = pair.stub.GetStats(engine_pb2.GetStatsRequest()), pair.pool()
    assert mine.value(f"{ENGINE}prompt_tokens_total") == prompt_tokens == stats.prompt_tokens
    assert mine.value(f"{ENGINE}generation_tokens_total") == 9 * 20 == stats.generated_tokens
    assert mine.value(f"{ENGINE}request_success_total", finished_reason="length") == 9 == stats.finished_requests
    assert mine.value(f"{ENGINE}time_to_first_token_seconds_count") == 9
    assert mine.value(f"{ENGINE}inter_token_latency_seconds_count") == 9 * 19
    assert mine.value(f"{ENGINE}step_seconds_count", phase="compute") == stats.steps
    # What the engine found cached, the daemon gave; both looked the same prompts up.
    label = {"pool": pool.pool_id}
    hits, queries = f"{ENGINE}prefix_cache_hits_total", f"{ENGINE}prefix_cache_queries_total"
    assert mine.value(hits) == theirs.value(f"{KVCACHE}prefix_cache_hits_total", **label) == finish.usage.cached_tokens
    assert mine.value(queries) == theirs.value(f"{KVCACHE}prefix_cache_queries_total", **label) == prompt_tokens
    # What the engine asked, the daemon served.
    for method in ("OpenSession", "AttachSession", "AllocatePages"):
        labels = {"method": method, "code": "OK"}
        asked = mine.value(f"{ENGINE}kvcache_rpc_handled_total", **labels)
        assert asked == theirs.value(f"{KVCACHE}rpc_handled_total", **labels) > 0
        span = mine.value(f"{ENGINE}kvcache_rpc_handling_seconds_sum", method=method)
        assert span > theirs.value(f"{KVCACHE}rpc_handling_seconds_sum", method=method) > 0
    assert mine.value(f"{ENGINE}page_calls_total") == stats.page_calls
    # And they mean the same run.
    epoch = {"epoch": f"{stats.kvcache_epoch:016x}"}
    assert mine.labels(f"{ENGINE}lease_info") == [epoch]
    assert [labels["epoch"] for labels in theirs.labels(f"{KVCACHE}run_info")] == [epoch["epoch"]]
    states = {state: theirs.value(f"{KVCACHE}pages", state=state, **label) for state in ("free", "held", "cached")}
    assert states == {"free": pool.free_pages, "held": 0, "cached": pool.cached_pages}
    assert theirs.value(f"{KVCACHE}arena_bytes", **label) == (
        pair.cache.GetStats(kvcache_pb2.GetStatsRequest()).arena_bytes
    )
    for seen in (mine, theirs):
        assert seen.value("process_open_fds") > 0 and seen.value("process_resident_memory_bytes") > 1 << 20
    pair.assert_clean()


def test_prometheus_may_ask_in_its_newer_format(pair: Pair) -> None:
    collect(pair.stub.Generate(request(PROMPT, 3)))
    for where, prefix in ((address(pair.engine), ENGINE), (address(pair.daemon), KVCACHE)):
        text = read(where, accept="application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = {sample.name for family in families.values() for sample in family.samples}
        plain = {name for name, _ in scrape(where).samples if name.startswith(prefix)}
        assert plain and plain <= samples


def test_the_endpoint_goes_with_the_service(pair: Pair) -> None:
    ends = [(service, address(service)) for service in (pair.engine, pair.daemon)]
    for service, where in ends:
        assert "# TYPE process_cpu_seconds_total counter" in read(where)
        assert service.stop() == 0 and "Traceback" not in service.log()
        with pytest.raises(OSError, match="refused"):
            read(where)
