"""Requests to an engine, and what comes back, for tests that start one in whatever way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rocmforge.engine.v1 import engine_pb2 as pb


def request(prompt: str | Sequence[int] = "ROMEO:", max_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    """A greedy request that eos does not end, unless fields say otherwise."""
    given = pb.Prompt(text=prompt) if isinstance(prompt, str) else pb.Prompt(tokens=pb.TokenIds(ids=prompt))
    stopping = pb.Stopping(**{"max_tokens": max_tokens, "ignore_eos": True, **fields.pop("stopping", {})})
    sampling = pb.Sampling(**{"temperature": 0.0, **fields.pop("sampling", {})})
    return pb.GenerateRequest(prompt=given, stopping=stopping, sampling=sampling, **fields)


def collect(stream: Any) -> tuple[str, list[int], pb.Finish]:
    """Text, tokens and finish of a whole stream."""
    text, tokens, finish = "", list[int](), None
    for response in stream:
        assert finish is None, "something came behind the finish"
        text += response.text
        tokens += response.token_ids
        if response.HasField("finish"):
            finish = response.finish
    assert finish is not None, "the stream ended without a finish"
    return text, tokens, finish
