"""Exchanges in the traces of the requests that they are for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rocmforge.client.errors import KvCacheDown
from services.common.errors import ServiceError
from services.common.tracing.span import Span, SpanKind, Value
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import Demand, Grant
from services.engine.pages.traced import TracedExchanges

DEMAND = Demand("1:a", 0, (), 1, 0)


class Noted:
    """A span that keeps what it is given."""

    def __init__(self, name: str = "", links: Sequence[Span] = ()) -> None:
        self.name, self.links = name, list(links)
        self.children: list[Noted] = []
        self.attributes: dict[str, Value] = {}
        self.ends: list[str] = []

    @property
    def traceparent(self) -> str:
        return f"context of {self.name}"

    def child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        at: float | None = None,
        attributes: Mapping[str, Value] | None = None,
        links: Sequence[Span] = (),
    ) -> Span:
        self.children.append(Noted(f"{kind.name} of {self.name}", links))
        return self.children[-1]

    def set(self, attributes: Mapping[str, Value]) -> None:
        self.attributes.update(attributes)

    def end(self, at: float | None = None, *, error: str = "") -> None:
        self.ends.append(error)


class Source(GrpcPageSource):
    """Answers, or fails with, what it is given."""

    def __init__(self) -> None:
        self.error: ServiceError | None = None
        self.contexts: list[str] = []

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str], traceparent: str = "") -> Any:
        self.contexts.append(traceparent)
        return self

    def result(self) -> list[Grant]:
        if self.error is not None:
            raise self.error
        return [Grant("1:a")]


def test_the_call_is_the_first_requests_and_the_others_link_to_it() -> None:
    source, first, second = Source(), Noted("first"), Noted("second")
    exchange = TracedExchanges(source)([DEMAND], [], [first, second])
    [call], [other] = first.children, second.children
    assert source.contexts == ["context of CLIENT of first"]
    assert call.links == [] and other.links == [call]
    assert call.ends == other.ends == []
    assert exchange.result() == [Grant("1:a")]
    assert call.ends == other.ends == [""]
    assert call.attributes["rpc.response.status_code"] == "OK"


def test_one_that_is_for_no_sampled_request_tells_the_daemon_so() -> None:
    source = Source()
    exchanges = TracedExchanges(source)
    assert exchanges([DEMAND], [], []) is source and exchanges([DEMAND], [], []) is source
    assert {context[-3:] for context in source.contexts} == {"-00"} and len(source.contexts[0]) == 55


def test_one_that_fails_or_is_left_ends_its_spans() -> None:
    source, request = Source(), Noted("a")
    exchanges = TracedExchanges(source)
    source.error = KvCacheDown("gone")
    failing = exchanges([DEMAND], [], [request])
    with pytest.raises(KvCacheDown):
        failing.result()
    assert request.children[0].ends == ["UNAVAILABLE"]
    exchanges([DEMAND], [], [request])  # the session is lost: nobody collects it
    exchanges([], ["1:a"], [])
    assert request.children[1].ends == ["CANCELLED"]
