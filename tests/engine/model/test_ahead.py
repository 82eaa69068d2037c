# mypy: disable-error-code="arg-type, misc, assignment, method-assign"
"""Asynchronous steps on a real model and sampler: the same bits as synchronous ones, whatever a request asks for."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.common.errors import ForwardFailed
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from services.engine.model.runner import Runner, _Asks
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import PageCopy
from services.engine.sampling.params import SamplingParams, seed_of
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.sequence import Outcome, Request, State, Stopping
from services.engine.scheduling.sequence import Sequence as Progress
from services.engine.scheduling.step import Chunk, Flight
from tests.engine.fakes import Clock, PlainText
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint

PAGE_SIZE = 4
EOS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = llama_config()
    return Model.load(write_checkpoint(tmp_path_factory.mktemp("model"), config, random_tensors(config)))


@dataclass(frozen=True)
class Ask:
    """A request, and after how many rounds it arrives and is cancelled."""

    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    ends: bool
    stop: tuple[str, ...]
    n: int
    params: SamplingParams
    arrives: int
    cancelled: int | None


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.just(0.0),
    seed=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.7]),
    logit_bias=st.sampled_from([(), (), ((EOS, 9.0),), ((5, 4.0), (7, -4.0))]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
    suppressed=st.sampled_from([frozenset(), frozenset({9})]),
    begin_suppressed=st.sampled_from([frozenset(), frozenset({9, EOS})]),
)
asks = st.builds(
    Ask,
    st.lists(st.integers(0, 20), min_size=1, max_size=18).map(tuple),
    st.integers(1, 12),
    st.sampled_from([0, 0, 4]),
    st.booleans(),
    st.sampled_from([(), (), ("f",), ("ab", "h")]),
    st.sampled_from([1, 1, 1, 3]),
    params,
    st.integers(0, 12),
    st.sampled_from([None, None, None, 3, 9]),
)


def request_of(name: str, ask: Ask) -> Request:
    stopping = Stopping(ask.max_tokens, ask.min_tokens, frozenset({EOS} if ask.ends else ()))
    first = Request(name, ask.prompt, stopping, ask.params, PlainText(ask.stop))
    others = [
        dataclasses.replace(
            first,
            sample=sample,
            sampling=dataclasses.replace(ask.params, seed=seed_of(ask.params.seed, sample), prompt_logprobs=None),
            text=PlainText(ask.stop),
        )
        for sample in range(1, ask.n)
    ]
    return dataclasses.replace(first, others=tuple(others))


Output = dict[tuple[str, int], tuple[list[Any], Outcome | None]]


def outputs(
    model: Model,
    work: Sequence[Ask],
    pages: int,
    limits: Limits,
    asynchronous: bool,
    wrap: Callable[[Callable[[Sequence[Chunk]], Flight]], Callable[[Sequence[Chunk]], Flight]] = lambda launch: launch,
) -> Output:
    """Everything that the requests receive, by request and sample."""
    g = model.geometry(PAGE_SIZE)
    memory = np.full((pages, g.layers, 2, g.kv_heads, PAGE_SIZE, g.head_dim), np.nan, np.float32)
    runner, found, clock = Runner(model, lambda: memory), Output(), Clock()

    def outbox(events: list[Event]) -> None:
        for event in events:
            told, _ = found.get((event.request_id, event.sample), ([], None))
            told += zip(event.token_ids, event.logprobs or [None] * len(event.token_ids), strict=True)
            told += [("prompt", one) for one in event.prompt_logprobs]
            found[event.request_id, event.sample] = told, event.outcome

    launch = wrap(runner.launch) if asynchronous else None
    loop = EngineLoop(runner, LocalPageSource(pages, PAGE_SIZE), limits, outbox, launch=launch, clock=clock)
    for now in range(3000):
        for nth, ask in enumerate(work):
            if ask.arrives == now:
                loop.submit(request_of(f"r{nth}", ask))
            if ask.cancelled == now:
                loop.cancel(f"r{nth}")
        clock.now += loop.iterate() + 0.001
        if now > 12 and not loop.scheduler.live:
            return found
    raise AssertionError(f"not idle: {loop.scheduler}")


def same(on: Output, off: Output, work: Sequence[Ask]) -> None:
    assert on.keys() == off.keys()
    for (name, sample), (told, outcome) in on.items():
        expected, ended = off[name, sample]
        if work[int(name[1:])].cancelled is None:
            assert told == expected
            assert repr(outcome) == repr(ended)  # errors are not equal
        else:  # how far it comes depends on the time
            shorter = min(len(told), len(expected))
            assert told[:shorter] == expected[:shorter]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(asks, min_size=1, max_size=8), st.integers(12, 60), st.integers(1, 6), st.integers(1, 30))
def test_the_same_bits_as_without(
    model: Model, work: list[Ask], pages: int, max_batch: int, max_step_tokens: int
) -> None:
    limits = Limits(max_batch, max_step_tokens + max_batch, 100)
    same(outputs(model, work, pages, limits, True), outputs(model, work, pages, limits, False), work)


def plain(nth: int, **params: Any) -> Ask:
    chosen = SamplingParams(1.0, 0, 1.0, 0.0, nth, **params)
    return Ask((1, 2, 3 + nth), 9, 0, False, (), 1, chosen, 0, None)


def test_a_penalty_takes_a_step_that_is_over_and_nothing_else_does(model: Model) -> None:
    depth: list[bool] = []

    def counting(launch: Any) -> Any:
        def launched(step: Sequence[Chunk]) -> Flight:
            depth.append(launch.__self__._last is not None)
            return launch(step)

        return launched

    limits = Limits(8, 64, 100)
    for odd, ahead in [
        ({}, True),
        ({"logprobs": 2}, True),
        ({"logit_bias": ((5, 2.0),)}, True),
        ({"suppressed": frozenset({4})}, True),
        ({"presence_penalty": 0.5}, False),
        ({"prompt_logprobs": 1}, True),  # once the prompt's are told
    ]:
        depth.clear()
        work = [*(plain(nth) for nth in range(5)), plain(5, **odd)]
        outputs(model, work, 60, limits, True, counting)
        assert any(depth) == ahead, odd


@pytest.mark.parametrize("late", [False, True], ids=["while it is computed", "as its tokens are read"])
def test_a_row_that_breaks_a_step_ends_alone_and_the_step_behind_it_is_run_again(
    model: Model, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, draws, orphans = model.forward, _Asks.draws, list[Row]()

    def broken(rows: Sequence[Row], pages: NDArray[np.float32], *drawn: Any) -> Any:
        orphans.extend(row for row in rows if row.tokens[0] < 0 and not drawn)
        # Its fifth token: a step that is launched behind another one, and has one launched behind it.
        if not late and any(row.start == 7 and row.pages[0] == marked[0] for row in rows):
            raise RuntimeError("broken")
        return forward(rows, pages, *drawn)

    def unreadable(asks: _Asks, drawn: Any) -> Any:
        if late and any(one.seed == 2 and at == 8 for one, at in zip(asks.params, asks.positions, strict=True)):
            raise RuntimeError("broken")
        return draws(asks, drawn)

    marked = [-1]
    work = [plain(nth) for nth in range(6)]
    limits = Limits(8, 64, 100)
    expected = outputs(model, work, 60, limits, False)
    monkeypatch.setattr(_Asks, "draws", unreadable)

    again: list[int] = []

    def marking(launch: Any) -> Any:
        runner, rerun = launch.__self__, launch.__self__.again

        def counted(step: Sequence[Chunk]) -> Any:
            again.append(len(step))
            return rerun(step)

        runner.again = counted

        def launched(step: Sequence[Chunk]) -> Flight:
            marked[0] = next((c.sequence.pages[0] for c in step if c.sequence.id == "r2"), marked[0])
            return launch(step)

        return launched

    model.forward = broken
    try:
        found = outputs(model, work, 60, limits, True, marking)
    finally:
        model.forward = forward
    told, outcome = found.pop(("r2", 0))
    assert outcome is not None and isinstance(outcome.error, ForwardFailed)
    assert told == expected.pop(("r2", 0))[0][: len(told)] and 1 < len(told) < 9
    assert found == expected
    assert again == [6, 6]  # itself and the one behind it; then steps run ahead as before
    assert not orphans  # no row whose token the step before did not sample is computed


def chunk(name: str, tokens: Sequence[int], source_id: str = "1", **fields: Any) -> Chunk:
    """The next token of a sequence that runs; it has a page, and all tokens but the last are computed."""
    sequence = Progress(Request(name, tokens, Stopping(9), SamplingParams(0.0, 0, 1.0, 0.0, 0), PlainText()), 1)
    sequence.pages.extend([len(name)])
    sequence.state, sequence.source_id = State.RUNNING, source_id
    return Chunk(sequence, len(tokens) - 1, 1, True, **{"source_id": source_id, **fields})


class Held:
    """A forward pass that waits for ``go``, and notes what it found then: `block_tables` of its rows."""

    logits_at_once = 8

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.block_tables: list[list[int]] = []
        self.order: list[str] = []

    def forward(self, rows: Sequence[Row], pages: Any, *drawn: Any) -> NDArray[np.float32]:
        self.begun.set()
        assert self.go.wait(60)
        self.block_tables += [list(row.pages) for row in rows]
        self.order.append("forward")
        return np.eye(8, dtype=np.float32)[[3] * len(rows)]

    def copy_page(self, pages: Any, source: int, target: int) -> None:
        self.order.append("copy")
        self.go.set()


def test_a_step_on_a_host_has_the_block_tables_of_its_launch() -> None:
    """A preemption empties the sequence's while the step is in flight."""
    model, one = Held(), chunk("a", [1, 2])
    runner, behind = Runner(model, lambda: None), chunk("bb", [1, 2])
    flight = runner.launch((one,))
    assert model.begun.wait(60)
    second = runner.launch((behind,))
    for sequence in (one.sequence, behind.sequence):
        del sequence.pages[:]
    model.go.set()
    assert [flight.wait(), second.wait()] == [[3], [3]]
    assert model.block_tables == [[1], [2]]


