"""A submitted request: all output of its samples, for any number of watchers, each starting at any token."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from copy import copy

from services.common.errors import FieldInvalid, RequestUnknown, ServiceError, TooManyWatchers
from services.engine.delivery.output import Output
from services.engine.delivery.streams import News
from services.engine.delivery.throttle import Bell, Throttle
from services.engine.scheduling.event import Event

#: Bytes accounted for a generation without output: its objects, and its entries in the registry.
OVERHEAD_BYTES = 2048
#: Bytes accounted for each further sample.
SAMPLE_BYTES = 1024
#: Most concurrent watchers of a generation, each an open call.
MAX_WATCHES = 64
#: Most tokens in one message to a watcher, so that a replay stays within the message size limit.
REPLAY_TOKENS = 4096


class GenerationState(enum.Enum):
    """QUEUED -> RUNNING -> DONE or FAILED. A cancelled generation is DONE; its outcomes have the reason."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Generation:
    """Owned by the asyncio loop. ``fingerprint`` is a hash of the request: it makes a repeated submission idempotent;
    ``owner`` is the identity that submitted it.
    ``outputs`` has one entry per sample, in order, at least one; ``seed`` is the first sample's. The generation is over
    when every sample has ended.
    """

    def __init__(
        self,
        request_id: str,
        fingerprint: bytes,
        seed: int,
        retention_s: float,
        on_change: Callable[[Generation, int], None],
        samples: int = 1,
        owner: str = "",
    ) -> None:
        self.owner = owner
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.seed = seed
        self.retention_s = retention_s
        self.outputs = tuple(Output() for _ in range(samples))
        self.forgotten = False
        self._on_change = on_change  # called with the bytes it grew by
        self._answered = asyncio.Event()
        self._watches: set[Watch] = set()

    def __repr__(self) -> str:
        samples = f" of {self.samples} samples" if self.samples > 1 else ""
        return f"<Generation {self.request_id} {self.state.name}: {self.num_tokens} tokens{samples}>"

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.outputs)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all samples."""
        return sum(output.num_tokens for output in self.outputs)

    @property
    def over(self) -> bool:
        """Whether every sample has ended."""
        return all(output.outcome is not None for output in self.outputs)

    @property
    def error(self) -> ServiceError | None:
        """The error it failed with, once it is over: the first of its samples' errors."""
        if not self.over:
            return None
        errors = (output.outcome.error for output in self.outputs if output.outcome is not None)
        return next((error for error in errors if error is not None), None)

    @property
    def state(self) -> GenerationState:
        """Its current state."""
        if self.over:
            return GenerationState.DONE if self.error is None else GenerationState.FAILED
        usages = (output.usage for output in self.outputs)
        admitted = any(usage is not None and usage.queue_s is not None for usage in usages)
        return GenerationState.RUNNING if admitted else GenerationState.QUEUED

    @property
    def refusal(self) -> ServiceError | None:
        """The error it was rejected with before it was queued, if any."""
        first = self.outputs[0]
        return first.outcome.error if first.outcome is not None and first.usage is None else None

    @property
    def size(self) -> int:
        """Bytes accounted for it."""
        return OVERHEAD_BYTES + SAMPLE_BYTES * (self.samples - 1) + sum(output.size for output in self.outputs)

    def push(self, event: Event) -> None:
        """Apply the next event."""
        grown, said, first = 0, range(self.samples), False
        if event.outcome is None and event.sequence is not None:  # all samples are queued
            for sequence in event.sequence.family or (event.sequence,):
                self.outputs[sequence.request.sample].queued(sequence)
            said = range(0)
        elif event.sequence is None and event.outcome is not None:  # all samples are refused
            for output in self.outputs:
                output.push(event)
        else:
            output = self.outputs[event.sample]
            before, first = output.size, not output.num_tokens
            output.push(event)
            grown = output.size - before
            said = range(event.sample, event.sample + 1)
        self._answered.set()
        self._on_change(self, grown)
        self._wake(said, first)

    async def accepted(self) -> None:
        """Wait until it is queued. Raises the error it was refused with."""
        await self._answered.wait()
        if self.refusal is not None:
            raise copy(self.refusal)  # callers prefix the error's field, so each needs its own copy

    @contextmanager
    def watch(
        self,
        from_token: int = 0,
        from_tokens: Items[int] = (),
        without_samples: Items[int] = (),
        throttle: Throttle | None = None,
    ) -> Iterator[Watch]:
        """Watch the generation while the context lasts. A single sample starts at ``from_token``; of several, sample i
        starts at ``from_tokens[i]``, and samples past the end of that list start at 0. ``without_samples`` are skipped.
        Existing output is sent at once, new output as the ``throttle`` allows.

        Raises FieldInvalid for a token or sample that does not exist, and when no sample is left; and TooManyWatchers.
        """
        starts = self._starts(from_token, from_tokens)
        self._check_without(without_samples)
        if len(self._watches) >= MAX_WATCHES:
            raise TooManyWatchers(f"{self.request_id!r} has {MAX_WATCHES} watchers, the limit", limit=MAX_WATCHES)
        watch = Watch(self, starts, frozenset(without_samples), throttle)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def _starts(self, from_token: int, from_tokens: Items[int]) -> list[int]:
        if from_token and from_tokens:
            raise FieldInvalid(f"from_token is {from_token}; from_tokens cannot be set as well", field="from_tokens")
        if from_token and self.samples > 1:
            raise FieldInvalid(
                f"from_token is {from_token}; with {self.samples} samples, use from_tokens",
                field="from_token",
                limit=0,
            )
        if len(from_tokens) > self.samples:
            raise FieldInvalid(
                f"from_tokens has {len(from_tokens)} entries; at most one for each sample, {self.samples}",
                field="from_tokens",
                limit=self.samples,
            )
        asked = from_tokens or [from_token]
        starts = [*asked, *[0] * (self.samples - len(asked))]
        for at, (start, output) in enumerate(zip(starts, self.outputs, strict=True)):
            if start > output.num_tokens:
                name = f"from_tokens[{at}]" if from_tokens else "from_token"
                raise FieldInvalid(
                    f"{name} is {start}; there are {output.num_tokens} tokens so far",
                    field=name,
                    limit=output.num_tokens,
                )
        return starts

    def _check_without(self, without_samples: Items[int]) -> None:
        if len(without_samples) > self.samples:
            raise FieldInvalid(
                f"without_samples has {len(without_samples)} entries; at most one for each sample, {self.samples}",
                field="without_samples",
                limit=self.samples,
            )
        for at, sample in enumerate(without_samples):
            if sample >= self.samples:
                raise FieldInvalid(
                    f"without_samples[{at}] is {sample}; it must be at most {self.samples - 1}",
                    field=f"without_samples[{at}]",
                    limit=self.samples - 1,
                )
        if len(set(without_samples)) == self.samples:
            raise FieldInvalid("without_samples leaves no sample to watch", field="without_samples")

    def forget(self) -> None:
        """Drop its output. Watchers that have not read all of it get RequestUnknown."""
        self.forgotten = True
        for output in self.outputs:
            output.forget()
        self._wake(range(self.samples))

    def _wake(self, said: range, first: bool = False) -> None:
        for watch in self._watches:
            for sample in said:
                watch.wake(sample, first or self.forgotten or self.outputs[sample].outcome is not None)


