"""The bench report: throughput, and latency distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from services.engine.cli.bench_load import Measured

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of non-empty sorted ``values``, interpolated linearly."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered)} | {f"p{at}": percentile(ordered, at) for at in PERCENTILES}


def report(samples: Sequence[Measured], seconds: float) -> dict[str, Any]:
    """The whole report. Times are in seconds and cover only requests that completed.

    Output token counts and rates include the tokens of failed requests.
    """
    whole = [sample for sample in samples if sample.error is None]
    usages = [sample.usage for sample in whole if sample.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    tokens = sum(sample.tokens for sample in samples)
    cached = sum(usage.cached_tokens for usage in usages)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(whole),
        "errors": dict(Counter(sample.error.reason for sample in samples if sample.error is not None)),
        "seconds": seconds,
        "requests_per_s": len(whole) / seconds,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else 0.0,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "preemptions": sum(usage.preemptions for usage in usages),
        "time_to_first_token_s": spread([s.first_token_s for s in whole if s.first_token_s is not None]),
        "inter_token_s": spread([gap for sample in whole for gap in sample.gaps]),
        "end_to_end_s": spread([sample.total_s for sample in whole]),
        "queue_s": spread([usage.queue_time.ToNanoseconds() / 1e9 for usage in usages]),
    }


_TIMES = {
    "time to first token": "time_to_first_token_s",
    "between tokens": "inter_token_s",
    "end to end": "end_to_end_s",
    "in the queue": "queue_s",
}


def lines(summary: dict[str, Any]) -> list[str]:
    """The report as lines of text."""
    errors = ", ".join(f"{count} {reason}" for reason, count in sorted(summary["errors"].items()))
    found = [
        f"requests    {summary['requests']} in {summary['seconds']:.2f} s, {summary['requests_per_s']:.2f}/s"
        + (f"; failed {summary['failed']}: {errors}" if summary["failed"] else ""),
        f"output      {summary['output_tokens']} tokens, {summary['output_tokens_per_s']:.1f}/s",
        f"prompts     {summary['prompt_tokens']} tokens, {summary['cached_share']:.1%} cached",
        f"preemptions {summary['preemptions']}",
        "",
        f"{'ms':20}" + "".join(f"{name:>11}" for name in ("mean", *(f"p{at}" for at in PERCENTILES))),
    ]
    for name, key in _TIMES.items():
        values = summary[key]
        cells = "".join(f"{value * 1e3:11.2f}" for value in values.values()) if values else f"{'-':>11}"
        found.append(f"{name:20}{cells}")
    return found
