"""Sampling on a device: the parameters as arrays, and the launches of sampling.hip.

`settings` converts one request's parameters to a row's record, once; a `Batch` is those records with this step's
positions, and the entries of the tokens whose logits are adjusted first. `reference` takes the same arrays and defines
their semantics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.device.module import Launches

#: Ids have 18 bits in the order of a row's tokens, and the sum of as many weights has 62.
MAX_VOCAB = 1 << 18
#: Maximum number of top tokens whose log probabilities a row may request.
MAX_LOGPROBS = 20
#: The weight of a row's likeliest token.
WHOLE_BITS = 44
#: A weight halves every this many steps.
STEP_BITS = 23
#: Threads per block, with one block per row.
THREADS = 1024

#: Errors of a row, in `Drawn.errors`.
NOT_FINITE = 1
NOTHING_LEFT = 2

#: A row, as sampling.hip's ``Row``.
ROW = np.dtype(
    [
        ("top_p", np.uint64),  # of 2 ** 64; 0 is off
        ("least", np.uint64),  # the minimum weight that min-p keeps
        ("seed", np.uint64),
        ("position", np.uint64),
        ("scale", np.float32),  # steps of a difference of 1 between logits; 0 is greedy
        ("top_k", np.int32),  # 0 is off
        ("first_entry", np.int32),
        ("entries", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("logprobs", np.int32),  # -1 is off
    ]
)
#: A token whose logit is adjusted, as sampling.hip's ``Entry``; ids are distinct within a row.
ENTRY = np.dtype(
    [
        ("id", np.int32),
        ("count", np.int32),  # in the output; -1: neither there nor in the prompt
        ("bias", np.float32),  # -inf: never drawn
        ("raw", np.float32),  # the kernel's
    ]
)
_NO_ENTRIES = np.empty(0, ENTRY)


def settings(
    *,
    seed: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logprobs: int | None = None,
) -> bytes:
    """Return one request's record, a `ROW` without position and entries.

    ``temperature`` 0 takes the likeliest; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; ``logprobs`` is the number
    of top tokens to return along with the log probability of the sampled one, None for neither. Values must have been
    validated, by ``services.engine.sampling.params.validate``.
    """
    record = np.zeros(1, ROW)
    if temperature > 0:
        # At most 2 ** 100: then a difference that a GPU may flush to zero is less than a step.
        scale = 2**STEP_BITS / math.log(2) / max(temperature, 1e-30)
        record["scale"] = min(scale, 2.0**100)
    record["top_k"] = top_k
    if top_p < 1:
        record["top_p"] = max(1, int(top_p * 2.0**64))
    record["least"] = max(1, math.ceil(min_p * 2.0**WHOLE_BITS))
    record["seed"] = seed
    record["repetition"] = repetition_penalty
    record["presence"] = presence_penalty
    record["frequency"] = frequency_penalty
    record["logprobs"] = -1 if logprobs is None else logprobs
    return record.tobytes()


class TokenCounts:
    """Counts each token in a request's output, and records those in its prompt; updated token by token.

    ``output`` is the number of output tokens so far.
    """

    def __init__(self, prompt: Sequence[int], output: Iterable[int] = ()) -> None:
        ids = np.unique(np.asarray(prompt, np.int32))
        self._used = len(ids)
        self._ids = np.concatenate([ids, np.empty(64, np.int32)])
        self._counts = np.zeros(len(self._ids), np.int32)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self.output = 0
        for token in output:
            self.add(token)

    @property
    def ids(self) -> NDArray[np.int32]:
        """The tokens of prompt and output, each once."""
        return self._ids[: self._used]

    @property
    def counts(self) -> NDArray[np.int32]:
        """How often each of `ids` occurs in the output."""
        return self._counts[: self._used]

    def add(self, token: int) -> None:
        """Take the output's next token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._used
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty(place, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(place, np.int32)])
            self._ids[place] = token
            self._used += 1
        self._counts[place] += 1
        self.output += 1


def entries(
    counts: TokenCounts | None = None,
    bias: Mapping[int, float] | None = None,
    banned: Iterable[int] = (),
    prompt: bool = True,
) -> NDArray[np.void]:
    """Return the `ENTRY` array of a row whose tokens are penalised by ``counts``, biased or banned.

    Without ``prompt``, tokens that occur only in the prompt are left out: only a repetition penalty applies to them.
    """
    barred = np.fromiter(banned, np.int32)
    penalised = times = np.empty(0, np.int32)
    if counts is not None:
        penalised, times = counts.ids, counts.counts
        if not prompt:
            penalised, times = penalised[times > 0], times[times > 0]
    if not bias and not len(barred):
        found = np.zeros(len(penalised), ENTRY)
        found["id"], found["count"] = penalised, times
        return found
    biased = np.fromiter(bias or (), np.int32)
    ids = np.unique(np.concatenate([penalised, biased, barred]))
    found = np.zeros(len(ids), ENTRY)
    found["id"], found["count"] = ids, -1
    found["count"][np.searchsorted(ids, penalised)] = times
    if bias:
        found["bias"][np.searchsorted(ids, biased)] = np.fromiter(bias.values(), np.float32)
    found["bias"][np.searchsorted(ids, barred)] = -np.inf
    return found


