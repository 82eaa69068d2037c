"""The engine as a whole: throughput with many concurrent requests, the gain of each optimisation, and the saving of a
prefix cache hit; on a GPU also single steps against its bandwidth, and `transformers` on the same requests and weights.

On a CPU it runs the bundled model, with requests scaled to its context; on a GPU, models of known shapes with random
weights. Parts run in the order given, and each prints its rows as it measures them.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from threadpoolctl import threadpool_limits

from benchmarks.parts import ablation, arena, flips, peer, prefix, rows, shapes, steps, streams, workload
from benchmarks.parts.rows import Row
from benchmarks.parts.stand import PAGE_SIZE, ROOT, Pages, Stand
from benchmarks.parts.workload import Job, Run
from services.engine.checkpoint.config import ModelConfig
from services.engine.model.backend import ASYNC_STEPS, AUTO, GRAPHS, OFF, ON, REPLAYS
from services.engine.scheduling.queue.admission import Limits
from services.kvcache.arena.host import default_directory

CPU, GPU = "cpu", "gpu"
PARTS = {
    CPU: ("workload", "ablation", "prefix", "streams"),
    GPU: ("steps", "arena", "workload", "transformers", "prefix", "streams", "ablation", "flips"),
}
#: Bar: the least speedup over transformers.
PEER_BAR = 2.0
BUNDLED = ROOT / "models" / "shakespeare"


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of workloads. ``context`` limits the requests of the ablations; ``prompts`` are for the part prefix."""

    count: int
    shortest: int
    longest: int
    limits: Limits
    context: int
    ablation_count: int
    pairs: int
    prompts: tuple[int, ...]

    @classmethod
    def of(cls, device: str, requests: int | None, divisor: int | None, pairs: int | None) -> Scale:
        """Full size on a GPU; on a CPU an eighth of the lengths, which fits the bundled model's context."""
        small = device == CPU
        divisor = divisor or (8 if small else 1)
        count = requests or (64 if small else workload.REQUESTS)
        longest = workload.LONGEST // divisor
        return cls(
            count=count,
            shortest=max(1, workload.SHORTEST // divisor),
            longest=longest,
            limits=Limits(max_batch=count, max_step_tokens=512 if small else 8192, max_queue=count),
            context=4 * longest if small else 8192,
            ablation_count=min(count, 16 if small else 64),
            pairs=pairs or 3,
            prompts=(768,) if small else (4096, 16384),
        )

    def jobs(self, vocab_size: int) -> list[Job]:
        """The workload."""
        return workload.uniform(vocab_size, self.count, self.shortest, self.longest)

    @property
    def said(self) -> str:
        """In words."""
        return f"{self.count} requests, {self.shortest} to {self.longest} tokens in and out"


def workload_rows(stand: Stand, name: str, scale: Scale, asynchronous: bool) -> Iterator[Row]:
    """Alternate the workload on the daemon's pages and on the engine's own; with asynchronous steps also without."""
    jobs = scale.jobs(stand.model.config.vocab_size)
    total = workload.pages_for(jobs, PAGE_SIZE) * 9 // 8
    sides: tuple[list[Run], list[Run], list[Run]] = ([], [], [])
    again = [[0, 0], [0, 0], [0, 0]]
    with stand.daemon(total) as theirs, stand.local(total) as own:
        once(stand, own, jobs[: max(2, len(jobs) // 8)], scale, "warm")
        for pair in range(scale.pairs):
            order: list[tuple[int, Pages]] = [(0, theirs), (1, own), *([(2, theirs)] if asynchronous else [])]
            for side, pages in order if pair % 2 else order[::-1]:
                before = stand.replayed
                ahead = asynchronous and side < 2
                sides[side].append(once(stand, pages, jobs, scale, f"w{pair}-{side}", ahead))
                again[side] = [n + now - then for n, now, then in zip(again[side], stand.replayed, before, strict=True)]
    run, local = (workload.median_of(side) for side in sides[:2])
    ratio, detail = run.tokens_per_s / local.tokens_per_s, f"to in-process pages; {scale.said}; {steps_of(run)}"
    yield Row("workload", f"{name}, the daemon's pages", run.tokens_per_s, "tokens/s", ratio, arena.BAR, detail=detail)
    yield Row("workload", f"{name}, in-process pages", local.tokens_per_s, "tokens/s", detail=steps_of(local))
    if asynchronous:
        plain = workload.median_of(sides[2])
        ratio, detail = plain.tokens_per_s / run.tokens_per_s, f"to asynchronous ones; {steps_of(plain)}"
        yield Row("workload", f"{name}, synchronous steps", plain.tokens_per_s, "tokens/s", ratio, detail=detail)
    if stand.on_device:
        for kind, (recorded, replayed) in zip(("the daemon's", "in-process"), again[:2], strict=True):
            detail = f"of {sum(one.steps for one in sides[0])}; {recorded} recorded"
            yield Row("workload", f"{name}, replayed on {kind} pages", replayed, "steps", detail=detail)
    outside = (run.took_s - run.compute_s - run.page_wait_s) / run.steps * 1e6
    yield Row("workload", f"{name}, scheduling", outside, "us a step", run.schedule_share, detail="share of all time")
    waited = run.page_wait_s / run.steps * 1e6
    detail = f"share of all time; {run.page_calls} calls in {run.steps} steps"
    yield Row(
        "workload", f"{name}, waiting for pages", waited, "us a step", run.page_wait_s / run.took_s, detail=detail
    )


def steps_of(run: Run) -> str:
    """The number of steps, and their time."""
    compute = run.compute_s / run.steps * 1e3
    return f"{run.steps} steps of {run.took_s / run.steps * 1e3:.2f} ms, {compute:.2f} of them compute"


def once(stand: Stand, pages: Pages, jobs: list[Job], scale: Scale, name: str, asynchronous: bool | None = None) -> Run:
    """One run without prefix cache hits from earlier ones."""
    jobs = workload.salted(jobs, name)
    return workload.run(stand, pages, jobs, scale.limits, name=name, asynchronous=asynchronous)


def transformers_rows(stand: Stand, name: str, scale: Scale, limit_s: float) -> Iterator[Row]:
    """Run the same requests through both. Raises RuntimeError if their results differ by more than rounding."""
    jobs = scale.jobs(stand.model.config.vocab_size)
    with stand.local(workload.pages_for(jobs, PAGE_SIZE)) as pages:
        once(stand, pages, jobs[:8], scale, "warm")
        ours = workload.median_of([once(stand, pages, jobs, scale, f"t{nth}") for nth in range(scale.pairs)])
    theirs = peer.adopted(stand.model)
    agreed = peer.agreement(stand, theirs, [job.prompt for job in jobs[:4]])
    tokens, took = peer.generate(theirs, jobs, limit_s)
    rate = tokens / took
    whole = "" if tokens == ours.tokens else f"; given up after {took:.0f} s with {tokens} of {ours.tokens} tokens"
    detail = f"to transformers; {scale.said}; {agreed}"
    del theirs
    peer.release()
    ratio = ours.tokens_per_s / rate
    yield Row("transformers", f"{name}, ours", ours.tokens_per_s, "tokens/s", ratio, PEER_BAR, detail=detail)
    detail = f"continuous batching, paged sdpa{whole}"
    yield Row("transformers", f"{name}, transformers", rate, "tokens/s", detail=detail)


def prefix_rows(device: str, shape: ModelConfig | None, scale: Scale, replay: str | None = None) -> Iterator[Row]:
    """First tokens of prompts of each length. On a GPU a checkpoint of ``shape`` is written for it first."""
    if shape is None:
        yield from prefix.measure(BUNDLED, 1024, scale.prompts, (), ())
        return
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as name:
        folder = Path(name) / "model"
        shapes.write_folder(shape, folder, BUNDLED / "tokenizer.json")
        engine = ["--device", device, "--max-step-tokens", "8192", "--dtype", "bf16", "--max-batch", "64"]
        engine += ["--replay", replay] if replay else []
        cache = ("--device", device, "--memory", "24GiB")
        yield from prefix.measure(folder, shape.vocab_size, scale.prompts, engine, cache, exact=False)


def ablation_rows(stand: Stand, scale: Scale) -> Iterator[Row]:
    """The gain of each optimisation, on the daemon's pages."""
    vocab_size, count = stand.model.config.vocab_size, scale.ablation_count
    variants = (*ablation.VARIANTS, *(ablation.ON_DEVICE if stand.on_device else ()))
    total = ablation.pages_needed(vocab_size, scale.context, count) * 9 // 8
    with stand.daemon(total) as pages:
        limits = dataclasses.replace(scale.limits, max_step_tokens=scale.context // 8)
        yield from ablation.measure(stand, pages, limits, scale.context, count, scale.pairs, variants)


def device_ablation_rows(stand: Stand, name: str) -> Iterator[Row]:
    """The optimisations that are chosen when the model is created: graphs, and split keys for long rows."""
    shape = shapes.SHAPES[name]
    graphed = [(batch, steps.CONTEXT) for batch in steps.BATCHES]
    eager = Stand.on_gpu(shape, replay=OFF)
    yield from ablated_steps(Stand.on_gpu(shape, replay=GRAPHS), eager, graphed, "CUDA graphs")
    yield from ablated_steps(Stand.on_gpu(shape), eager, graphed, "tapes")
    uncut = Stand.on_gpu(shape, make_ops=shapes.UncutOps)
    yield from ablated_steps(stand, uncut, [(1, 16384), (4, 16384)], "keys of a row shared out")


def ablated_steps(having: Stand, lacking: Stand, cases: Sequence[tuple[int, int]], name: str) -> Iterator[Row]:
    """Decode steps of (rows, keys) with both."""
    for batch, keys in cases:
        took = []
        for stand in (having, lacking):
            with stand.local(steps.pages_of(batch, keys)) as pages:
                took.append(steps.decode_seconds(stand, pages, batch, keys)[0])
        with_it, without = took
        detail = f"a decoding step; without {without * 1e3:.2f} ms"
        yield Row("ablation", f"{name}, {batch} x {keys} keys", with_it * 1e3, "ms", without / with_it, detail=detail)


def on_cpu(parts: list[str], scale: Scale, model: Path, asynchronous: bool) -> Iterator[tuple[str, Iterator[Row]]]:
    """The parts' rows."""
    stand = Stand.on_cpu(model)
    for part in parts:
        match part:
            case "workload":
                yield part, workload_rows(stand, model.name, scale, asynchronous)
            case "ablation":
                yield part, ablation_rows(stand, scale)
            case "prefix":
                yield part, prefix_rows(CPU, None, scale)
            case "streams":
                yield part, streams.measure(pairs=scale.pairs)


def on_gpu(
    parts: list[str], scale: Scale, names: list[str], limit_s: float, replay: str | None, asynchronous: bool
) -> Iterator[tuple[str, Iterator[Row]]]:
    """The parts' rows, shape by shape; ``prefix`` and ``transformers`` only for the first."""
    from benchmarks.attention import copy_bandwidth

    copy = max(copy_bandwidth() for _ in range(3))
    yield "steps", iter([Row("steps", "copy", copy / 1e12, "TB/s", detail="2 GiB, read and written")])
    for number, name in enumerate(names):
        stand = Stand.on_gpu(shapes.SHAPES[name], replay=replay)
        for part in parts:
            match part:
                case "steps":
                    yield part, steps_rows(stand, name, copy)
                case "arena":
                    yield part, arena.measure(stand, name)
                case "workload":
                    yield part, workload_rows(stand, name, scale, asynchronous)
                case "transformers" if not number:
                    yield part, transformers_rows(stand, name, scale, limit_s)
                case "prefix" if not number:
                    yield part, prefix_rows(GPU, shapes.SHAPES[name], scale, replay)
                case "streams" if not number:
                    yield part, streams.measure(pairs=scale.pairs)
                case "flips":
                    yield part, flips_rows(stand, name, scale, None if number else BUNDLED, replay)
                case "ablation" if not number:
                    yield part, device_ablation_rows(stand, name)
                    yield part, ablation_rows(stand, scale)


def steps_rows(stand: Stand, name: str, copy: float) -> Iterator[Row]:
    """Single steps on local pages."""
    with stand.local(steps.pages_needed()) as pages:
        yield from steps.measure(stand, pages, name, copy)


def flips_rows(stand: Stand, name: str, scale: Scale, trained: Path | None, replay: str | None = None) -> Iterator[Row]:
    """Greedy tokens in a batch against alone, with and without batch invariance, and the cost of the latter."""
    count = scale.count
    batches = [batch for batch in flips.BATCHES if batch <= count]
    prompts = flips.arbitrary(stand, count, flips.PROMPT)
    invariant = Stand.on_gpu(shapes.SHAPES[name], replay=replay, make_ops=flips.InvariantRandomOps)
    yield from flips.measure(stand, name, prompts, flips.TOKENS, batches)
    yield from flips.measure(invariant, f"{name}, invariant", prompts, flips.TOKENS, batches)
    yield from flips.costs(invariant, stand, name, [1, *batches], steps.CONTEXT)
    if trained is not None:
        stand = Stand.on_gpu(trained, replay=replay)
        invariant = Stand.on_gpu(trained, replay=replay, make_ops=flips.InvariantOps)
        prompts = flips.natural(stand, count, flips.PROMPT)
        yield from flips.measure(stand, trained.name, prompts, flips.TOKENS, batches)
        yield from flips.measure(invariant, f"{trained.name}, invariant", prompts, flips.TOKENS, batches)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when a bar is missed, 2 when a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--device", choices=PARTS, default=CPU, help="what computes (default cpu)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="which, in which order: " + "; ".join(
        f"{device}: {' '.join(parts)}" for device, parts in PARTS.items()))  # fmt: skip
    parser.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder, on a CPU")
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes.SHAPES, default=["qwen3-0.6b", "llama-8b"], help="on a GPU"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="of the workload (default 256, on a CPU 64)")
    parser.add_argument("--divisor", type=int, metavar="N", help="of the requests' lengths (default 1, on a CPU 8)")
    parser.add_argument("--pairs", type=int, metavar="N", help="of runs that are compared (default 3)")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="no part begins after so many seconds")
    parser.add_argument("--replay", choices=REPLAYS, help="as the engine's flag, on a GPU (default: as its default)")
    parser.add_argument(
        "--async-steps", choices=ASYNC_STEPS, default=AUTO, help="of the workload, which is then also run without them"
    )
    parser.add_argument("--peer-limit", type=float, default=60, metavar="S", help="seconds that transformers gets")
    parser.add_argument("--cpu-threads", type=int, default=1, help="BLAS threads (default 1, as the engine's)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row instead of a table")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw each part's rows into a PNG there")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the rows from what --json printed, run nothing")
    flags = parser.parse_args(arguments)
    parts = flags.parts or list(PARTS[flags.device])
    if unknown := [part for part in parts if part not in PARTS[flags.device]]:
        parser.error(f"--parts {unknown[0]}: on a {flags.device} there are {', '.join(PARTS[flags.device])}")
    found, failed = list[Row](), False
    if flags.read is not None:
        found = rows.read(flags.read)
        for row in found:
            print(rows.line(row))
    else:
        # Logging every request and session would only cost time.
        before = structlog.get_config()["wrapper_class"]
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        try:
            with threadpool_limits(flags.cpu_threads, user_api="blas"):
                failed = run_parts(flags, parts, found)
        finally:
            structlog.configure(wrapper_class=before)
    if flags.plot is not None:
        rows.plot(found, flags.plot)
    return 2 if failed else int(any(row.missed for row in found))


def run_parts(flags: argparse.Namespace, parts: list[str], found: list[Row]) -> bool:
    """Run the parts, print their rows and append them to ``found``. Returns whether one failed."""
    scale = Scale.of(flags.device, flags.requests, flags.divisor, flags.pairs)
    began, failed = time.monotonic(), False
    if flags.device == CPU:
        running = on_cpu(parts, scale, flags.model, flags.async_steps == ON)
    else:
        running = on_gpu(parts, scale, flags.shapes, flags.peer_limit, flags.replay, flags.async_steps != OFF)
    for part, measured in running:
        if time.monotonic() - began > flags.limit:
            print(f"part {part}: not begun, {flags.limit:g} s are over", file=sys.stderr)
            continue
        try:
            for row in measured:
                found.append(row)
                print(rows.as_json(row) if flags.json else rows.line(row), flush=True)
        except Exception:
            # The other parts are still worth measuring.
            failed = True
            print(f"part {part} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