def test_pages_are_copied_behind_the_steps_in_flight() -> None:
    model = Held()
    runner = Runner(model, lambda: None)
    flight = runner.launch((chunk("a", [1, 2]),))
    worker = runner._worker
    assert worker is not None and model.begun.wait(60)
    submit = worker.submit

    def waited(*given: Any) -> Any:
        model.go.set()
        return submit(*given)

    worker.submit = waited
    runner.copy_pages([PageCopy(0, 1, 2)])
    flight.wait()
    assert model.order == ["forward", "copy"]


def test_a_row_of_an_earlier_admission_is_not_run_again() -> None:
    model = Held()
    model.go.set()
    runner = Runner(model, lambda: None)
    assert runner.again((chunk("a", [1, 2], source_id="2"), chunk("bb", [1, 2]))) == [3, 3]
    before = chunk("a", [1, 2])
    before.sequence.source_id = "2"
    assert runner.again((before, chunk("bb", [1, 2]))) == [None, 3]
    assert model.block_tables == [[1], [2], [2]]


def test_a_discarded_step_is_waited_for_and_not_run_again() -> None:
    """Its session may be lost: others may have its pages by now."""
    model, finished = Held(), list[str]()
    runner = Runner(model, lambda: None, finish=lambda: finished.append("finish"))
    forward = model.forward

    def broken(*given: Any) -> Any:
        forward(*given)
        raise RuntimeError("broken")

    model.forward = broken
    first, second = runner.launch((chunk("a", [1, 2]),)), runner.launch((chunk("bb", [1, 2]),))
    worker = runner._worker
    assert worker is not None and model.begun.wait(60)
    submit = worker.submit

    def waited(*given: Any) -> Any:
        model.go.set()
        return submit(*given)

    worker.submit = waited
    second.discard()
    assert (model.order, finished) == (["forward"], ["finish"])
    first.discard()
    assert model.order == ["forward"]
    model.forward, model.order = forward, []
    flight = runner.launch((chunk("a", [1, 2]),))  # not behind what was discarded
    assert flight.wait() == [3] and flight.leads and model.order == ["forward"]