@dataclass(frozen=True, slots=True)
class Batch:
    """The sampling parameters of a batch of logits: ``rows`` `ROW` ``[n]``, ``entries`` `ENTRY` ``[m]``, row by row."""

    rows: NDArray[np.void]
    entries: NDArray[np.void]

    @classmethod
    def of(
        cls,
        records: Sequence[bytes],
        positions: Sequence[int],
        entries: Sequence[NDArray[np.void]] | None = None,
    ) -> Batch:
        """Assemble the ``settings`` of n rows, the positions that their tokens will have, and the entries of each."""
        rows = np.frombuffer(b"".join(records), ROW).copy()
        rows["position"] = positions
        if entries is None:
            return cls(rows, _NO_ENTRIES)
        lengths = np.array([len(one) for one in entries], np.int32)
        rows["entries"] = lengths
        rows["first_entry"] = np.cumsum(lengths) - lengths
        return cls(rows, np.concatenate([_NO_ENTRIES, *entries]))

    @property
    def most_logprobs(self) -> int:
        """The maximum number of top tokens that a row requests; -1 if no row requests log probabilities."""
        return max(self.rows["logprobs"].tolist(), default=-1)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The results of n rows.

    ``tokens`` and ``errors`` are int32 ``[n]``; an error is 0, `NOT_FINITE` or `NOTHING_LEFT`, and with the latter two
    the token is 0. The rest is computed from the raw logits, before temperature, penalties, biases and bans:
    ``logprobs`` float32 ``[n]``, the natural logarithm of the token's softmax probability; ``ranks`` int32 ``[n]``, 1
    for the likeliest, ties by id; ``top_ids`` int32 and ``top_logprobs`` float32 ``[n, most]``, the top tokens in that
    order. Entries are NaN, 0 or -1 if the row did not request them, has an error, or has fewer tokens.
    """

    tokens: NDArray[np.int32]
    errors: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def unpacked(cls, out: NDArray[np.int32], n: int, most: int) -> Drawn:
        """Unpack the kernels' output, `out_words` words, for ``n`` rows and ``most`` top tokens."""
        if most < 0:
            tokens, errors = out[: 2 * n].reshape(2, n)
            return cls(tokens, errors, *_not_asked(n))
        tokens, errors, logprobs, ranks = out[: 4 * n].reshape(4, n)
        ids, values = out[4 * n : out_words(n, most)].reshape(2, n, most)
        return cls(tokens, errors, logprobs.view(np.float32), ranks, ids, values.view(np.float32))


@functools.lru_cache(maxsize=512)
def _not_asked(n: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """The fields of `Drawn` for rows without log probabilities; read-only."""
    found = (
        np.full(n, np.nan, np.float32),
        np.zeros(n, np.int32),
        np.empty((n, 0), np.int32),
        np.empty((n, 0), np.float32),
    )
    for array in found:
        array.flags.writeable = False
    return found


def out_words(n: int, most: int) -> int:
    """32-bit words that the kernels write for ``n`` rows; ``most`` as of `Batch.most_logprobs`."""
    return 2 * n if most < 0 else 4 * n + 2 * n * most


class Device(Protocol):
    """The device that holds the logits: compiles kernels and allocates arrays."""

    def compile(self, name: str, defines: Mapping[str, str]) -> Launches:
        """Compile ``name``.hip."""

    def array(self, values: NDArray[Any]) -> Any:
        """Copy ``values`` to the device."""

    def empty(self, shape: int, dtype: Any) -> Any:
        """Allocate uninitialized memory."""

    def get(self, array: Any) -> NDArray[Any]:
        """Copy an array to the host."""

    def fetch(self, array: Any) -> Callable[[], NDArray[Any]]:
        """Queue a copy to the host. Returns a function that waits for it, but for nothing queued later."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch whose launches are queued. ``out`` is on the device; its first n words are the tokens, int32."""

    device: Device
    out: Any
    rows: int
    most: int

    def wait(self) -> Drawn:
        """Copy the results to the host."""
        return Drawn.unpacked(np.asarray(self.device.get(self.out), np.int32), self.rows, self.most)

    def fetch(self) -> Callable[[], Drawn]:
        """Queue the copy to the host. Returns a function that waits for it, but for nothing queued later."""
        arrived, n, most = self.device.fetch(self.out), self.rows, self.most
        return lambda: Drawn.unpacked(np.asarray(arrived(), np.int32), n, most)


class Sampler:
    """Samples tokens from logits that stay on a device.

    ``kind`` is the dtype of the logits: ``F32``, ``F16`` or ``BF16``. Penalised and biased logits are rounded to it.
    ``threads`` per block does not affect the tokens. Raises ValueError for a vocabulary larger than `MAX_VOCAB`.
    """

    def __init__(self, device: Device, kind: str, vocab_size: int, threads: int = THREADS) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB}")
        self._device = device
        self._module = device.compile("sampling", {"RF_TYPE": kind, "RF_THREADS": str(threads)})
        self._threads = threads
        self._sizes = np.int64(vocab_size), np.int32(vocab_size)

    def start(self, logits: Any, batch: Batch, stride: int | None = None) -> Pending:
        """Queue sampling from ``logits``, row i at i times ``stride`` elements, by default the vocabulary size.

        The kernels restore the logits they adjust. Takes two copies to the device, and one or two launches.
        """
        n, most = len(batch.rows), batch.most_logprobs
        out = self._device.empty(max(1, out_words(n, most)), np.int32)
        if n:
            rows = self._device.array(batch.rows.view(np.uint32))
            places = self._device.array(batch.entries.view(np.uint32)) if len(batch.entries) else None
            wide, vocab_size = self._sizes
            of = [logits, np.int64(stride) if stride else wide, vocab_size, rows]
            self._module.launch("sample_tokens", n, self._threads, [*of, places, out])
            if most >= 0:
                self._module.launch("token_logprobs", n, self._threads, [*of, out, np.int32(most)])
        return Pending(self._device, out, n, most)

    def sample(self, logits: Any, batch: Batch, stride: int | None = None) -> Drawn:
        """Sample, and wait for the results."""
        return self.start(logits, batch, stride).wait()

    __call__ = sample
