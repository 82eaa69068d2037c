"""``python -m services.engine status``: print the status of the engine, or of a submitted generation."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common import rpc
from services.engine.cli import client
from services.engine.cli.printing import reason, took

NAME = "status"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    flags = _parser().parse_args(arguments)
    try:
        message = pb.GetGenerationRequest(request_id=flags.id)
    except UnicodeError:
        client.say(NAME, "ID must be UTF-8")
        return 2

    def body(stub: Any) -> int:
        if flags.id:
            lines = of_generation(stub.GetGeneration(message).generation, time.time())
        else:
            lines = of_engine(stub.GetModel(pb.GetModelRequest()), stub.GetStats(pb.GetStatsRequest()))
        print("\n".join(lines))
        return 0

    return client.run(NAME, client.reached(flags), body, flags.wait)


def of_generation(generation: pb.Generation, now: float) -> list[str]:
    """The status of a generation as lines; ``now`` is the wall-clock time in seconds since the epoch."""
    state = pb.GenerationState.Name(generation.state).removeprefix("GENERATION_STATE_").lower()
    if generation.HasField("finish"):
        state += f" ({reason(generation.finish)})"
    if generation.HasField("error"):
        state += f" ({client.describe(rpc.error_from_status(generation.error))})"
    lines = [f"{generation.request_id}: {state}"]
    if not generation.samples:
        lines.append(took(generation.usage))
    for at, sample in enumerate(generation.samples):
        ended = f" ({reason(sample.finish)})" if sample.HasField("finish") else ""
        lines.append(f"sample {at}{ended}: {took(sample.usage)}")
    if generation.HasField("expire_time"):
        lines.append(f"kept for {max(0.0, generation.expire_time.ToNanoseconds() / 1e9 - now):.0f} s more")
    return lines


def of_engine(model: pb.GetModelResponse, stats: pb.GetStatsResponse) -> list[str]:
    """The status of an engine as lines."""
    hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    return [
        f"model        {model.model_id} ({model.architecture}, {model.parameters / 1e6:.1f} M parameters), "
        f"context {model.max_context} tokens, {model.backend}",
        f"state        {'draining' if stats.draining else 'serving'}",
        f"requests     {stats.running_requests} running, {stats.queued_requests} of {stats.queue_limit} queued "
        f"({stats.queued_tokens} of {stats.queue_token_limit} tokens)",
        f"ended        {stats.finished_requests} finished, {stats.cancelled_requests} cancelled, "
        f"{stats.failed_requests} failed",
        f"tokens       {stats.prompt_tokens} of prompts ({hits:.0%} cached), {stats.generated_tokens} generated, "
        f"{stats.preemptions} preemptions",
        f"pages        {stats.held_pages} held, of {model.page_size} tokens and {model.page_bytes} bytes",
        f"generations  {stats.retained_generations} kept, {stats.generation_bytes} of "
        f"{stats.generation_byte_limit} bytes",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = client.parser(NAME, "Print the status of the engine, or of a submitted generation.")
    parser.add_argument("id", nargs="?", default="", metavar="ID", help="id printed by `submit` (default: the engine)")
    return parser
