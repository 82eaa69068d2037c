"""The engine's metrics under vLLM's names, which routers read without being configured; docs/routers.md lists them."""

from __future__ import annotations

from prometheus_client.core import Metric

from services.common.prometheus import Families, Rows
from services.engine.api.served import Served
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.sequence import FinishReason
from services.engine.scheduling.stats import Snapshot

PREFIX = "vllm:"

#: vLLM's names of how requests end; errors are counted besides.
_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


def pool_usage(served: Served) -> float:
    """The fraction of the pool that no allocation can have, whichever engine holds it; 1 while there is no session."""
    available = served.source.available_pages
    return 1.0 if available is None else 1 - available / max(1, served.source.total_pages)


def request_families(families: Families, loop: EngineLoop, now: Snapshot) -> None:
    """Add those of requests and steps that vLLM has by the same name after its prefix, and that count the same."""
    totals, seen = loop.totals, loop.stats
    families.gauge("num_requests_running", "Requests that hold pages.", now.running_requests)
    families.gauge("num_requests_waiting", "Requests waiting for a batch slot or for pages.", now.waiting_requests)
    families.counter("num_preemptions_total", "Preemptions.", now.preemptions)
    families.counter("prompt_tokens_total", "Prompt tokens of queued requests.", totals.prompt_tokens)
    families.counter("generation_tokens_total", "Tokens sampled.", totals.generated_tokens)
    families.counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", now.looked_up_tokens)
    families.counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", now.cached_tokens)
    families.histogram("time_to_first_token_seconds", "Seconds from submission to the first token.", seen.first_token)
    families.histogram("inter_token_latency_seconds", "Seconds between tokens of a request.", seen.between_tokens)
    families.histogram("e2e_request_latency_seconds", "Seconds from submission to the request's end.", seen.request)
    families.histogram("request_queue_time_seconds", "Seconds from submission to the first pages.", seen.queue)
    families.histogram("request_prompt_tokens", "Prompt tokens of requests that ended.", seen.prompt_tokens)
    families.histogram("request_generation_tokens", "Generated tokens of requests that ended.", seen.generated_tokens)
    families.histogram("iteration_tokens_total", "Tokens computed in a step.", seen.step_tokens)


def vllm_families(served: Served, now: Snapshot) -> list[Metric]:
    """All families, with vLLM's labels ``model_name`` and ``engine``, the rank of a data-parallel engine."""
    families = Families(PREFIX, model_name=served.model_id, engine="0")
    totals = served.loop.totals
    request_families(families, served.loop, now)
    families.gauge("kv_cache_usage_perc", "Fraction of the pool held by all engines, 0 to 1.", pool_usage(served))
    families.info(
        "cache_config_info",
        "The shape of the KV cache.",
        block_size=str(served.source.page_size),
        num_gpu_blocks=str(served.source.total_pages),
    )
    ended: dict[tuple[str, ...], float] = {("error",): totals.failed_requests}
    for reason, name in _REASONS.items():
        ended[name,] = ended.get((name,), 0) + totals.ended[reason]
    rows: Rows = ended
    families.counters("request_success_total", "Requests that ended.", ("finished_reason",), rows)
    return families.metrics