class Watch:
    """One reader's position in each sample of a generation. It buffers no output, so a stalled reader costs no memory.

    Samples with news are read round-robin.
    """

    def __init__(
        self, generation: Generation, starts: Items[int], without: frozenset[int], throttle: Throttle | None = None
    ) -> None:
        self._generation = generation
        self._at = array("I", starts)
        self._turns = [at for at in range(generation.samples) if at not in without]  # still to be read
        self._changed = asyncio.Event()
        # Each sample has its own turns in the throttle. A turn is one message, except for the initial replay.
        self._bells = [Bell(self._changed.set, throttle, sounded=True) for _ in starts]

    def wake(self, sample: int, at_once: bool) -> None:
        """Signal news of a sample; ``at_once`` for its first token or its outcome."""
        if sample in self._turns:
            self._bells[sample].ring(at_once)

    async def next(self) -> News:
        """Wait for news and return it: a sample's next tokens, its outcome, or both. Do not call it again after news
        with ``over``.

        Raises RequestUnknown when the generation was forgotten before all of it was read.
        """
        while (sample := self._ready()) is None:
            self._changed.clear()
            await self._changed.wait()
        generation, output, at = self._generation, self._generation.outputs[sample], self._at[sample]
        end = min(output.num_tokens, at + REPLAY_TOKENS)
        if generation.forgotten and at < end:
            whose = f" of sample {sample}" if generation.samples > 1 else ""
            raise RequestUnknown(
                f"{generation.request_id!r} was deleted or expired at token {at} of {output.num_tokens}{whose}",
                field="request_id",
            )
        self._at[sample] = end
        self._turns.remove(sample)
        ended = end == output.num_tokens and output.outcome is not None
        if not ended:
            self._turns.append(sample)
        if end == output.num_tokens:
            self._bells[sample].hush()
        text, token_ids = ("", ()) if at == end else output.read(at, end)
        return News(
            text,
            token_ids,
            output.outcome if ended else None,
            output.usage if ended else None,
            sample,
            output.logprobs(at, end),
            output.prompt_logprobs if at == 0 < end else (),
            over=not self._turns,
        )

    def _ready(self) -> int | None:
        for sample in self._turns:
            bell, output = self._bells[sample], self._generation.outputs[sample]
            if bell.sounded and (self._at[sample] < output.num_tokens or output.outcome is not None):
                return sample
            bell.hush()
        return None
