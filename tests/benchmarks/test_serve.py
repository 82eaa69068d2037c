"""The benchmark of serving: its arithmetic, its plans, and a short run with real processes."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import __main__ as serve
from benchmarks.serve import plan, record, report, summary, trace
from benchmarks.serve.load import Load
from benchmarks.serve.plan import Plan
from benchmarks.serve.record import Lag, Record
from benchmarks.serve.summary import Generators, Kill, Limits, Run, Spread
from benchmarks.serve.trace import Traced
from tests.benchmarks.stalling import stalling_engine

LIMITS = Limits(ttft_s=1.0, itl_s=0.1)
NO_LAG = Lag([0.0], [0.0], 0.1)
PLAN = Plan(
    rate=50.0, seconds=2.0, burst=4, seed=3, divisor=64, output_divisor=8, context=256, vocab_size=100, salt="x"
)


def done(number: int, due: float, first: float, gap: float, tokens: int, error: str = "") -> Record:
    """A request whose tokens came one by one."""
    arrivals = [(due + first + gap * at, 1) for at in range(tokens)]
    end = arrivals[-1][0] if arrivals else due + first
    return Record(number, due, tokens, due, arrivals, end, error, prompt_tokens=10, cached_tokens=5)


class TestArrivals:
    def test_are_a_poisson_process(self) -> None:
        times = list(plan.arrivals(50, 200, seed=1))
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        assert times == sorted(times) and times[0] > 0 and times[-1] < 200
        # Of exponential gaps the deviation is the mean, and one in e^2 is longer than twice that.
        assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
        assert sum(gap > 0.04 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.02)

    def test_follow_from_the_seed(self) -> None:
        first = list(plan.arrivals(5, 20, seed=1))
        assert first == list(plan.arrivals(5, 20, seed=1)) != list(plan.arrivals(5, 20, seed=2))
        # Another rate stretches them.
        assert list(plan.arrivals(10, 10, seed=1)) == pytest.approx([at / 2 for at in first])

    def test_of_a_burst_are_all_at_once(self) -> None:
        assert [due for due, _ in PLAN.at(None, "").requests()] == [0.0] * 4


class TestRequests:
    def test_follow_from_the_seed(self) -> None:
        assert PLAN.requests() == PLAN.requests() != dataclasses.replace(PLAN, seed=4).requests()

    def test_share_the_tokens_of_the_blocks_they_share(self) -> None:
        traced = [Traced(1500, 80, (0, 1, 2)), Traced(1024, 8, (0, 1)), Traced(1500, 80, (0, 3, 2))]
        one, two, three = trace.scaled(traced, divisor=64, output_divisor=8, context=256, vocab_size=1000, seed=0)
        assert [len(each.prompt) for each in (one, two, three)] == [23, 16, 23]
        assert [each.tokens for each in (one, two, three)] == [10, 1, 10]
        assert one.prompt[:16] == two.prompt and one.prompt[:8] == three.prompt[:8]
        assert one.prompt[8:16] != three.prompt[8:16]

    def test_fit_the_context(self) -> None:
        found = trace.scaled([Traced(99 * 512, 5000, tuple(range(99)))], 8, 1, 256, 1000, 0)[0]
        assert (len(found.prompt), found.tokens) == (128, 128)

    def test_are_conversations_where_none_are_given(self) -> None:
        found = trace.invented(4000, seed=0)
        assert found == trace.invented(4000, seed=0)
        assert all(one.blocks[0] == 0 and len(one.blocks) * 512 >= one.input_length for one in found)
        seen, hits, blocks = set[int](), 0, 0
        for one in found:
            hits, blocks = hits + len(seen & set(one.blocks)), blocks + len(one.blocks)
            seen |= set(one.blocks)
        assert 0.25 < hits / blocks < 0.75
        assert 200 < statistics.mean(one.output_length for one in found) < 500

    @pytest.mark.parametrize("line", ["{}", "[]", "no", '{"input_length": 1, "output_length": "x", "hash_ids": [0]}'])
    def test_a_line_that_is_no_request_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text('{"input_length": 9, "output_length": 1, "hash_ids": [0]}\n' + line, encoding="utf-8")
        with pytest.raises(ValueError, match=r"trace\.jsonl:2: expected a JSON object with input_length"):
            trace.read(path)

    def test_a_trace_that_is_too_short_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text('{"input_length": 9, "output_length": 1, "hash_ids": [0]}', encoding="utf-8")
        with pytest.raises(ValueError, match=r"has 1 requests; \d+ are due in 2 s"):
            dataclasses.replace(PLAN, trace=str(path)).requests()


class TestLatencies:
    def test_count_from_the_planned_arrival(self) -> None:
        one = Record(0, due=1.0, wanted=3, sent=1.75, arrivals=[(2.0, 1), (2.5, 2)], end=2.5)
        assert one.first_token_s == 1.0
        assert one.gaps == [0.25, 0.25] and one.silence_s == 0.5 and one.tokens == 3
        run = Run.of(1.0, [one], [NO_LAG], LIMITS)
        assert run.end_to_end_s is not None and run.end_to_end_s.max == 1.5

    def test_have_percentiles(self) -> None:
        assert Spread.of([float(at) for at in range(101)]) == Spread(50.0, 90.0, 99.0, 100.0)
        assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.9, 1.99, 2.0)
        assert Spread.of([]) is None

    def test_tokens_of_a_first_message_came_together(self) -> None:
        assert Record(0, 0.0, 2, arrivals=[(1.0, 2)]).gaps == [0.0]


class TestGoodput:
    @pytest.mark.parametrize(
        ("one", "good"),
        [
            (done(0, 0, 0.9, 0.05, 5), True),
            (done(0, 0, 1.1, 0.05, 5), False),
            (done(0, 0, 0.9, 0.15, 5), False),
            (done(0, 0, 0.9, 0.15, 1), True),
            (done(0, 0, 0.9, 0.05, 5, error="QUEUE_FULL"), False),
            (done(0, 0, 0.9, 0.05, 0), False),
        ],
    )
    def test_is_of_requests_within_both_limits(self, one: Record, good: bool) -> None:
        assert LIMITS.met(one) is good

    def test_and_throughput_are_of_the_whole_time(self) -> None:
        records = [done(0, 0, 0.5, 0.1, 11), done(1, 1, 2.0, 0.1, 11), done(2, 1, 0.1, 0, 0, error="QUEUE_FULL")]
        run = Run.of(2.0, records, [NO_LAG], LIMITS)
        assert run.seconds == pytest.approx(4.0) and run.requests == 3 and run.failed == {"QUEUE_FULL": 1}
        assert run.requests_per_s == pytest.approx(2 / 4) and run.good_per_s == pytest.approx(1 / 4)
        assert run.tokens_per_s == pytest.approx(22 / 4) and run.cached_share == 0.5
        assert run.good_share == pytest.approx(1 / 3) and run.saturated

    def test_capacity_is_of_full_batches(self) -> None:
        records = [done(at, 0.0, 1.0 + at, 0, 1) for at in range(9)] + [done(9, 0.0, 99.0, 0, 1)]
        assert summary.capacity(records) == pytest.approx(1.0)
        with pytest.raises(RuntimeError, match="QUEUE_FULL"):
            summary.capacity([done(0, 0.0, 1.0, 0, 1, error="QUEUE_FULL")])

    def test_a_slow_generator_is_named(self) -> None:
        quick, slow = Lag([0.0] * 99, [0.001] * 99, 0.2), Lag([0.0] * 99, [0.05] * 99, 0.9)
        assert not Generators.of([quick]).slow
        found = Generators.of([quick, slow])
        assert found.slow and found.busy == 0.9
        run = Run.of(1.0, [done(0, 0, 0.1, 0.1, 2)], [slow], LIMITS)
        assert "the generator was slow" in report.line(run)


class TestKill:
    def test_tells_streams_from_requests_that_waited(self) -> None:
        stream = Record(0, 0.0, 3, 0.0, [(1.0, 1), (4.5, 1), (4.6, 1)], 4.7)
        lost = Record(1, 0.0, 3, 0.0, [(1.5, 1)], 3.0, "KVCACHE_DOWN")
        waited = Record(2, 1.9, 1, 1.9, [(5.0, 1)], 5.0)
        refused = Record(3, 2.5, 1, 2.5, [], 2.6, "KVCACHE_DOWN")
        before, after = Record(4, 0.0, 1, 0.0, [(1.0, 1)], 1.0), Record(5, 4.2, 1, 4.2, [(5.0, 1)], 5.0)
        records = [stream, lost, waited, refused, before, after]
        kill = Kill.of(2.0, 4.0, records, Run.of(1.0, records, [NO_LAG], LIMITS))
        assert (kill.streams, kill.lost, kill.waiting) == (2, 1, 2)
        assert kill.gap_s is not None and kill.gap_s.max == 3.5 and kill.gap_s.p50 == pytest.approx(2.5)
        assert kill.refused == {"KVCACHE_DOWN": 1}

    def test_pauses_that_ended_before_do_not_count(self) -> None:
        one = Record(0, 0.0, 3, 0.0, [(0.0, 1), (9.0, 1), (9.5, 1)], 10.2)
        assert summary.gap_after(one, 9.2) == pytest.approx(0.7)


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Record], list[Lag], float]]:
    """A run against an engine that answers none before all have asked; when it did, after the start."""
    folder, starts = tmp_path_factory.mktemp("stalled"), list[float]()
    with stalling_engine(folder, until=len(PLAN.requests())) as (address, engine):
        records, lags = Load(address, generators=2, connections=4, limit_s=300, folder=folder).run(PLAN, starts.append)
        assert engine.going_at is not None, "it waited in vain for the rest of them"
        yield records, lags, engine.going_at - starts[0]


class TestGenerator:
    def test_sends_every_request_of_the_plan_once(self, stalled: tuple[list[Record], list[Lag], float]) -> None:
        records, lags, _ = stalled
        planned = PLAN.requests()
        assert sorted((one.number, one.due, one.wanted) for one in records) == [
            (number, due, one.tokens) for number, (due, one) in enumerate(planned)
        ]
        assert not any(one.error for one in records) and len(lags) == 2
        assert all(
            one.tokens == one.wanted and one.prompt_tokens == len(planned[one.number][1].prompt) for one in records
        )

    def test_waits_for_no_answer(self, stalled: tuple[list[Record], list[Lag], float]) -> None:
        # A loop that waited for answers would send one request a connection while the engine stands still.
        records, _, answered_s = stalled
        assert len(records) > 50 and all(one.sent < answered_s for one in records)
        # And what they waited is in their latencies.
        assert all(one.first_token_s and one.due + one.first_token_s > answered_s for one in records)

    def test_never_sends_early(self, stalled: tuple[list[Record], list[Lag], float]) -> None:
        records, lags, _ = stalled
        assert all(one.sent >= one.due for one in records)
        assert all(late >= 0 for lag in lags for late in lag.sends) and all(lag.wakes for lag in lags)

    def test_misses_tokens_that_did_not_come(self, tmp_path: Path) -> None:
        with stalling_engine(tmp_path, until=1, missing=1) as (address, _):
            records, _ = Load(address, 1, 1, 120, tmp_path).run(PLAN.at(None, "short"))
        assert [one.error for one in records] == ["TOKENS_MISSING"] * 4

    def test_that_fails_is_an_error(self, tmp_path: Path) -> None:
        broken = dataclasses.replace(PLAN, trace=str(tmp_path / "none.jsonl"))
        with pytest.raises(RuntimeError, match="a generator ended before the start"):
            Load(f"unix:{tmp_path}/none.sock", 1, 1, 5, tmp_path).run(broken)


SCHEMA: Any = {
    "schema": int, "engine": str, "backend": str, "model": str, "trace": str, "seed": int, "divisor": int,
    "output_divisor": int, "seconds": float, "connections": int, "generators": int, "cores": int,
    "limits": {"ttft_s": float, "itl_s": float}, "capacity": float,
}  # fmt: skip
SPREAD = dict.fromkeys(("p50", "p90", "p99", "max"), float)
RUN: Any = {
    "rate": float, "requests": int, "seconds": float, "requests_per_s": float, "good_per_s": float,
    "good_share": float, "tokens_per_s": float, "prompt_tokens": int, "cached_share": float, "failed": dict,
    "ttft_s": SPREAD, "itl_s": SPREAD, "end_to_end_s": SPREAD, "silence_s": SPREAD,
    "generators": {"sends_late_s": SPREAD, "wakes_late_s": SPREAD, "busy": float, "slow": bool},
}  # fmt: skip
KILL: Any = {
    "killed_at": float, "serving_at": float, "streams": int, "lost": int, "gap_s": SPREAD, "waiting": int,
    "refused": dict,
}  # fmt: skip


def check(found: Any, wanted: Any, where: str = "") -> None:
    """A file's fields are these and no others, each of its type."""
    if not isinstance(wanted, dict):
        assert isinstance(found, wanted), f"{where}: {found!r}"
        return
    assert set(found) == set(wanted), where
    for name, one in wanted.items():
        check(found[name], one, f"{where}.{name}")


