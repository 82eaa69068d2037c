"""Steps on a model: the rows it is given, and whose fault a failure is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernels import sample_numpy
from kernels.sampling import Batch, Drawn
from services.engine.batch import Row
from services.engine.runner import Runner
from services.engine.sampling import SamplingParams
from services.engine.scheduler import Chunk
from services.engine.sequence import Request, Stopping
from services.engine.sequence import Sequence as Progress
from services.errors import ForwardFailed, GpuError, ServiceError
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
    sequence.pages = [7, 9]
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
        return sample_numpy.sample(logits, batch)

    Runner(Model(), lambda: None, draw).run([chunk([1, 2, 3]), chunk([1, 2, 3], 0, 2)])
    assert seen == [((1, 10), [3], [3])]


def test_nothing_is_sampled_when_nothing_is_wanted() -> None:
    assert Runner(Model(), lambda: None, None).run([chunk([1, 2, 3], 0, 2)]) == [None]  # type: ignore[arg-type]


def kinds(results: Sequence[int | ServiceError | None]) -> list[Any]:
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
