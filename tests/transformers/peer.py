"""`examples/transformers` as a process that is driven: `peer.py ADDRESS OPTIONS`, the session's as JSON.

It reads a JSON object a line, and answers each with one: ``tokens`` of each prompt, how many of their tokens were
``cached``, how many tokens all ``steps`` together ``computed``.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from rocmforge.client.errors import ServiceError

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "shakespeare"
sys.path.insert(0, str(ROOT / "examples" / "transformers"))

engine: Any = import_module("engine")


class Peer:
    """The commands, each a method."""

    def __init__(self, address: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.session = engine.session_for(address, self.model, MODEL, **options)
        self.steps = self.computed = 0

    def _count(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.steps += 1
        self.computed += named["input_ids"].numel()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """The example, with all that it does when the daemon is lost."""
        tokens, cached = engine.persist(self.model, self.session, prompts, new_tokens)
        return {"tokens": tokens, "cached": cached}

    def plain(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """transformers alone."""
        results = self.model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=engine.PAGE_SIZE, num_blocks=512, max_batch_tokens=engine.BATCH_TOKENS
            ),
            warmup=False,
        )
        return {"tokens": [one.generated_tokens for one in results.values()], "cached": 0}

    def fenced(self, prompts: list[list[int]], new_tokens: int, looks: int) -> dict[str, Any]:
        """The example, once; the lease ends before this look at it."""
        look, left = self.session.may_write, iter(range(looks - 1))
        self.session.may_write = lambda: next(left, None) is not None and look()
        try:
            engine.generate(self.model, self.session, prompts, new_tokens)
        finally:
            del self.session.may_write
            self.session.reopen()
        return {}

    def refused(self, **settings: Any) -> dict[str, Any]:
        """The cache with other settings of transformers, as it resolves them."""
        usual = {"use_async_batching": False, "cuda_graph_booleans": (False, False), "cpu_offload_space": 0}
        compiled = {"varlen_compile_config": None, "decode_compile_config": None}
        engine.SharedCache(self.session, {}, self.model.config, SimpleNamespace(**{**usual, **compiled, **settings}))
        return {}

    def other_pages(self, page_size: int) -> dict[str, Any]:
        """The example with pages of another size than the session's."""
        usual, engine.PAGE_SIZE = engine.PAGE_SIZE, page_size
        try:
            engine.generate(self.model, self.session, [[1, 2, 3]], 2)
        finally:
            engine.PAGE_SIZE = usual
        return {}


def main() -> None:
    """Answer until there are no more commands."""
    peer, answers = Peer(sys.argv[1], json.loads(sys.argv[2])), sys.stdout
    sys.stdout = sys.stderr  # transformers prints
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        peer.steps = peer.computed = 0
        try:
            answer = getattr(peer, command.pop("do"))(**command)
        except (ServiceError, ValueError, RuntimeError) as error:
            answer = {"error": getattr(error, "reason", type(error).__name__), "message": str(error)}
        counts = {"steps": peer.steps, "computed": peer.computed}
        print(json.dumps({**answer, **counts}), file=answers, flush=True)
    peer.session.close()


if __name__ == "__main__":
    main()