@pytest.mark.timeout(600)
def test_it_runs_real_processes_and_kills_the_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    words = ["--rates", "1", "--kill-rate", "6", "--seconds", "3", "--output-divisor", "1", "--divisor", "128"]
    assert serve.main([*words, "--connections", "2", "--generators", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    kill = found["kill"]
    assert kill["streams"] > 0 and kill["lost"] == 0, kill
    # Nothing is computed without a daemon: the streams were silent for as long as there was none.
    assert kill["gap_s"]["max"] >= kill["serving_at"] - kill["killed_at"] > 0
    [run] = found["runs"]
    assert run["failed"] == {} and run["requests"] > 0
    # The same prompts ran before, to warm up and with other salts.
    assert run["cached_share"] < 0.6
    found["capacity"], found["burst"] = 1.0, run | {"rate": 1.0}  # rates were given
    fields = SCHEMA | {"burst": RUN, "runs": list, "kill": KILL | {"run": RUN | {"silence_s": SPREAD}}}
    check(found, fields)
    check(run, RUN)
    assert found["schema"] == report.SCHEMA == 1
    said = capsys.readouterr().out
    assert "0 lost" in said and "1.00" in said
    read = report.read(path)
    assert dataclasses.asdict(read)["kill"] == kill and read.runs[0].saturated is (run["good_share"] < 0.5)


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{}", '{"schema": 7}', "no"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"other\.json: not a report of this benchmark"):
            report.read(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--rates", "0"], "expected a number above 0"), (["--burst", "x"], "expected a whole number, 1 or more")],
)
def test_a_flag_that_cannot_be_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(words)
    assert said in capsys.readouterr().err


def test_a_lost_stream_shows_in_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(1.0, [done(0, 0, 0.1, 0.01, 2)], [NO_LAG], LIMITS)
    for lost in (0, 1):
        kill = Kill(1.0, 2.0, 3, lost, None, 0, {}, run)
        found = report.Report("ours", "", "", "", 0, 1, 1, 1.0, 1, 1, 1, LIMITS, None, None, [run], kill)
        monkeypatch.setattr(serve, "measure", lambda *arguments, found=found: found)
        assert serve.main(["--json", str(tmp_path / "found.json")]) == lost
        assert report.read(tmp_path / "found.json") == found
    text = (tmp_path / "found.json").read_text(encoding="utf-8")
    (tmp_path / "found.json").write_text(text.replace('"schema": 1', '"schema": 2'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"found\.json: .*schema 2; expected 1"):
        report.read(tmp_path / "found.json")


def test_records_travel_in_files(tmp_path: Path) -> None:
    one = done(0, 0.5, 0.1, 0.05, 3)
    record.write(tmp_path / "r", [one], NO_LAG)
    assert record.read(tmp_path / "r") == ([one], NO_LAG)


def test_a_saturated_engine_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def at(self: serve.Measurement, rate: float) -> Run:
        asked.append(rate)
        good = done(0, 0, 0.1, 0.01, 2)
        return Run.of(rate, [good if rate < 13 else done(0, 0, 9, 0.01, 2)], [NO_LAG], LIMITS)

    monkeypatch.setattr(serve.Measurement, "at", at)
    load = Load("", 1, 1, 1, Path())
    assert len(list(serve.Measurement(load, PLAN, LIMITS).rates([], 10.0))) == 7
    assert asked == pytest.approx([2.5, 5, 7.5, 9, 10, 12, 14.4])
    asked.clear()
    assert len(list(serve.Measurement(load, PLAN, LIMITS).rates([3.0, 20.0], 0.0))) == 2 and asked == [3.0, 20.0]


def test_clocks_agree_between_processes() -> None:
    # Generators are given the start on this clock.
    assert time.get_clock_info("monotonic").implementation.startswith("clock_gettime(CLOCK_MONOTONIC")
