"""Samples tokens from logits: validates a request's sampling parameters, and calls the sampler.

The sampler is ``kernels.sampling.reference``, or ``kernels.sampling.launch`` for logits on a device. Both take the same
arrays and draw the same tokens.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.sampling import launch, reference
from kernels.sampling.launch import Batch, Drawn, TokenCounts
from services.common.errors import FieldInvalid, ForwardFailed, ServiceError
from services.engine.checkpoint.config import ModelConfig
from services.engine.sampling.result import Choice

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_LOGPROBS = launch.MAX_LOGPROBS
#: A bias larger than any logit.
_CERTAIN = 3e38
_NO_ENTRIES = launch.entries()

#: A backend's sampler: `kernels.sampling.reference.sample`, or a device's.
Drawer = Callable[[Any, Batch], Drawn]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, ``repetition_penalty`` 1 and the other penalties
    at 0 are off. ``logit_bias`` has (token, bias) pairs sorted by token. ``logprobs`` is how many top tokens to return
    along with the log probability of the sampled one, None for no log probabilities; ``prompt_logprobs`` is the same
    for the prompt's tokens. ``suppressed`` tokens are never sampled, ``begin_suppressed`` ones not as the first token.

    The other fields are derived, and precomputed because every step needs them for every row: ``record`` is the
    sampler's input; ``counts_tokens`` says whether sampling needs the request's `TokenCounts`; ``changes_logits`` says
    whether any logits are penalized or biased.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suppressed: frozenset[int] = frozenset()
    begin_suppressed: frozenset[int] = frozenset()
    record: bytes = field(init=False, repr=False, compare=False)
    counts_tokens: bool = field(init=False, repr=False, compare=False)
    changes_logits: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        record = launch.settings(
            seed=self.seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.logprobs,
        )
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        object.__setattr__(self, "record", record)
        object.__setattr__(self, "counts_tokens", penalties)
        object.__setattr__(self, "changes_logits", penalties or bool(self.logit_bias))


def validate(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    defaults: ModelConfig,
    *,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Validate a request's parameters. Those unset default to the model's, then to temperature 1 without any filter.

    An unset seed is random. Raises ``FieldInvalid`` with ``field`` ``sampling.<name>``.
    """
    if temperature is None:
        temperature = 1.0 if defaults.default_temperature is None else defaults.default_temperature
    if top_k is None:
        top_k = defaults.default_top_k or 0
    if top_p is None:
        top_p = 1.0 if defaults.default_top_p is None else defaults.default_top_p
    if min_p is None:
        min_p = 0.0 if defaults.default_min_p is None else defaults.default_min_p
    if seed is None:
        seed = secrets.randbits(64)
    if repetition_penalty is None:
        stated = defaults.default_repetition_penalty
        repetition_penalty = 1.0 if stated is None else stated
    penalties = {"presence_penalty": presence_penalty or 0.0, "frequency_penalty": frequency_penalty or 0.0}
    # Written so that NaN fails.
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise FieldInvalid(
            f"temperature is {temperature}; it must be 0 to {MAX_TEMPERATURE:g}", field="sampling.temperature"
        )
    if not 0 <= top_k <= MAX_TOP_K:
        raise FieldInvalid(f"top_k is {top_k}; it must be 0 to {MAX_TOP_K}", field="sampling.top_k")
    if not 0 < top_p <= 1:
        raise FieldInvalid(f"top_p is {top_p}; it must be more than 0 and at most 1", field="sampling.top_p")
    if not 0 <= min_p < 1:
        raise FieldInvalid(f"min_p is {min_p}; it must be at least 0 and less than 1", field="sampling.min_p")
    if not 0 <= seed <= MAX_SEED:
        raise FieldInvalid(f"seed is {seed}; it must be 0 to {MAX_SEED}", field="sampling.seed")
    if not 0 < repetition_penalty <= MAX_REPETITION_PENALTY:
        raise FieldInvalid(
            f"repetition_penalty is {repetition_penalty}; it must be more than 0 and at most "
            f"{MAX_REPETITION_PENALTY:g}",
            field="sampling.repetition_penalty",
        )
    for name, penalty in penalties.items():
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise FieldInvalid(
                f"{name} is {penalty}; it must be {-MAX_PENALTY:g} to {MAX_PENALTY:g}", field=f"sampling.{name}"
            )
    for name, count in {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}.items():
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise FieldInvalid(f"{name} is {count}; it must be 0 to {MAX_LOGPROBS}", field=f"sampling.{name}")
    return SamplingParams(
        temperature=float(temperature),
        top_k=int(top_k),
        top_p=float(top_p),
        min_p=float(min_p),
        seed=int(seed),
        repetition_penalty=float(repetition_penalty),
        presence_penalty=float(penalties["presence_penalty"]),
        frequency_penalty=float(penalties["frequency_penalty"]),
        logit_bias=_logit_bias(logit_bias or {}, defaults.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        suppressed=frozenset(defaults.suppressed_tokens),
        begin_suppressed=frozenset((*defaults.suppressed_tokens, *defaults.begin_suppressed_tokens)),
    )


def seed_of(seed: int, sample: int) -> int:
    """Returns the seed of sample number ``sample``; sample 0 has ``seed``."""
    return (seed + sample) % (MAX_SEED + 1)


@functools.lru_cache(maxsize=4096)
def certain(token: int, logprobs: int) -> SamplingParams:
    """Returns parameters that always sample ``token``, to get its log probability."""
    return SamplingParams(0.0, 0, 1.0, 0.0, 0, logit_bias=((token, _CERTAIN),), logprobs=logprobs)


def _logit_bias(biases: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise FieldInvalid(
            f"logit_bias has {len(biases)} tokens; at most {MAX_LOGIT_BIASES}", field="sampling.logit_bias"
        )
    for token, bias in biases.items():
        field = f"sampling.logit_bias[{token}]"
        if not 0 <= token < vocab_size:
            raise FieldInvalid(f"logit_bias has token {token}; the vocabulary has {vocab_size} tokens", field=field)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise FieldInvalid(
                f"logit_bias of token {token} is {bias}; it must be {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
                field=field,
            )
    return tuple(sorted((int(token), float(bias)) for token, bias in biases.items()))


def sample(
    logits: Any,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    counts: Sequence[TokenCounts | None] | None = None,
    banned: Sequence[Iterable[int]] | None = None,
    draw: Drawer = reference.sample,
) -> list[int | ServiceError]:
    """Sample a token for each row of ``logits``. Like `choose`, without log probabilities."""
    return tokens_of(draw(logits, batch(params, positions, counts, banned)), positions)


def tokens_of(drawn: Drawn, positions: Sequence[int]) -> list[int | ServiceError]:
    """Returns the tokens that were drawn at ``positions``, or errors."""
    tokens: list[int | ServiceError] = drawn.tokens.tolist()
    for row, error in _errors(drawn, positions):
        tokens[row] = error
    return tokens


def choose(
    logits: Any,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    counts: Sequence[TokenCounts | None] | None = None,
    banned: Sequence[Iterable[int]] | None = None,
    draw: Drawer = reference.sample,
) -> list[Choice | ServiceError]:
    """Sample a token for each row of ``logits``, ``[n, vocab_size]``, a host or device array as ``draw`` takes it.

    ``positions[i]`` is the position of row i's new token; ``counts[i]`` its request's token counts, required with
    penalties; ``banned[i]`` tokens that row i must not sample now, such as stop tokens before ``min_tokens``. A result
    depends only on its row, parameters and position. A row with NaN or infinity gets ``ForwardFailed`` instead of a
    token, a row with every token banned ``FieldInvalid``.
    """
    return choices_of(draw(logits, batch(params, positions, counts, banned)), params, positions)


def choices_of(drawn: Drawn, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[Choice | ServiceError]:
    """Returns what was drawn at ``positions``, with log probabilities where ``params`` ask for them, or errors."""
    results: list[Choice | ServiceError] = [Choice(token) for token in drawn.tokens.tolist()]
    for row, p in enumerate(params):
        if p.logprobs is not None:
            ids, values = drawn.top_ids[row, : p.logprobs].tolist(), drawn.top_logprobs[row, : p.logprobs].tolist()
            top = tuple((token, value) for token, value in zip(ids, values, strict=True) if token >= 0)
            results[row] = Choice(int(drawn.tokens[row]), float(drawn.logprobs[row]), int(drawn.ranks[row]), top)
    for row, error in _errors(drawn, positions):
        results[row] = error
    return results


def _errors(drawn: Drawn, positions: Sequence[int]) -> Iterator[tuple[int, ServiceError]]:
    for row in drawn.errors.nonzero()[0].tolist():
        if drawn.errors[row] == launch.NOT_FINITE:
            yield row, ForwardFailed(f"the logits at position {positions[row]} contain NaN or infinity")
        else:
            yield row, FieldInvalid(f"every token is banned at position {positions[row]}", field="sampling")


def batch(
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    counts: Sequence[TokenCounts | None] | None = None,
    banned: Sequence[Iterable[int]] | None = None,
) -> Batch:
    """Returns the sampler's input arrays; arguments as for `choose`. Raises ValueError for penalties without counts."""
    records = [p.record for p in params]
    if banned is None and not any(p.changes_logits for p in params):
        return Batch.of(records, positions)
    entries = []
    for row, p in enumerate(params):
        barred = banned[row] if banned is not None else ()
        if not (p.changes_logits or barred):
            entries.append(_NO_ENTRIES)
            continue
        own = counts[row] if counts is not None and p.counts_tokens else None
        if own is None and p.counts_tokens:
            raise ValueError(f"row {row} has penalties but no token counts")
        prompt = p.repetition_penalty != 1
        entries.append(launch.entries(own, dict(p.logit_bias), barred, prompt))
    return Batch.of(records, positions, entries)
