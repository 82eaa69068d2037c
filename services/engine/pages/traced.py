"""Exchanges with the daemon in the traces of the requests that they are for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Items

from services.common.errors import ServiceError
from services.common.tracing.span import RPC_METHOD, RPC_STATUS, RPC_SYSTEM, Span, SpanKind
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import Demand, Exchange, Grant

METHOD = "rocmforge.kvcache.v1.KvCacheService/AllocatePages"


class TracedExchanges:
    """Makes the exchanges of a page source. One serves the whole batch, and a call has one parent: so it belongs to the
    trace of the first sampled request that it is for. In the traces of the others is a span that links to it.

    One that is for no sampled request says so to the daemon, which then does not sample it either.
    """

    def __init__(self, source: GrpcPageSource) -> None:
        self._source = source
        self._unsampled = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
        self._last: _TracedExchange | None = None

    def __call__(self, demands: Items[Demand], removed: Items[str], requests: Items[Span]) -> Exchange:
        """Start the exchange, which is for ``requests`` among others. Raises what `GrpcPageSource.exchange` raises."""
        last, self._last = self._last, None
        if last is not None:
            last.end("CANCELLED")  # if it was left with its session, nobody has waited for it
        if not requests:
            return self._source.exchange(demands, removed, self._unsampled)
        first, *others = requests
        asked = {"rocmforge.demands": len(demands), "rocmforge.removed_sequences": len(removed)}
        call = first.child(METHOD, SpanKind.CLIENT, attributes={RPC_SYSTEM: "grpc", RPC_METHOD: METHOD, **asked})
        spans = [call, *(other.child(METHOD, attributes=asked, links=[call]) for other in others)]
        try:
            self._last = _TracedExchange(self._source.exchange(demands, removed, call.traceparent), spans)
        except ServiceError as error:
            _end(spans, error.code)
            raise
        return self._last


class _TracedExchange:
    """An exchange that ends its spans."""

    def __init__(self, exchange: Exchange, spans: list[Span]) -> None:
        self._exchange, self._spans = exchange, spans

    def result(self) -> list[Grant]:
        try:
            grants = self._exchange.result()
        except ServiceError as error:
            self.end(error.code)
            raise
        self.end("OK")
        return grants

    def end(self, code: str) -> None:
        _end(self._spans, code)


def _end(spans: list[Span], code: str) -> None:
    for span in spans:
        span.set({RPC_STATUS: code})
        span.end(error="" if code == "OK" else code)
