"""The engine's benchmarks at the smallest size: they run, and say what they should of what they ran."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import engine, metrics
from benchmarks.parts import ablation, arena, flips, prefix, rows, shapes, steps, streams, workload
from benchmarks.parts.rows import Row
from benchmarks.parts.shapes import TINY
from benchmarks.parts.stand import PAGE_SIZE, ROOT, Stand
from kernels import ops_numpy
from services.engine import server
from services.engine.config import Config
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from services.engine.scheduling.queue.admission import Limits

LIMITS = Limits(max_batch=8, max_step_tokens=64, max_queue=64)


@pytest.fixture(scope="module")
def stand() -> Stand:
    return Stand.on_cpu(TINY)


def test_the_workload_is_what_it_is_called() -> None:
    jobs = workload.uniform(1000)
    assert len(jobs) == 256 and workload.uniform(1000) == jobs
    for lengths in ([len(job.prompt) for job in jobs], [job.tokens for job in jobs]):
        assert 100 <= min(lengths) < 140 and 980 < max(lengths) <= 1024
        assert 500 < sum(lengths) / len(lengths) < 620


def test_a_run_accounts_for_its_tokens_and_its_time(stand: Stand) -> None:
    jobs = workload.uniform(TINY.vocab_size, 6, 4, 20)
    with stand.local(workload.pages_for(jobs, PAGE_SIZE)) as pages:
        found = workload.run(stand, pages, jobs, LIMITS)
    assert found.tokens == sum(job.tokens for job in jobs)
    assert 0 < found.compute_s + found.page_wait_s < found.took_s and 0 < found.schedule_share < 1
    assert found.steps >= max(job.tokens for job in jobs)
    assert len(found.gaps_s) == found.tokens - len(jobs) and found.gap_s(0.5) <= found.gap_s(0.99)


def test_a_step_on_the_daemons_memory(stand: Stand) -> None:
    found = list(arena.measure(stand, "tiny", (1, 3), 40))
    assert [row.name for row in found] == ["tiny, decode of 1", "tiny, decode of 3"]
    assert all(row.value > 0 and row.ratio and row.bar == 0.98 for row in found)


def test_a_steps_bytes_and_operations(stand: Stand) -> None:
    products = 2 * (128 * 8 * 64 + 4 * 64 * 128 + 3 * 128 * 256)
    norms = 2 * (2 * 128 + 2 * 64) + 128
    assert steps.weight_bytes(stand) == 2 * (1024 * 128 + products + norms)
    assert steps.kv_bytes(stand, 48) == 48 * 2 * 2 * 2 * 64 * 4
    attention = 2 * 4 * 64 * 4 * 10 * 11 / 2
    assert steps.operations(stand, 3, 10) == 3 * (2 * (products + norms) * 10 + 2 * 1024 * 128 + attention)


def test_on_a_cpu_no_token_depends_on_its_company(stand: Stand) -> None:
    found = list(flips.measure(stand, "tiny", flips.arbitrary(stand, 5, 40), 6, (2, 5)))
    assert [row.name.removeprefix("tiny, ") for row in found] == [
        "alone again", "batches of 2", "batches of 5", "prompts in chunks of 13", "after a prefix hit",
    ]  # fmt: skip
    assert all((row.value, row.unit, row.detail) == (0, "%", "of 5 requests of 6 tokens") for row in found)


def test_requests_whose_tokens_differ_are_told_with_the_gap_where_they_first_did() -> None:
    alone = flips.Written(np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32), np.full((3, 3), 2.0, np.float32))
    alone.gaps[1, 1], alone.gaps[2] = 0.25, [0.5, 0.75, 0.125]
    other = flips.Written(np.array([[1, 2, 3], [4, 0, 0], [0, 8, 9]], np.int32), np.zeros((3, 3), np.float32))
    row = flips.compared("all", alone, other)
    assert row.value == pytest.approx(200 / 3)
    said = "first at 0.5 (median); gap there 0.3750, at most 0.5000, as 33.33% of all tokens have"
    assert row.detail == f"of 3 requests of 3 tokens; {said}"


def test_a_models_own_writing(stand: Stand) -> None:
    written = flips.natural(stand, 3, 8)
    assert written.shape == (3, 8) and len(np.unique(written, axis=0)) == 3


def test_a_request_that_fails_is_told(stand: Stand) -> None:
    with stand.local(2) as pages, pytest.raises(RuntimeError, match="tokens came of"):
        workload.run(stand, pages, [workload.Job(tuple(range(100)), 4)], LIMITS)


def test_what_is_switched_off_is_off(stand: Stand) -> None:
    jobs = ablation.workloads(TINY.vocab_size, 128, 4)
    named = {variant.name: variant for variant in ablation.VARIANTS}
    with stand.local(ablation.pages_needed(TINY.vocab_size, 128, 4)) as pages:
        shared = [workload.run(stand, pages, some, LIMITS, name=f"s{at}") for at, some in
                  enumerate((jobs["shared"], workload.salted(jobs["shared"], "x")))]  # fmt: skip
        assert shared[0].cached_tokens == 3 * 64 and shared[1].cached_tokens == 0
        ahead = [
            workload.run(stand, pages, workload.salted(jobs["uniform"], f"a{at}"), limits, name=f"a{at}")
            for at, limits in enumerate((LIMITS, named["pages asked ahead"].limits(LIMITS)))
        ]
        assert ahead[0].page_calls <= ahead[1].page_calls
        small = dataclasses.replace(LIMITS, max_step_tokens=16)
        chunks = [
            workload.run(stand, pages, workload.salted(jobs["long"], f"c{at}"), limits, name=f"c{at}").steps
            for at, limits in enumerate((small, named["chunked prefill"].limits(small)))
        ]
        assert chunks[0] > chunks[1]
        mixed = workload.run(stand, pages, workload.salted(jobs["long"], "m"), LIMITS, name="m")
        apart = workload.run(
            stand, pages, workload.salted(jobs["long"], "p"), LIMITS, make_loop=ablation.SeparateLoop,
            make_source=ablation.Awaited, name="p",
        )  # fmt: skip
        assert apart.steps > mixed.steps
        found = list(ablation.measure(stand, pages, LIMITS, 128, 4, 1, ablation.VARIANTS))
    assert [row.name for row in found] == [variant.name for variant in ablation.VARIANTS]
    assert all(row.ratio and row.ratio > 0 for row in found)


def test_first_tokens_in_real_processes(tmp_path: Path) -> None:
    shapes.write_folder(TINY, tmp_path / "tiny", ROOT / "models" / "shakespeare" / "tokenizer.json")
    found = list(prefix.measure(tmp_path / "tiny", TINY.vocab_size, (100, 200), ("--pool-pages", "256"), (), prompts=2))
    assert [row.name.split(",")[0] for row in found] == ["cold"] * 2 + ["warm"] * 6
    assert found[0].ratio == found[1].ratio == 1 and not found[0].missed and all(row.value > 0 for row in found)


def test_what_reading_costs_in_real_processes() -> None:
    found = list(streams.measure(streams=6, tokens=20, step_ms=1, pairs=1))
    assert [row.name for row in found] == [
        "submitted, read by nobody", "streamed", "streamed, a message a token",
    ]  # fmt: skip
    # A step a token, at least, and none sooner than a millisecond.
    assert found[0].ratio == 1 and all(0 < row.value < 6 / 0.001 for row in found)


def test_the_steps_of_streams_are_asynchronous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    @contextlib.contextmanager
    def process(module: str, address: str, *words: str) -> Iterator[None]:
        started.extend(words[1:])  # behind the time of a step
        yield

    monkeypatch.setattr(streams, "process", process)
    with streams.timed_engine("local", 4, 1.0, None):
        started[started.index("--listen") + 1] = f"unix:{tmp_path}/e.sock"
    config = Config.read(started, {})
    assert config.asynchronous

    async def launches() -> bool:
        engine = server.Engine(config, make_runner=functools.partial(streams.TimedRunner, 0.001))
        await engine.start()
        try:
            return engine.loop is not None and engine.loop._launch_step is not None
        finally:
            await engine.stop(1)

    assert asyncio.run(launches())


def test_timed_steps_run_one_after_another() -> None:
    runner = streams.TimedRunner(0.05)
    began, flights = time.monotonic(), [runner.launch([]), runner.launch([])]
    for flight in flights:
        flight.wait()
    assert time.monotonic() - began >= 0.1


def test_metrics_are_recorded_of_asynchronous_steps() -> None:
    _, loop = metrics.run(3, 5)
    assert loop._launch_step is not None and loop.totals.generated_tokens == 15
    # Each request's tokens and no row that is discarded: the first step is waited for, and so is the last.
    assert loop.totals.steps == 5


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_checkpoint_is_read_as_it_was_made(tmp_path: Path, tied: bool) -> None:
    config = dataclasses.replace(TINY, tied_embeddings=tied)
    shapes.write_folder(config, tmp_path / "tiny", ROOT / "models" / "shakespeare" / "tokenizer.json")
    read, made = Checkpoint.open(tmp_path / "tiny"), shapes.RandomCheckpoint.of(config)
    assert read.config == made.config
    one, other = Model(read), Model(made)
    assert one.parameters == other.parameters
    assert (one._head is one._embedding) == (other._head is other._embedding) == tied
    for mine, others in (
        (one._head, other._head),
        (one._embedding, other._embedding),
        (one._layers[1].down, other._layers[1].down),
    ):
        rows = np.arange(len(mine))
        assert np.array_equal(ops_numpy.take(mine, rows), ops_numpy.take(others, rows))


def test_a_row_knows_its_bar_and_survives_json(tmp_path: Path) -> None:
    found = [
        Row("p", "a", 3.0, "ms", 0.5, 0.6),
        Row("p", "b", 3.0, "ms", 0.5, 0.1, most=True, detail="d"),
        Row("p", "c", 3.0, "tokens/s"),
    ]
    assert [row.missed for row in found] == [True, True, False]
    assert "MISSED" in rows.line(found[0]) and "MISSED" not in rows.line(found[2])
    file = tmp_path / "rows"
    file.write_text("warning\n" + "\n".join(map(rows.as_json, found)))
    assert rows.read(file) == found


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = engine.main(["--parts", "workload", "--requests", "4", "--divisor", "32", "--pairs", "1", "--json"])
    printed = capsys.readouterr().out.splitlines()
    assert status in (0, 1)  # at this size the daemon's share of the time is whatever it is
    assert [json.loads(line)["part"] for line in printed] == ["workload"] * 4
    (tmp_path / "saved").write_text("\n".join(printed))
    assert engine.main(["--read", str(tmp_path / "saved")]) == status
    with pytest.raises(SystemExit, match=r"^2$"):
        engine.main(["--parts", "steps"])
    assert "--parts steps: on a cpu there are workload, ablation, prefix" in capsys.readouterr().err
