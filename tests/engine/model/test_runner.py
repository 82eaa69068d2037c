# mypy: disable-error-code="arg-type"
"""Steps on a model: the rows it is given, and whose fault a failure is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernels.sampling import reference
from kernels.sampling.launch import Batch, Drawn
from services.common.errors import ForwardFailed, GpuError, ServiceError
from services.engine.model.batch import Row
from services.engine.model.runner import Runner
from services.engine.pages.source import PageCopy
from services.engine.sampling.params import SamplingParams
from services.engine.sampling.result import Computed, Result
from services.engine.scheduling.sequence import Request, Stopping
from services.engine.scheduling.sequence import Sequence as Progress
from services.engine.scheduling.step import Chunk
from tests.engine.fakes import PlainText

GREEDY = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=3)


class Model:
    """Its logits point at the last token plus one; a row that begins with ``poison`` makes it raise."""

    def __init__(self, poison: int = -1) -> None:
        self.poison = poison
        self.calls: list[tuple[list[Row], Any]] = []

    def forward(self, rows: Sequence[Row], pages: Any) -> Any:
        self.calls.append((list(rows), pages))
        if any(row.tokens[0] == self.poison for row in rows):
            raise RuntimeError("poisoned")
        logits = np.zeros((sum(row.want_logits for row in rows), 10), np.float32)
        for at, row in enumerate(row for row in rows if row.want_logits):
            logits[at, row.tokens[-1] + 1] = np.nan if row.tokens[-1] == 8 else 1
        return logits


def chunk(tokens: list[int], start: int = 0, count: int | None = None, name: str = "r") -> Chunk:
    sequence = Progress(Request(name, tokens, Stopping(4), GREEDY, PlainText()), 1)
    sequence.pages.extend([7, 9])
    count = len(tokens) - start if count is None else count
    return Chunk(sequence, start, count, samples=start + count == len(tokens))


def test_rows_are_the_scheduled_tokens_at_their_place() -> None:
    model = Model()
    results = Runner(model, lambda: "memory").run([chunk([1, 2, 3, 4], 1, 2), chunk([5, 6], 1)])
    assert results == [None, 7]
    [(rows, pages)] = model.calls
    assert [(list(row.tokens), row.start, list(row.pages), row.want_logits) for row in rows] == [
        ([2, 3], 1, [7, 9], False),
        ([6], 1, [7, 9], True),
    ]
    assert pages == "memory"


def test_the_memory_is_asked_for_at_every_step() -> None:
    model, memories = Model(), iter("ab")
    runner = Runner(model, lambda: next(memories))
    runner.run([chunk([1])])
    runner.run([chunk([1])])
    assert [pages for _, pages in model.calls] == ["a", "b"]


def test_parameters_and_positions_go_to_the_sampler() -> None:
    seen: list[Any] = []

    def draw(logits: Any, batch: Batch) -> Drawn:
        seen.append((logits.shape, batch.rows["seed"].tolist(), batch.rows["position"].tolist()))
        return reference.sample(logits, batch)

    Runner(Model(), lambda: None, draw).run([chunk([1, 2, 3]), chunk([1, 2, 3], 0, 2)])
    assert seen == [((1, 10), [3], [3])]


def test_nothing_is_sampled_when_nothing_is_wanted() -> None:
    assert Runner(Model(), lambda: None, None).run([chunk([1, 2, 3], 0, 2)]) == [None]


class Deep(Model):
    """States are the tokens; their logits point at the token plus one."""

    logits_at_once = 2

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[int] = []

    def states(self, rows: Sequence[Row], pages: Any) -> Any:
        self.calls.append((list(rows), pages))
        return np.array([token for row in rows for token in list(row.tokens)[len(row.tokens) - row.want_logits :]])

    def logits(self, states: Any) -> Any:
        self.slices.append(len(states))
        logits = np.zeros((len(states), 10), np.float32)
        logits[range(len(states)), states + 1] = 5
        return logits


def telling(one: Chunk) -> Chunk:
    sampling = dataclasses.replace(GREEDY, prompt_logprobs=1)
    one.sequence.request = dataclasses.replace(one.sequence.request, sampling=sampling)
    return one


def test_a_prompts_log_probabilities_come_chunk_by_chunk_in_slices() -> None:
    model = Deep()
    runner = Runner(model, lambda: None)
    first = telling(chunk([1, 2, 4, 5, 6], 0, 3))
    one, other = runner.run([first, chunk([3])])
    assert isinstance(one, Computed) and other == 4 and not one.drawn
    assert [choice.token for choice in one.prompt] == [2, 4, 5] and [choice.rank for choice in one.prompt] == [1, 5, 1]
    assert [choice.top[0][0] for choice in one.prompt] == [2, 3, 5]
    assert [row.want_logits for row in model.calls[0][0]] == [3, 1] and model.slices == [2, 2]
    first.sequence.prompt_logprobs.extend(one.prompt)
    [rest] = runner.run([Chunk(first.sequence, 3, 2, samples=True)])
    assert isinstance(rest, Computed) and [choice.token for choice in rest.prompt] == [6] and rest.drawn == (7,)
    first.sequence.prompt_logprobs.extend(rest.prompt)
    # The pages were lost: what is computed again is not told again.
    assert runner.run([Chunk(first.sequence, 0, 5, samples=True)]) == [7]


def test_a_prompts_row_that_is_not_finite_ends_its_request_alone() -> None:
    class Broken(Deep):
        def logits(self, states: Any) -> Any:
            logits = super().logits(states)
            logits[states == 2] = np.nan
            return logits

    results = Runner(Broken(), lambda: None).run([telling(chunk([1, 2, 3, 4])), chunk([5])])
    assert kinds(results) == [ForwardFailed, 6]


def test_the_first_token_is_drawn_for_every_sample_of_the_one_row() -> None:
    one = chunk([1, 2])
    forks = [chunk([1, 2]).sequence for _ in range(3)]
    for at, fork in enumerate(forks):
        sampling = dataclasses.replace(GREEDY, temperature=1.0, seed=at, logit_bias=((at, 90.0),))
        fork.request = dataclasses.replace(fork.request, sampling=sampling)
    one.sequence.forks.extend(forks)
    model = Model()
    assert Runner(model, lambda: None).run([chunk([4]), one]) == [5, Computed((), (3, 0, 1, 2))]
    assert len(model.calls) == 1


def test_ends_are_banned_until_min_tokens() -> None:
    one = chunk([1, 2])
    stopping = Stopping(9, 3, frozenset({3}), frozenset({0}))
    one.sequence.request = dataclasses.replace(one.sequence.request, stopping=stopping)
    drawn = []
    for _ in range(4):
        [token] = Runner(Model(), lambda: None).run([one])
        drawn.append(token)
        one.sequence.tokens.append(2)
        one = Chunk(one.sequence, one.start, one.count + 1, samples=True)
    assert drawn == [1, 1, 1, 3]


def test_pages_are_copied_in_order_and_waited_for() -> None:
    done: list[Any] = []

    class Copies(Model):
        def copy_page(self, pages: Any, source: int, target: int) -> None:
            done.append((pages, source, target))

    runner = Runner(Copies(), lambda: "memory", finish=lambda: done.append("over"))
    runner.copy_pages([PageCopy(0, 1, 2), PageCopy(3, 2, 5)])
    assert done == [("memory", 1, 2), ("memory", 2, 5), "over"]
    with pytest.raises(GpuError, match="could not be copied"):
        Runner(Model(), lambda: None).copy_pages([PageCopy(0, 1, 2)])


def kinds(results: Sequence[Result]) -> list[Any]:
    return [type(result) if isinstance(result, ServiceError) else result for result in results]


def test_a_row_that_breaks_the_forward_pass_is_the_only_one_to_fail(logged: list[Any]) -> None:
    model = Model(poison=5)
    results = Runner(model, lambda: None).run([chunk([1]), chunk([5]), chunk([2, 3], 0, 1), chunk([4])])
    assert kinds(results) == [2, ForwardFailed, None, 5]
    assert [len(rows) for rows, _ in model.calls] == [4, 1, 1, 1, 1]
    assert [event["event"] for event in logged] == ["forward_failed"] * 2


def test_a_row_without_a_token_to_draw_fails_alone() -> None:
    results = Runner(Model(), lambda: None).run([chunk([8]), chunk([1])])
    assert kinds(results) == [ForwardFailed, 2]


def test_what_computes_failing_as_a_whole_is_raised() -> None:
    class Lost:
        def forward(self, rows: Any, pages: Any) -> Any:
            raise RuntimeError("an illegal address")

    def finish() -> None:
        raise RuntimeError("still an illegal address")

    runner = Runner(Lost(), lambda: None, finish=finish)
    with pytest.raises(GpuError, match="still an illegal address"):
        runner.run([chunk([1]), chunk([2])])


def test_nothing_is_told_before_the_step_is_over() -> None:
    order: list[str] = []

    class Slow:
        def forward(self, rows: Any, pages: Any) -> Any:
            order.append("queued")
            return np.zeros((len(rows), 4), np.float32)

    runner = Runner(Slow(), lambda: None, finish=lambda: order.append("over"))
    runner.run([chunk([1])])
    assert order == ["queued", "over"]


def test_suppressed_tokens_are_banned_at_the_beginning_or_always() -> None:
    banned: list[dict[int, float]] = []

    def draw(logits: Any, batch: Batch) -> Drawn:
        banned.append(dict(batch.entries[["id", "bias"]].tolist()))
        return reference.sample(logits, batch)

    one = chunk([1, 2, 3])
    sampling = dataclasses.replace(GREEDY, suppressed=frozenset({6}), begin_suppressed=frozenset({4, 6}))
    one.sequence.request = dataclasses.replace(one.sequence.request, sampling=sampling)
    runner = Runner(Model(), lambda: None, draw)
    assert runner.run([one]) == [0]  # 4 is the likeliest
    one.sequence.accept(3, 0.0)
    assert runner.run([Chunk(one.sequence, 3, 1, samples=True)]) == [4]
    one.sequence.accept(5, 0.0)
    assert runner.run([Chunk(one.sequence, 4, 1, samples=True)]) == [0]  # 6 is
    never = -np.inf
    assert banned == [{4: never, 6: never}, {6: never}, {6: never}]
