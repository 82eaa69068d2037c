"""Prints output on a terminal: the text as it streams, and a one-line summary."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb


def print_text(responses: Iterable[pb.GenerateResponse]) -> pb.Finish | None:
    """Print text as it streams, then a final newline. Returns the finish, if one arrived.

    Logprobs, if any, go to standard error, one line per token.
    """
    finish, ends_line = None, True
    try:
        for response in responses:
            _print_logprobs(response)
            if response.text:
                print(response.text, end="", flush=True)
                ends_line = response.text.endswith("\n")
            if response.HasField("finish"):
                finish = response.finish
    finally:
        if not ends_line:
            print()
    return finish


def print_samples(responses: Iterable[pb.GenerateResponse]) -> list[pb.Finish]:
    """Print each sample's text under its number when it finishes. Returns the finishes in that order.

    Samples that are unfinished when the stream ends or fails are printed last.
    """
    texts, finishes = dict[int, str](), list[pb.Finish]()
    try:
        for response in responses:
            _print_logprobs(response)
            texts[response.sample] = texts.get(response.sample, "") + response.text
            if response.HasField("finish"):
                print_sample(response.sample, texts.pop(response.sample))
                finishes.append(response.finish)
    finally:
        for sample in sorted(texts):
            print_sample(sample, texts[sample])
    return finishes


def print_sample(sample: int, text: str) -> None:
    """Print a sample's text under its number."""
    print(f"--- {sample}\n{text}", end="" if text.endswith("\n") else "\n", flush=True)


def _print_logprobs(response: pb.GenerateResponse) -> None:
    for what, choices in (("prompt", response.prompt_logprobs), (f"sample {response.sample}", response.logprobs)):
        for one in choices:
            top = " ".join(f"{other.token_id}:{other.logprob:.4f}" for other in one.top)
            print(
                f"{what} token {one.token_id} logprob {one.logprob:.4f} rank {one.rank} {top}".rstrip(), file=sys.stderr
            )


def logprobs(choices: Iterable[pb.TokenLogprob]) -> list[dict[str, Any]]:
    """Token logprobs as JSON objects."""
    return [
        {
            "token_id": one.token_id,
            "logprob": one.logprob,
            "rank": one.rank,
            "top": [{"token_id": other.token_id, "logprob": other.logprob} for other in one.top],
        }
        for one in choices
    ]


def reason(finish: pb.Finish) -> str:
    """The finish reason, in lower case."""
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def took(usage: pb.Usage) -> str:
    """Token counts and times, as one line."""
    total = usage.total_time.ToNanoseconds() / 1e9
    rate = usage.completion_tokens / total if total else 0.0
    line = (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"completion {usage.completion_tokens} tokens in {total:.2f} s ({rate:.0f}/s), "
        f"queued for {usage.queue_time.ToNanoseconds() / 1e6:.0f} ms, "
        f"first after {usage.time_to_first_token.ToNanoseconds() / 1e6:.0f} ms"
    )
    return f"{line}, preempted {usage.preemptions} times" if usage.preemptions else line


def summary(finish: pb.Finish) -> str:
    """The finish reason, token counts, times and seed, as one line."""
    return f"{reason(finish)}; {took(finish.usage)}; seed {finish.seed}"
