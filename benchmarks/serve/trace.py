"""Requests as a trace of conversations has them: their lengths, scaled, and the prefixes that they share.

A trace is a JSON Lines file with ``input_length``, ``output_length`` and ``hash_ids``, the format of the Mooncake
traces (Qin et al., FAST 2025): each id stands for a block of 512 tokens of the prompt and everything before it. Without
a file, `invented` makes conversations of similar lengths.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512
#: Of the published trace: its inputs have a median of 6909 tokens and a mean of 12035, its outputs 350 and 343.
_INPUT_MU, _INPUT_SIGMA, _OUTPUT_MEAN = 8.84, 1.05, 343.0
#: The share of requests that go on with an earlier conversation, among this many most recent ones.
_CONTINUED, _RECENT = 0.5, 64


@dataclass(frozen=True, slots=True)
class Traced:
    """A request of a trace; lengths in tokens."""

    input_length: int
    output_length: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A request to send: its prompt, and how many tokens it asks for."""

    prompt: tuple[int, ...]
    tokens: int


def read(path: Path) -> list[Traced]:
    """The requests of a trace. Raises ValueError naming the line that is not one."""
    found = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                one = Traced(int(fields["input_length"]), int(fields["output_length"]), tuple(fields["hash_ids"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: expected a JSON object with input_length, output_length and hash_ids"
                ) from error
            if len(one.blocks) * BLOCK_TOKENS < one.input_length:
                raise ValueError(
                    f"{path}:{number}: input_length is {one.input_length}; hash_ids has {len(one.blocks)} blocks"
                )
            found.append(one)
    return found


def invented(count: int, seed: int) -> list[Traced]:
    """Conversations drawn from ``seed``: all begin with the same block, and half of the requests are further turns."""
    draw = random.Random(f"trace-{seed}")
    ids = itertools.count(1)
    recent: list[Traced] = []
    found = []
    for _ in range(count):
        length = max(1, round(draw.lognormvariate(_INPUT_MU, _INPUT_SIGMA)))
        blocks: tuple[int, ...] = (0,)
        if recent and draw.random() < _CONTINUED:
            before = recent.pop(draw.randrange(len(recent)))
            # The last block was not full: what follows it makes it another one.
            blocks = before.blocks[:-1] or blocks
            length += before.input_length + before.output_length
        blocks += tuple(itertools.islice(ids, max(0, -(-length // BLOCK_TOKENS) - len(blocks))))
        found.append(Traced(length, max(1, round(draw.expovariate(1 / _OUTPUT_MEAN))), blocks))
        recent = [*recent[-_RECENT:], found[-1]]
    return found


def scaled(
    trace: list[Traced], divisor: int, output_divisor: int, context: int, vocab_size: int, seed: int
) -> list[Scaled]:
    """The requests with their lengths divided, and cut to a context of prompt and output together.

    Prompts share tokens exactly where their blocks are the same. Ids are drawn from 1 to ``vocab_size`` - 1.
    """
    size = max(1, BLOCK_TOKENS // divisor)
    known: dict[int, list[int]] = {}
    found = []
    for one in trace:
        tokens = max(1, min(one.output_length // output_divisor, context // 2))
        length = max(1, min(one.input_length // divisor, len(one.blocks) * size, context - tokens))
        prompt: list[int] = []
        for block in one.blocks[: -(-length // size)]:
            if block not in known:
                draw = random.Random(f"block-{seed}-{block}")
                known[block] = [draw.randrange(1, vocab_size) for _ in range(size)]
            prompt += known[block]
        found.append(Scaled(tuple(prompt[:length]), tokens))
    return found
