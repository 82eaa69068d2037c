"""One submitted request: everything its samples have said so far, for any number of watchers from any token on."""

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

#: What a generation without output counts for, in bytes: its objects, and its entries in the registry.
OVERHEAD_BYTES = 2048
#: What each of its samples but the first counts for besides.
SAMPLE_BYTES = 1024
#: Watchers at a time, each of which is an open call.
MAX_WATCHES = 64
#: Tokens that a watcher is handed at a time at most, so that no replay makes a message too large.
REPLAY_TOKENS = 4096


class GenerationState(enum.Enum):
    """QUEUED -> RUNNING -> DONE or FAILED. A cancelled one is DONE: its outcomes say so."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Generation:
    """Owned by the asyncio loop. ``fingerprint`` tells what was asked, so that asking again can be recognised.

    ``outputs`` are its samples', in their order, of which there is one at least; ``seed`` is the first one's. It is
    over when each of them has ended.
    """

    def __init__(
        self,
        request_id: str,
        fingerprint: bytes,
        seed: int,
        retention_s: float,
        on_change: Callable[[Generation, int], None],
        samples: int = 1,
    ) -> None:
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.seed = seed
        self.retention_s = retention_s
        self.outputs = tuple(Output() for _ in range(samples))
        self.forgotten = False
        self._on_change = on_change  # is told by how many bytes it grew
        self._answered = asyncio.Event()
        self._watches: set[Watch] = set()

    def __repr__(self) -> str:
        samples = f" of {self.samples} samples" if self.samples > 1 else ""
        return f"<Generation {self.request_id} {self.state.name}: {self.num_tokens} tokens{samples}>"

    @property
    def samples(self) -> int:
        """How many it has."""
        return len(self.outputs)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, of all samples."""
        return sum(output.num_tokens for output in self.outputs)

    @property
    def over(self) -> bool:
        """Whether every sample has ended."""
        return all(output.outcome is not None for output in self.outputs)

    @property
    def error(self) -> ServiceError | None:
        """What it failed with, once it is over; the first of the samples' errors."""
        if not self.over:
            return None
        errors = (output.outcome.error for output in self.outputs if output.outcome is not None)
        return next((error for error in errors if error is not None), None)

    @property
    def state(self) -> GenerationState:
        """How far it is."""
        if self.over:
            return GenerationState.DONE if self.error is None else GenerationState.FAILED
        usages = (output.usage for output in self.outputs)
        admitted = any(usage is not None and usage.queue_s is not None for usage in usages)
        return GenerationState.RUNNING if admitted else GenerationState.QUEUED

    @property
    def refusal(self) -> ServiceError | None:
        """Why it was never queued."""
        first = self.outputs[0]
        return first.outcome.error if first.outcome is not None and first.usage is None else None

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return OVERHEAD_BYTES + SAMPLE_BYTES * (self.samples - 1) + sum(output.size for output in self.outputs)

    def push(self, event: Event) -> None:
        """Take the next event."""
        grown, said, first = 0, range(self.samples), False
        if event.outcome is None and event.sequence is not None:  # it is queued, all of it
            for sequence in event.sequence.family or (event.sequence,):
                self.outputs[sequence.request.sample].queued(sequence)
            said = range(0)
        elif event.sequence is None and event.outcome is not None:  # it is refused, all of it
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
        """Wait until it is queued. Raises what it was refused with."""
        await self._answered.wait()
        if self.refusal is not None:
            raise copy(self.refusal)  # each caller has its own, to name the field at fault in

    @contextmanager
    def watch(
        self,
        from_token: int = 0,
        from_tokens: Items[int] = (),
        without_samples: Items[int] = (),
        throttle: Throttle | None = None,
    ) -> Iterator[Watch]:
        """Read it while the context lasts, from a token on: its one sample from ``from_token``, or each of several from
        its own of ``from_tokens``, and those behind its end from their beginning; ``without_samples`` not at all. What
        there is comes at once, what is new at the ``throttle``.

        Raises FieldInvalid when it has fewer tokens or samples, or none is left to read, and TooManyWatchers.
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
            raise FieldInvalid(f"from_token is {from_token}, and from_tokens is given, too", field="from_tokens")
        if from_token and self.samples > 1:
            raise FieldInvalid(
                f"from_token is {from_token} and there are {self.samples} samples; from_tokens says it of each",
                field="from_token",
                limit=0,
            )
        if len(from_tokens) > self.samples:
            raise FieldInvalid(
                f"from_tokens has {len(from_tokens)} entries; it may have one for each sample, {self.samples}",
                field="from_tokens",
                limit=self.samples,
            )
        asked = from_tokens or [from_token]
        starts = [*asked, *[0] * (self.samples - len(asked))]
        for at, (start, output) in enumerate(zip(starts, self.outputs, strict=True)):
            if start > output.num_tokens:
                name = f"from_tokens[{at}]" if from_tokens else "from_token"
                raise FieldInvalid(
                    f"{name} is {start} and there are {output.num_tokens} tokens so far",
                    field=name,
                    limit=output.num_tokens,
                )
        return starts

    def _check_without(self, without_samples: Items[int]) -> None:
        if len(without_samples) > self.samples:
            raise FieldInvalid(
                f"without_samples has {len(without_samples)} entries; it may have one for each sample, {self.samples}",
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
        """Let its output go, whoever is reading it."""
        self.forgotten = True
        for output in self.outputs:
            output.forget()
        self._wake(range(self.samples))

    def _wake(self, said: range, first: bool = False) -> None:
        for watch in self._watches:
            for sample in said:
                watch.wake(sample, first or self.forgotten or self.outputs[sample].outcome is not None)


class Watch:
    """One reader's place in each sample of a generation. It holds no output, so one that stops reading costs nothing.

    Samples with news have their turns one after another; none has another before those that waited meanwhile.
    """

    def __init__(
        self, generation: Generation, starts: Items[int], without: frozenset[int], throttle: Throttle | None = None
    ) -> None:
        self._generation = generation
        self._at = array("I", starts)
        self._turns = [at for at in range(generation.samples) if at not in without]  # whose end was not told
        self._changed = asyncio.Event()
        # Each sample has turns of its own: a turn is one message, but for what there is at first.
        self._bells = [Bell(self._changed.set, throttle, sounded=True) for _ in starts]

    def wake(self, sample: int, at_once: bool) -> None:
        """There is something new of a sample; ``at_once`` when it is the first or the last that comes of it."""
        if sample in self._turns:
            self._bells[sample].ring(at_once)

    async def next(self) -> News:
        """Wait for news and take them: the next tokens of a sample, or how it ended, or both. Not to be called again
        after those that say that it is over.

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
                f"{generation.request_id!r} was forgotten while token {at} of {output.num_tokens}{whose} was read",
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
