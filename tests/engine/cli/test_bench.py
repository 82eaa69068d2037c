"""The load generator: what it draws, when it sends, what it reports."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import QueueFull
from services.engine import cli
from services.engine.cli import bench_load, client
from services.engine.cli.bench_load import Lengths, Measured, Plan
from services.engine.cli.bench_report import lines, percentile, report, spread
from tests.engine.running import RunningEngine
from tests.generation import collect, request
from tests.processes import ROOT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    limits = ["--max-batch", "2", "--max-queue", "2", "--local-pages", "256"]
    one = RunningEngine(tmp_path_factory.mktemp("e"), *limits).start()
    yield one
    one.close()


# --- what is sent -----------------------------------------------------------------------------------------------------


def plan(**fields: Any) -> Plan:
    given: dict[str, Any] = {"requests": 200, "inputs": Lengths(5, 9), "outputs": Lengths(3, 3), "seed": 1}
    return Plan(**{**given, **fields})


def test_a_seed_draws_a_load() -> None:
    first, again, other = (list(plan(seed=seed).arrivals(1000)) for seed in (1, 1, 2))
    assert first == again != other
    lengths = {len(arrival.request.prompt.tokens.ids) for arrival in first}
    assert lengths == {5, 6, 7, 8, 9} and {arrival.at for arrival in first} == {0.0}
    assert {arrival.request.stopping.max_tokens for arrival in first} == {3}
    assert all(0 <= token < 1000 for arrival in first for token in arrival.request.prompt.tokens.ids)
    assert not first[0].request.stopping.ignore_eos and not first[0].request.sampling.HasField("temperature")


def test_arrivals_of_a_rate() -> None:
    times = [arrival.at for arrival in plan(requests=4000, rate=50.0).arrivals(10)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert all(gap > 0 for gap in gaps)
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)  # 1/e: exponential


def test_what_prompts_share() -> None:
    made = [list(arrival.request.prompt.tokens.ids) for arrival in plan(shared=5).arrivals(1000)]
    assert len({tuple(ids[:5]) for ids in made}) == 1 and len({tuple(ids) for ids in made}) > 150
    assert {len(ids) for ids in made} == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "5-", "9-5", "1-2-3", "1.5"])
def test_lengths_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)
    assert Lengths.parse("7") == Lengths(7, 7) and Lengths.parse("7-9") == Lengths(7, 9)


class Clock:
    """Time passes when somebody waits for it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(0)  # what was begun before has its turn first
        self.now += seconds


def test_a_rate_sends_when_it_is_due_and_waits_for_nobody() -> None:
    clock, sent, under_way = Clock(), list[tuple[float, float]](), [0, 0]

    async def main() -> float:
        all_sent = asyncio.Event()

        async def answer(request: pb.GenerateRequest, due: float) -> Measured:
            under_way[0] += 1
            under_way[1] = max(under_way)
            sent.append((clock(), due))
            if len(sent) == 20:
                all_sent.set()
            await all_sent.wait()
            under_way[0] -= 1
            return Measured()

        arrivals = plan(requests=20, rate=10.0).arrivals(10)
        return await bench_load.run(arrivals, answer, None, lambda sample: None, clock, clock.wait)

    asyncio.run(main())
    due = [100.0 + arrival.at for arrival in plan(requests=20, rate=10.0).arrivals(10)]
    assert [at for _, at in sent] == pytest.approx(due) and [at for at, _ in sent] == pytest.approx(due)
    assert under_way[1] == 20


def test_a_concurrency_is_kept() -> None:
    under_way, most, done = [0], [0], list[Measured]()

    async def answer(request: pb.GenerateRequest, due: float) -> Measured:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(0)
        under_way[0] -= 1
        return Measured()

    asyncio.run(bench_load.run(plan(requests=50).arrivals(10), answer, 7, done.append))
    assert most == [7] and len(done) == 50


class Said:
    """A stub whose answers come at given times."""

    def __init__(self, clock: Clock, *answers: tuple[float, int]) -> None:
        self.clock = clock
        self.answers = answers

    async def Generate(self, request: pb.GenerateRequest) -> Any:
        for at, tokens in self.answers:
            self.clock.now = at
            yield pb.GenerateResponse(token_ids=[1] * tokens)
        yield pb.GenerateResponse(finish=pb.Finish(usage=pb.Usage(prompt_tokens=4)))


def test_times_of_a_request() -> None:
    clock = Clock()
    stub = Said(clock, (101.0, 1), (101.5, 1), (103.5, 4))
    sample = asyncio.run(bench_load.send(stub, pb.GenerateRequest(), client.Target("there"), 99.0, clock))
    assert sample.first_token_s == 2.0 and sample.total_s == 4.5 and sample.tokens == 6
    assert sample.gaps == [0.5, 0.5, 0.5, 0.5, 0.5] and sample.usage is not None and sample.error is None


# --- what is told -----------------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    values = [float(at) for at in range(101)]
    assert spread(values[::-1]) == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentile([1.0, 2.0], 50) == 1.5 and percentile([7.0], 99) == 7.0 and spread([]) is None


