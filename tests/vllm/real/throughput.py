"""Tokens a second with the daemon's pages as vLLM's blocks, against vLLM's own blocks: the same prompts, in turn.

    ROCMFORGE_VLLM=PYTHON python -m tests.vllm.real.throughput [--rounds N] [--prompts N] [--tokens N]

Both are the real vLLM, one process of scheduler and worker each, and only one of them works at a time. In each round
both answer the same new prompts, and who begins alternates. Printed are the median of the rounds' ratios, and that of
CPU seconds, of the engine and the daemon together. Half of each prompt's tokens are a prefix that others of its round
have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.processes import kvcache
from tests.vllm.real.peers import Peer
from tests.vllm.real.stage import tokens


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of 128 tokens, four of which begin with the same 64."""
    draw = random.Random(seed)
    roots = [tokens(draw, 64) for _ in range(max(1, count // 4))]
    return [roots[nth % len(roots)] + tokens(draw, 64) for nth in range(count)]


def cpu_s(group: int) -> float:
    """CPU seconds that the processes of a group have used so far."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found += int(fields[11]) + int(fields[12])
    return found / 100


def daemon_cpu_s(pid: int) -> float:
    """CPU seconds of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds is {given.rounds}; it must be at least 2, for quartiles")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        daemon = stack.enter_context(kvcache(directory))
        engines = {
            name: Peer(
                directory, name, daemon.address if name == "direct" else "", {"direct": True}, alone=True,
                num_gpu_blocks_override=512,
            )
            for name in ("direct", "own")
        }  # fmt: skip
        for engine in engines.values():
            stack.callback(engine.close)
        for engine in engines.values():
            engine.wait_ready()
            engine.generate(prompts(0, given.prompts), 8)
        seconds: dict[str, list[float]] = {"direct": [], "own": []}
        cpu: dict[str, list[float]] = {"direct": [], "own": []}
        equal = True
        for round_ in range(given.rounds):
            asked, said = prompts(round_ + 1, given.prompts), []
            for name in sorted(engines, reverse=bool(round_ % 2)):
                engine = engines[name]
                used, began = cpu_s(engine.process.pid) + daemon_cpu_s(daemon.pid), time.monotonic()
                said.append(engine.generate(asked, given.tokens))
                seconds[name].append(time.monotonic() - began)
                cpu[name].append(cpu_s(engine.process.pid) + daemon_cpu_s(daemon.pid) - used)
            equal &= said[0] == said[1]
        ratios = [own / direct for own, direct in zip(seconds["own"], seconds["direct"], strict=True)]
        count = given.prompts * given.tokens
        print(
            json.dumps(
                {
                    "rounds": given.rounds,
                    "tokens": count,
                    "equal": equal,
                    "tokens_per_s": {name: round(count / statistics.median(took), 1) for name, took in seconds.items()},
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_best": round(min(seconds["own"]) / min(seconds["direct"]), 3),
                    "ratio_quartiles": [round(each, 3) for each in statistics.quantiles(ratios, n=4)[::2]],
                    "cpu_s": {name: round(statistics.median(used), 3) for name, used in cpu.items()},
                }
            )
        )


if __name__ == "__main__":
    main()
