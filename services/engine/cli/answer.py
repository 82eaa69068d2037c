"""An answer on a terminal: the text as it comes, and how it ended in a line."""

from __future__ import annotations

from collections.abc import Iterable

from rocmforge.engine.v1 import engine_pb2 as pb


def print_text(responses: Iterable[pb.GenerateResponse]) -> pb.Finish | None:
    """Print text as it comes, with a line's end behind it; returns the finish, if one came."""
    finish, ends_line = None, True
    try:
        for response in responses:
            if response.text:
                print(response.text, end="", flush=True)
                ends_line = response.text.endswith("\n")
            if response.HasField("finish"):
                finish = response.finish
    finally:
        if not ends_line:
            print()
    return finish


def reason(finish: pb.Finish) -> str:
    """Why it ended, in a word."""
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def took(usage: pb.Usage) -> str:
    """Counts and times, in a line."""
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
    """How it ended and what it took, in a line."""
    return f"{reason(finish)}; {took(finish.usage)}; seed {finish.seed}"
