"""Copies on write as a transition system: a parent and its fork share a page that is not full, and others take pages.

Whoever wants to write to a shared page is granted a fresh one with an order to copy, holds the source until it reports
a token in the fresh one, and copies in the step that writes that token. Steps come in any order, and each takes as long
as anything else likes. What a page holds is the shared tokens, and who wrote behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

SHARED, PARENT, FORK, STRANGER = "x", "P", "F", "B"
READY, ORDERED, COPIED, WRITTEN, REPORTED, OVER = "ready", "ordered", "copied", "written", "reported", "over"


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protections."""

    copy_when_shared: bool = True  # nobody writes to a page that another holds too
    hold_source: bool = True  # the source of a copy is held while the copy is to be made
    report_after_copy: bool = True  # an engine reports a token when the step is done that wrote it


class Page(NamedTuple):
    """``of`` are its holders; it is free without one."""

    of: frozenset[str] = frozenset()
    content: str = ""


class Sequence(NamedTuple):
    """``page`` is the one for its next token, ``source`` what is to be copied there."""

    stage: str = READY
    page: int = 0
    source: int | None = None


class State(NamedTuple):
    pages: tuple[Page, ...]
    sequences: tuple[Sequence, Sequence]
    stranger: int | None = None
    wrong: str = ""


class Model:
    """Of a parent and a fork, which share page 0, and a stranger."""

    def __init__(self, rules: Rules, pages: int = 3) -> None:
        self.rules = rules
        first = Page(frozenset({PARENT, FORK}), SHARED)
        self.first = State((first, *[Page()] * (pages - 1)), (Sequence(), Sequence()))

    def violated(self, state: State) -> str:
        """What is wrong with a state; nothing, if it is sound."""
        return state.wrong

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step from here, by name."""
        for at, name in enumerate((PARENT, FORK)):
            for word, after in self._sequence(state, at, name):
                yield f"{word} {name}", after
        if state.stranger is None:
            free = next((at for at, page in enumerate(state.pages) if not page.of), None)
            if free is not None:
                yield f"take {STRANGER}", _put(state, free, Page(frozenset({STRANGER})))._replace(stranger=free)
        else:
            page = state.pages[state.stranger]
            yield f"fill {STRANGER}", _put(state, state.stranger, page._replace(content=STRANGER))
            yield f"leave {STRANGER}", _drop(state, state.stranger, STRANGER)._replace(stranger=None)

    def _sequence(self, state: State, at: int, name: str) -> Iterator[tuple[str, State]]:
        rules, mine = self.rules, state.sequences[at]
        page = state.pages[mine.page]
        if mine.stage == READY and page.of == {name}:
            yield "own", _with(state, at, mine._replace(stage=COPIED))
        elif mine.stage == READY and not rules.copy_when_shared:
            yield "share", _with(state, at, mine._replace(stage=COPIED))
        elif mine.stage == READY:
            free = next((one for one, page in enumerate(state.pages) if not page.of), None)
            if free is not None:
                granted = _with(state, at, Sequence(ORDERED, free, mine.page))
                granted = _put(granted, free, Page(frozenset({name}), state.pages[free].content))
                yield "order", granted if rules.hold_source else _drop(granted, mine.page, name)
        elif mine.stage == ORDERED and mine.source is not None:
            copied = page._replace(content=state.pages[mine.source].content)
            yield "copy", _put(_with(state, at, mine._replace(stage=COPIED)), mine.page, copied)
            if not rules.report_after_copy and name in state.pages[mine.source].of:
                yield "report", _drop(state, mine.source, name)
        elif mine.stage == COPIED:
            written = _put(
                _with(state, at, mine._replace(stage=WRITTEN)), mine.page, page._replace(content=page.content + name)
            )
            right = page.content == SHARED
            yield "write", written if right else written._replace(wrong=f"{name} writes behind {page.content!r}")
        elif mine.stage == WRITTEN:
            if page.content != SHARED + name:
                yield "use", state._replace(wrong=f"{name} reads {page.content!r}")
            after = _with(state, at, mine._replace(stage=REPORTED, source=None))
            held = mine.source is not None and name in state.pages[mine.source].of
            yield "report", _drop(after, mine.source, name) if held and mine.source is not None else after
        if mine.stage in (READY, REPORTED):  # between its steps
            after = _with(state, at, Sequence(OVER))
            yield "remove", _drop(after, mine.page, name)


def _with(state: State, at: int, sequence: Sequence) -> State:
    return state._replace(sequences=(sequence, state.sequences[1]) if at == 0 else (state.sequences[0], sequence))


def _put(state: State, at: int, page: Page) -> State:
    return state._replace(pages=(*state.pages[:at], page, *state.pages[at + 1 :]))


def _drop(state: State, at: int, name: str) -> State:
    page = state.pages[at]
    return _put(state, at, page._replace(of=page.of - {name}))
