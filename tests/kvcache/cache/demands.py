"""Demands as tests write them: a step is one sequence's, and those in a row become columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from services.kvcache.eviction.hints import ReuseHint
from services.kvcache.eviction.retention import Retention


class Step(NamedTuple):
    """One sequence of `Steps`."""

    sequence_id: str
    start: int = 0
    tokens: tuple[int, ...] = ()
    total_pages: int = 0
    known_pages: int = 0


Demand = Step | Opening


def opening(
    name: str,
    prompt: Iterable[int],
    pages: int = 0,
    salt: str = "",
    retention: Retention | None = None,
    reuse_hint: ReuseHint | None = None,
) -> Opening:
    return Opening(name, Prompt(array("I", prompt), salt, retention, reuse_hint), pages)


def fork(name: str, parent: str, pages: int = 0) -> Opening:
    return Opening(name, parent, pages)


def growth(name: str, start: int, tokens: Iterable[int], pages: int, known: int = 0) -> Step:
    return Step(name, start, tuple(tokens), pages, known)


def in_columns(steps: Sequence[Step], *, growing: bool = True) -> Steps:
    return Steps(
        [step.sequence_id for step in steps],
        [step.start for step in steps],
        [len(step.tokens) for step in steps],
        array("I", [token for step in steps for token in step.tokens]),
        [step.total_pages for step in steps] if growing else [],
        [step.known_pages for step in steps] if growing else [],
    )


def grouped(demands: Iterable[Demand]) -> list[Steps | Opening]:
    """As a call has them."""
    found: list[Steps | Opening] = []
    for kind, group in groupby(demands, type):
        row: list[Any] = list(group)
        found += [in_columns(row)] if kind is Step else row
    return found
