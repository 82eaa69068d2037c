"""Composes a step: which tokens of which requests are computed together within the token budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from services.engine.sampling.result import Result
from services.engine.scheduling.sequence import Sequence, State


@dataclass(slots=True)
class Chunk:
    """``count`` tokens of a sequence from position ``start`` on. ``samples`` is set when they are the sequence's last
    tokens and the next one is to be sampled. If ``start`` is the number of its tokens, the one there is still pending:
    the step before samples it.

    ``source_id`` is the sequence's at the time. Not frozen: a mutable dataclass takes a quarter of the time to create.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    source_id: str = ""

    @property
    def void(self) -> bool:
        """Whether its sequence has ended or lost its pages since, so that its result counts for nothing."""
        return self.sequence.state is not State.RUNNING or self.sequence.source_id != self.source_id


class Flight(Protocol):
    """A step that was launched. Until `wait` has returned, it may read and write the pages that its sequences had."""

    @property
    def leads(self) -> bool:
        """Whether the next step may be launched before this one is waited for; `wait` may make it false."""

    def wait(self) -> list[Result]:
        """Wait until it is synchronized. Returns a result per chunk: its sampled token, an error, or None.

        The steps launched before must have been waited for and applied. Raises if nothing can be computed.
        """

    def discard(self) -> None:
        """Wait until it no longer reads or writes any page, whatever has become of it. Computes nothing again.

        Raises if the device has failed.
        """


def share_out(running: Iterable[Sequence], budget: int, page_size: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a step: at most ``budget`` tokens of ``running``, in order, for requests with room in their
    pages.

    Prefill does not stall decode, nor decode prefill: each decoding request gets its one token, and prefills share the
    rest. If the budget is not larger than the batch, the last decoding requests may get no token.
    """
    chunks, decoding, wanted = list[Chunk](), 0, 0
    for sequence in running:
        if (sequence.shares_tail or sequence.forks) and sequence.held:
            continue
        start, total = sequence.num_computed_tokens + sequence.in_flight, len(sequence.tokens)
        if sequence.pending:
            total += sequence.pending
            # The last token is never computed. Forks share the pages after the first one.
            if total > sequence.max_resident_tokens or sequence.forks:
                continue
        room = len(sequence.pages) * page_size - start
        if room <= 0:
            continue
        missing = total - start
        if missing == 1:
            chunks.append(Chunk(sequence, start, 1, True, sequence.source_id))
            decoding += 1
            wanted += 1
        elif missing:
            count = min(missing, room)
            chunks.append(Chunk(sequence, start, count, count == missing, sequence.source_id))
            wanted += count
    return tuple(chunks if wanted <= budget else _cut(chunks, budget, decoding))


def _cut(chunks: list[Chunk], budget: int, decoding: int) -> list[Chunk]:
    """Split a budget that is smaller than what the chunks need; ``decoding`` of them are decoding requests."""
    prefills = max(1, budget - decoding) if decoding < len(chunks) else 0
    decodes = budget - prefills
    for chunk in chunks:
        want = chunk.count
        if len(chunk.sequence.tokens) + chunk.sequence.pending - chunk.start == 1:
            chunk.count = min(1, decodes)
            decodes -= chunk.count
        else:
            chunk.count = min(want, prefills)
            prefills -= chunk.count
        chunk.samples &= chunk.count == want
    return [chunk for chunk in chunks if chunk.count]
