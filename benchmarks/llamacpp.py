"""Decode and prefill on a CPU against llama.cpp: one GGUF file, one sequence, the same number of threads.

The two alternate in one process, so that a busy machine disturbs both alike; the result is the ratio of the medians.
Times are CPU times summed over all threads: with one thread on an idle machine, they equal wall-clock times.
The engine computes with float32 weights, llama.cpp with those of the file.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from services.engine.model.batch import Row
from services.engine.model.decoder import Model

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PAGE_SIZE = 16


class Engine:
    """The engine's forward pass over one sequence, in its own pages."""

    def __init__(self, path: Path, context: int) -> None:
        """Load the model; raises as `Model.load` does."""
        self._model = Model.load(path)
        config, count = self._model.config, -(-context // PAGE_SIZE)
        self.vocab_size = config.vocab_size
        shape = (count, config.layers, 2, config.kv_heads, PAGE_SIZE, config.head_dim)
        self._pages, self._table, self._done = np.zeros(shape, np.float32), list(range(count)), 0

    def reset(self) -> None:
        """Begin a new sequence."""
        self._done = 0

    def run(self, tokens: Sequence[int]) -> int:
        """Append the tokens, and return the likeliest next."""
        logits = self._model.forward([Row(tokens, self._done, self._table, 1)], self._pages)
        self._done += len(tokens)
        return int(np.argmax(logits[0]))


class LlamaCpp:
    """The same by llama.cpp."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        """Load the model; raises ImportError if llama-cpp-python is not installed."""
        import llama_cpp  # an optional dependency

        self._model: Any = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def reset(self) -> None:
        """Begin a new sequence."""
        self._model.reset()

    def run(self, tokens: Sequence[int]) -> int:
        """Append the tokens, and return the likeliest next."""
        self._model.eval(tokens)
        return int(np.argmax(self._model.scores[self._model.n_tokens - 1]))


def timed(call: Callable[[], int]) -> tuple[float, int]:
    """CPU seconds of a call, and its result."""
    begun = time.process_time()
    token = call()
    return time.process_time() - begun, token


def measured(
    sides: dict[str, Engine | LlamaCpp], prompt: list[int], tokens: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Seconds to prefill ``prompt`` and to decode a token, by side: medians over the rounds."""
    prefills: dict[str, list[float]] = {name: [] for name in sides}
    decodes: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        following = {}
        for name, side in sides.items():
            side.reset()
            seconds, following[name] = timed(functools.partial(side.run, prompt))
            prefills[name].append(seconds)
        for _ in range(tokens):
            for name, side in sides.items():
                seconds, following[name] = timed(functools.partial(side.run, [following[name]]))
                decodes[name].append(seconds)
    return {name: (statistics.median(prefills[name]), statistics.median(decodes[name])) for name in sides}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 2 if llama-cpp-python or the model is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.llamacpp", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a GGUF file (default: what make smollm2 fetches)")
    parser.add_argument("--cpu-threads", type=int, default=1, help="threads of both (default 1)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of the prompt (default 256)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded after it, a round (default 24)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    flags = parser.parse_args(arguments)
    for name in ("cpu_threads", "prompt_tokens", "tokens", "rounds"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be 1 or more")
    if not flags.model.exists():
        print(f"{flags.model} is missing; `make smollm2` fetches the default", file=sys.stderr)
        return 2
    context = flags.prompt_tokens + flags.tokens + 1
    threadpool_limits(flags.cpu_threads, user_api="blas")
    try:
        theirs = LlamaCpp(flags.model, context, flags.cpu_threads)
    except ImportError:
        print("llama.cpp is missing: pip install llama-cpp-python, which compiles it", file=sys.stderr)
        return 2
    ours = Engine(flags.model, context)
    prompt = np.random.default_rng(0).integers(0, ours.vocab_size, flags.prompt_tokens).tolist()
    found = measured({"engine": ours, "llama.cpp": theirs}, prompt, flags.tokens, flags.rounds)
    print(f"{flags.model.name}, threads: {flags.cpu_threads}, medians of {flags.rounds} rounds")
    for part, name in enumerate((f"prefill of {flags.prompt_tokens} tokens", "a decoded token")):
        mine, other = found["engine"][part] * 1e3, found["llama.cpp"][part] * 1e3
        print(f"{name:>24}: engine {mine:8.1f} ms, llama.cpp {other:8.1f} ms, ratio {mine / other:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
