"""How rows of logits become tokens on a device: the parameters as arrays, and the launches of sampling.hip.

`settings` turns what one request asks for into a row's record, once; a `Batch` is those records with this step's
positions, and the entries of the tokens whose logits are changed first. `reference` takes the same arrays and says
what they mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.device.module import Launches

#: Ids have 18 bits in the order of a row's tokens, and the sum of as many weights has 62.
MAX_VOCAB = 1 << 18
#: Top tokens whose log probabilities a row may ask for.
MAX_LOGPROBS = 20
#: The weight of a row's likeliest token.
WHOLE_BITS = 44
#: A weight halves every so many steps.
STEP_BITS = 23
#: Threads of a block, one block a row.
THREADS = 1024

#: Errors of a row, in `Drawn.errors`.
NOT_FINITE = 1
NOTHING_LEFT = 2

#: A row, as sampling.hip's ``Row``.
ROW = np.dtype(
    [
        ("top_p", np.uint64),  # of 2 ** 64; 0 is off
        ("least", np.uint64),  # the least weight that min-p keeps
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
#: A token whose logit is changed, as sampling.hip's ``Entry``; a row has no two of one id.
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

    ``temperature`` 0 takes the likeliest; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; ``logprobs`` is how many of
    the likeliest tokens are wanted with the log probability of the drawn one, None for neither. Values are taken as
    checked: by ``services.engine.sampling.params.validate``.
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
    """How often each token of one request stands in its output, and which stand in its prompt; kept as tokens come.

    ``output`` tokens were taken so far.
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
        """How often each of `ids` stands in the output."""
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
    """Return the `ENTRY` array of a row whose tokens are penalised by ``counts``, biased, or never to be drawn.

    Without ``prompt``, tokens that stand in the prompt alone are left out: only a repetition penalty is for them.
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
    """What to draw from the rows of some logits: ``rows`` `ROW` ``[n]``, ``entries`` `ENTRY` ``[m]``, row after row."""

    rows: NDArray[np.void]
    entries: NDArray[np.void]

    @classmethod
    def of(
        cls,
        records: Sequence[bytes],
        positions: Sequence[int],
        entries: Sequence[NDArray[np.void]] | None = None,
    ) -> Batch:
        """Put together ``settings`` of n rows, the positions their tokens will have, and the entries of each."""
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
        """The most top tokens a row asks for; -1 if none asks for any log probability."""
        return max(self.rows["logprobs"].tolist(), default=-1)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of n rows.

    ``tokens`` and ``errors`` int32 ``[n]``: 0, `NOT_FINITE` or `NOTHING_LEFT`, and with these the token is 0. The rest
    is of the logits as the model gave them, before temperature, penalties, biases and bans: ``logprobs`` float32
    ``[n]``, the natural logarithm of the token's chance in their softmax; ``ranks`` int32 ``[n]``, 1 for the likeliest,
    equals by id; ``top_ids`` int32 and ``top_logprobs`` float32 ``[n, most]``, the likeliest tokens in this order. NaN,
    0 and -1 stand where a row did not ask, or has an error, or fewer tokens.
    """

    tokens: NDArray[np.int32]
    errors: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @classmethod
    def unpacked(cls, out: NDArray[np.int32], n: int, most: int) -> Drawn:
        """Read what the kernels wrote, `out_words` words, for ``n`` rows and ``most`` top tokens."""
        if most < 0:
            tokens, errors = out[: 2 * n].reshape(2, n)
            return cls(tokens, errors, *_not_asked(n))
        tokens, errors, logprobs, ranks = out[: 4 * n].reshape(4, n)
        ids, values = out[4 * n : out_words(n, most)].reshape(2, n, most)
        return cls(tokens, errors, logprobs.view(np.float32), ranks, ids, values.view(np.float32))


@functools.lru_cache(maxsize=512)
def _not_asked(n: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """What `Drawn` has for rows none of which asks for log probabilities; not to be written to."""
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
    """Where logits are: compiles kernels, and holds arrays."""

    def compile(self, name: str, defines: Mapping[str, str]) -> Launches:
        """Compile kernels/``name``.hip."""

    def array(self, values: NDArray[Any]) -> Any:
        """Copy ``values`` to the device."""

    def empty(self, shape: int, dtype: Any) -> Any:
        """Return memory of any content."""

    def get(self, array: Any) -> NDArray[Any]:
        """Copy an array to the host."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch whose launches are queued. ``out`` is the device's: its first n words are the tokens, int32."""

    device: Device
    out: Any
    rows: int
    most: int

    def wait(self) -> Drawn:
        """Copy the results to the host."""
        return Drawn.unpacked(np.asarray(self.device.get(self.out), np.int32), self.rows, self.most)


class Sampler:
    """Draws tokens from logits that stay on a device.

    ``kind`` is how logits are stored: ``F32``, ``F16`` or ``BF16``. Penalised and biased logits are rounded to it.
    ``threads``, of the block that takes a row, change no token. Raises ValueError for a vocabulary beyond `MAX_VOCAB`.
    """

    def __init__(self, device: Device, kind: str, vocab_size: int, threads: int = THREADS) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB}")
        self._device = device
        self._module = device.compile("sampling", {"RF_TYPE": kind, "RF_THREADS": str(threads)})
        self._threads = threads
        self._sizes = np.int64(vocab_size), np.int32(vocab_size)

    def start(self, logits: Any, batch: Batch, stride: int | None = None) -> Pending:
        """Queue the drawing from ``logits``, row i at i times ``stride`` elements, by default the vocabulary's size.

        The logits are the same again when the kernels have run. Two copies to the device, one or two launches.
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
        """Draw, and wait for what comes."""
        return self.start(logits, batch, stride).wait()
