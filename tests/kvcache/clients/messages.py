"""What an engine sends, as messages: one sequence each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rocmforge.kvcache.v1 import kvcache_pb2 as pb


def opening(name: str, prompt: Iterable[int], pages: int = 0, **fields: Any) -> pb.Demand:
    """``fields`` are the prompt's."""
    begun = pb.SequenceOpening(sequence_id=name, prompt=pb.Prompt(tokens=prompt, **fields), total_pages=pages)
    return pb.Demand(opening=begun)


def fork(name: str, parent: str, pages: int = 0) -> pb.Demand:
    return pb.Demand(opening=pb.SequenceOpening(sequence_id=name, parent_sequence_id=parent, total_pages=pages))


def step(name: str, start: int = 0, tokens: Iterable[int] = (), pages: int = 0, known: int = 0) -> pb.Demand:
    steps = report(name, start, tokens)
    steps.total_pages.append(pages)
    steps.known_pages.append(known)
    return pb.Demand(steps=steps)


def report(name: str, start: int = 0, tokens: Iterable[int] = ()) -> pb.SequenceSteps:
    told = [*tokens]
    return pb.SequenceSteps(sequence_ids=[name], starts=[start], token_counts=[len(told)], tokens=told)
