"""A vLLM engine as a process of its own, for tests: commands come as lines of JSON, and so do the answers.

Run by the Python of vLLM's environment, which has none of this project's dependencies. A command has an ``id`` and:
``prompts``, lists of tokens, with ``max_tokens``, ``salt``, ``lora`` (the folder of an adapter) and, by prompt,
``cancel_after``: answered with each one's tokens; ``metrics``: answered with vLLM's counters; ``reset``: forgets vLLM's
own prefix cache, with ``external`` the connector's too. Commands run side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

# vLLM reads them when it is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


#: Where answers go. What vLLM and its processes print goes where their errors go.
ANSWERS = os.fdopen(os.dup(1), "w") if __name__ == "__main__" else sys.stdout
if __name__ == "__main__":
    os.dup2(2, 1)


def tell(**answer: Any) -> None:
    """Write one line of JSON."""
    print(json.dumps(answer), file=ANSWERS, flush=True)


#: The adapters that were asked for, whose numbers vLLM wants to be positive.
ADAPTERS: list[str] = []


def adapter(folder: str | None) -> Any:
    """vLLM's request for an adapter; None without one."""
    from vllm.lora.request import LoRARequest

    if folder is None:
        return None
    if folder not in ADAPTERS:
        ADAPTERS.append(folder)
    number = ADAPTERS.index(folder) + 1
    return LoRARequest(f"adapter-{number}", number, folder)


async def generate(engine: Any, name: str, prompt: list[int], command: dict[str, Any], cancel: int | None) -> list[int]:
    """The tokens of one prompt, up to its end or to where it is cancelled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=command["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    asked: dict[str, Any] = {"prompt_token_ids": prompt}
    if command.get("salt"):
        asked["cache_salt"] = command["salt"]
    tokens: list[int] = []
    stream = engine.generate(asked, params, name, lora_request=adapter(command.get("lora")))
    async for output in stream:
        tokens = list(output.outputs[0].token_ids)
        if cancel is not None and len(tokens) >= cancel:
            await engine.abort(name)
            break
    return tokens


def counters() -> dict[str, float]:
    """vLLM's counters and gauges by name, summed over their labels."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("vllm:") and not sample.name.endswith(("_bucket", "_created")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def serve(engine: Any, command: dict[str, Any]) -> None:
    """Answer one command."""
    number = command["id"]
    try:
        if "prompts" in command:
            prompts = command["prompts"]
            cancels = command.get("cancel_after") or [None] * len(prompts)
            tokens = await asyncio.gather(
                *(
                    generate(engine, f"{number}-{nth}", prompt, command, cancel)
                    for nth, (prompt, cancel) in enumerate(zip(prompts, cancels, strict=True))
                )
            )
            tell(id=number, tokens=tokens)
        elif "reset" in command:
            tell(id=number, reset=await engine.reset_prefix_cache(False, bool(command.get("external"))))
        else:
            await engine.do_log_stats()
            tell(id=number, metrics=counters())
    except Exception as error:
        tell(id=number, error=repr(error))


async def main(arguments: dict[str, Any]) -> None:
    """Serve commands until the input ends."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    tell(ready=True)
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = asyncio.create_task(serve(engine, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
