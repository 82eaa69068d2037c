"""The gain of each optimisation of the engine: runs of one workload with and without it, alternating.

This file disables an optimisation by building the engine from different parts; the rest is the engine's own code.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.parts.rows import Row
from benchmarks.parts.stand import PAGE_SIZE, Pages, Stand
from benchmarks.parts.workload import Job, Run, median_of, pages_for, run, salted, uniform
from kernels.sampling import reference
from kernels.sampling.launch import Batch, Drawn
from services.engine.pages.source import Demand, Exchange, Grant, PageSource
from services.engine.sampling.params import Drawer, SamplingParams
from services.engine.scheduling.loop import EngineLoop
from services.engine.scheduling.queue.admission import Limits
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.step import Chunk


@dataclass(frozen=True, slots=True)
class _Answered:
    """A completed exchange; ``result`` returns its grants or raises its error."""

    result: Callable[[], list[Grant]]


class Awaited:
    """A source that waits for each exchange before the step instead of overlapping them."""

    def __init__(self, source: PageSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def exchange(self, demands: Sequence[Demand], removed: Sequence[str]) -> Exchange:
        """Send, and wait."""
        exchange = self._source.exchange(demands, removed)
        grants = exchange.result()
        return _Answered(lambda: grants)


class SeparateScheduler(Scheduler):
    """Steps that either prefill or decode, prefill first."""

    def schedule(self) -> tuple[Chunk, ...]:
        """The next step."""
        chunks = super().schedule()
        prompts = tuple(chunk for chunk in chunks if chunk.start < len(chunk.sequence.request.prompt))
        return prompts or chunks


class SeparateLoop(EngineLoop):
    """A loop with that scheduler."""

    def _new_scheduler(self) -> Scheduler:
        return SeparateScheduler(self._limits, self._source.page_size, self._source.total_pages, self._clock)


def draw_on_host(logits: Any, batch: Batch) -> Drawn:
    """Copy the logits to the host, and draw there."""
    return reference.sample(logits.get(), batch)


@dataclass(frozen=True, slots=True)
class Variant:
    """The engine without one optimisation, disabled by ``off``, on the workload ``jobs``.

    The measure is tokens per second or, with ``gaps``, the time between a request's tokens.
    """

    name: str
    off: str
    jobs: str
    make_loop: Callable[..., EngineLoop] = EngineLoop
    awaited: bool = False
    own_pages: bool = False
    limits: Callable[[Limits], Limits] = lambda limits: limits
    draw: Drawer | None = None
    gaps: bool = False
    synchronous: bool = False


VARIANTS = (
    Variant("prefix cache", "every request under a salt of its own", "shared", own_pages=True),
    Variant(
        "chunked prefill",
        "a step takes any prompt whole",
        "long",
        limits=lambda limits: dataclasses.replace(limits, max_step_tokens=1 << 20),
        gaps=True,
    ),
    Variant("prefill with decode", "steps of prompts or of decoding, prompts first", "long", SeparateLoop, gaps=True),
    Variant("exchange during the step", "waited for before the step", "uniform", awaited=True),
    Variant(
        "pages asked ahead",
        "one page at a time",
        "uniform",
        limits=lambda limits: dataclasses.replace(limits, growth_pages=1),
    ),
)
ON_DEVICE = (
    Variant("asynchronous steps", "a step is launched once the one before is over", "uniform", synchronous=True),
    Variant("sampling on the GPU", "logits copied, drawn by NumPy", "sampled", draw=draw_on_host),
)


def workloads(vocab_size: int, context: int, count: int) -> dict[str, list[Job]]:
    """The workloads of the variants: ``count`` requests, scaled to a model's ``context``."""
    draw = random.Random(1)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(number))

    longest = min(512, context // 4)
    prefix, few = tokens(context // 2), max(2, count // 16)
    even = uniform(vocab_size, count, max(1, longest // 8), longest, seed=1)
    drawn = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.0, seed=7)
    return {
        "uniform": even,
        # Few tokens: sampling on the host is slow.
        "sampled": [dataclasses.replace(job, sampling=drawn, tokens=16) for job in even[: max(2, count // 4)]],
        # Many requests with one conversation or document: the first one computes it.
        "shared": [Job(prefix + tokens(16), max(2, longest // 8), after=int(at > 0)) for at in range(count)],
        # Long prompts that arrive while others decode.
        "long": [
            *(Job(tokens(16), longest // 2) for _ in range(count)),
            *(Job(tokens(3 * context // 4), 2, after=count * (at + 1)) for at in range(few)),
        ],
    }


def measure(
    stand: Stand, pages: Pages, limits: Limits, context: int, count: int, pairs: int, variants: Sequence[Variant]
) -> Iterator[Row]:
    """A row per variant: the ratio of the engine's result with the optimisation to that without."""
    jobs = workloads(stand.model.config.vocab_size, context, count)
    number = 0

    def once(variant: Variant, off: bool) -> Run:
        nonlocal number
        number += 1
        # Each run has its own salts, or the second would hit the first one's pages.
        own, salt = jobs[variant.jobs], f"{number}"
        own = salted(own, salt) if off and variant.own_pages else [dataclasses.replace(job, salt=salt) for job in own]
        # Drawing on the host takes a step that is over.
        asynchronous = False if variant.draw is not None or (off and variant.synchronous) else None
        if not off:
            return run(stand, pages, own, limits, name=f"a{number}", asynchronous=asynchronous)
        return run(
            stand,
            pages,
            own,
            variant.limits(limits),
            make_loop=variant.make_loop,
            make_source=Awaited if variant.awaited else lambda source: source,
            draw=variant.draw,
            name=f"a{number}",
            asynchronous=asynchronous,
        )

    for variant in variants:
        runs: tuple[list[Run], list[Run]] = ([], [])
        for pair in range(pairs):
            for off in (pair % 2 == 0, pair % 2 == 1):
                runs[off].append(once(variant, off))
        yield row(variant, median_of(runs[0]), median_of(runs[1]))


def row(variant: Variant, on: Run, off: Run) -> Row:
    """The ratio, above 1 if the optimisation helps."""
    if variant.gaps:
        mine, theirs, unit = on.gap_s(0.99) * 1e3, off.gap_s(0.99) * 1e3, "ms"
        detail = f"gap between tokens, 99th of a hundred; off {theirs:.2f}: {variant.off}"
        detail += f"; tokens/s {on.tokens_per_s / off.tokens_per_s:.2f} x"
        return Row("ablation", variant.name, mine, unit, theirs / mine, detail=detail)
    ratio = on.tokens_per_s / off.tokens_per_s
    detail = f"off {off.tokens_per_s:,.0f}: {variant.off}"
    return Row("ablation", variant.name, on.tokens_per_s, "tokens/s", ratio, detail=detail)


def pages_needed(vocab_size: int, context: int, count: int) -> int:
    """The pages that the largest workload needs."""
    return max(pages_for(jobs, PAGE_SIZE) for jobs in workloads(vocab_size, context, count).values())
