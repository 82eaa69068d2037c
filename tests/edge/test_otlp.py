"""Spans on their way to a collector: every one is sent, or counted as dropped."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.common.tracing.otlp import OtlpTracing
from tests.collector import Collector


def test_every_span_is_sent_or_counted_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_QUEUE_SIZE", "16"), ("MAX_EXPORT_BATCH_SIZE", "8"), ("SCHEDULE_DELAY", "20")):
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    with contextlib.closing(Collector()) as collector:
        collector.open.clear()
        tracing = OtlpTracing(collector.endpoint, 1.0, {"service.name": "a"})
        for _ in range(100):
            span = tracing.serve("a.Service/Method", ())
            assert span is not None
            tracing.end(span, "OK")
        assert (tracing.sent, tracing.dropped) == (0, 84), "what is being sent has a place in the queue"
        collector.open.set()
        asyncio.run(tracing.stop(60))
        assert (tracing.sent, tracing.dropped, len(collector.spans)) == (16, 84, 16)
        late = tracing.serve("a.Service/Method", ())
        assert late is not None
        tracing.end(late, "OK")
        assert tracing.dropped == 85


def test_a_share_of_the_calls_that_nobody_has_decided_on() -> None:
    with contextlib.closing(Collector()) as collector:
        tracing = OtlpTracing(collector.endpoint, 0.25, {"service.name": "a"})
        sampled = sum(tracing.serve("a.Service/Method", ()) is not None for _ in range(2000))
        assert 350 < sampled < 650
        asyncio.run(tracing.stop(1))