def test_a_report() -> None:
    usage = pb.Usage(prompt_tokens=10, cached_tokens=4, preemptions=1)
    usage.queue_time.FromMilliseconds(20)
    good = [Measured(0.1, 1.0, [0.3, 0.6], 3, usage), Measured(0.3, 2.0, [0.9], 2, usage)]
    bad = Measured(0.2, 9.0, [5.0], 2, None, QueueFull("full"))
    told = report([*good, bad], 2.0)
    assert (told["requests"], told["failed"], told["errors"]) == (3, 1, {"QUEUE_FULL": 1})
    assert (told["output_tokens"], told["output_tokens_per_s"], told["requests_per_s"]) == (7, 3.5, 1.0)
    assert (told["prompt_tokens"], told["cached_share"], told["preemptions"]) == (20, 0.4, 2)
    assert told["time_to_first_token_s"]["p50"] == pytest.approx(0.2)
    assert told["inter_token_s"]["p50"] == pytest.approx(0.6) and told["end_to_end_s"]["mean"] == 1.5
    assert told["queue_s"]["p99"] == pytest.approx(0.02)
    text = "\n".join(lines(told))
    assert "failed 1: 1 QUEUE_FULL" in text and "40.0% cached" in text and "7 tokens, 3.5/s" in text
    assert [line.split()[-1] for line in text.splitlines()[-4:]] == ["298.00", "894.00", "1990.00", "20.00"]
    nothing = report([bad], 1.0)
    assert nothing["queue_s"] is None and lines(nothing)


def test_against_an_engine(engine: RunningEngine, capsys: Captured) -> None:
    before = engine.stub.GetStats(pb.GetStatsRequest())
    flags = ["--requests", "9", "--concurrency", "3", "--input-len", "40-50", "--output-len", "4", "--shared", "32"]
    flags += ["--ignore-eos", "--target", engine.address]
    assert cli.run("bench", [*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    after = engine.stub.GetStats(pb.GetStatsRequest())
    assert (told["requests"], told["failed"], told["output_tokens"]) == (9, 0, 36)
    assert told["prompt_tokens"] == after.prompt_tokens - before.prompt_tokens
    assert 9 * 40 <= told["prompt_tokens"] <= 9 * 50
    assert told["cached_tokens"] == after.cached_tokens - before.cached_tokens > 0
    assert 0 < told["queue_s"]["p50"] < told["time_to_first_token_s"]["p50"] < told["end_to_end_s"]["p99"]
    assert cli.run("bench", ["--requests", "2", "--rate", "500", *flags[4:]]) == 0
    assert capsys.readouterr().out.startswith("requests    2 in ")


def test_what_the_engine_refuses_is_counted(engine: RunningEngine, capsys: Captured) -> None:
    engine.steps.hold()
    blocker = engine.stub.Generate(request(max_tokens=2))
    assert engine.steps.reached.wait(60)  # what comes now is looked at when the step is over
    flags = ["--requests", "12", "--concurrency", "12", "--input-len", "4", "--output-len", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.engine", "bench", *flags, "--json", "--target", engine.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(engine.engine.streams) < 13:
        assert process.poll() is None
    engine.until_live(13)
    engine.steps.release()
    collect(blocker)
    out, err = process.communicate(timeout=60)
    told = json.loads(out)
    assert process.returncode == 1 and told["failed"] > 0
    assert told["errors"] == {"QUEUE_FULL": told["failed"]}
    assert err.startswith(f"rocmforge bench: {told['failed']} of 12 failed; the first: QUEUE_FULL: ")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--requests", "0"], "--requests 0: expected 1 to 1000000"),
        (["--concurrency", "9999"], "--concurrency 9999: expected 1 to 4096"),
        (["--seed", "-1"], "--seed -1: expected 0 to 18446744073709551615"),
        (["--rate", "0"], "--rate 0: expected more than 0 requests a second"),
        (["--rate", "nan"], "--rate nan: expected more"),
        (["--temperature", "-1"], "--temperature -1: expected 0 to 100"),
        (["--input-len", "x"], "--input-len x: expected N or N-M"),
        (["--output-len", "9-5"], "--output-len 9-5: expected 1 or more"),
        (["--input-len", "4-9", "--shared", "5"], "--shared 5: exceeds the minimum of --input-len 4-9"),
        (["--input-len", "2000"], "--input-len 2000: the context of shakespeare is 1024"),
    ],
)
def test_flags_that_cannot_be(engine: RunningEngine, capsys: Captured, flags: list[str], says: str) -> None:
    assert cli.run("bench", [*flags, "--target", engine.address]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"rocmforge bench: {says}") and shown.err.count("\n") == 1


def test_an_interrupt_ends_the_load(engine: RunningEngine, tmp_path: Path) -> None:
    engine.steps.hold()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.engine", "bench", "--requests", "3", "--target", engine.address],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert engine.steps.reached.wait(60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"", b"")
    engine.steps.release()
