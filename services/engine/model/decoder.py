"""The decoder: one forward pass over a mixed batch of prompt chunks and single tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels import ops_numpy
from kernels.ops import Ops
from services.common.errors import ForwardFailed, ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.rope import frequencies
from services.engine.checkpoint.weights import EMBEDDING, HEAD
from services.engine.model.batch import Batch, Row
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.loading import Loading
from services.engine.pages.source import PageLayout

#: The approximate number of logits in memory at a time when many tokens want them: 256 MB.
MOST_LOGITS = 1 << 26


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, as the backend has them; matrices are ``[outputs, inputs]``."""

    attention_norm: Any
    qkv: Any  # outputs: query heads, then key heads, then value heads
    qkv_bias: Any | None
    qk_norms: tuple[Any, Any] | None  # for query heads, and for key heads
    output: Any
    mlp_norm: Any
    gate_up: Any  # outputs: gate, then up
    down: Any


@dataclass(slots=True)
class _Step:
    """A batch in the form that the layers take. ``wanted`` and ``last_plan`` are set when the last layer computes only
    the tokens whose logits are wanted.
    """

    tokens: Any
    places: Any
    angles: Any
    plan: Any
    count: int  # number of tokens whose logits are wanted
    wanted: Any = None
    last_plan: Any = None


class Model:
    """Weights and the forward pass. The weights are its only state: K and V are kept only in the caller's pages.

    ``ops`` are the backend's operations; ``dtype`` of weights and activations is a name such as ``f32``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops = ops_numpy,
        dtype: str = "f32",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the weights one by one: none is in memory twice, and the files are not needed afterwards.

        Raises ``ModelInvalid``, also when a weight does not fit ``dtype``; MemoryError when there is not enough memory.
        """
        self.config = config = checkpoint.config
        weights = checkpoint.weights()
        self.parameters = weights.parameters
        self._ops = ops
        self._weights = object()  # identifies this model's weights
        loading = Loading(weights, clock)

        def weight(*names: str) -> Any:
            return ops.weight(loading.take(*names, dtype=dtype), dtype)

        try:
            self._embedding = weight(EMBEDDING)
            self._layers = [_layer(weight, config, f"model.layers.{index}.") for index in range(config.layers)]
            self._norm = weight("model.norm.weight")
            self._head = self._embedding if weights.tied else weight(HEAD)
        except ValueError as error:
            raise ModelInvalid(f"{checkpoint.path}: {error}") from error
        loading.end()
        scaled = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._rope_table = ops.rope_table(scaled, config.max_context)

    @classmethod
    def load(cls, path: Path | str, ops: Ops = ops_numpy, dtype: str = "f32") -> Model:
        """Read the checkpoint at ``path``, a Hugging Face folder or a GGUF file; raises as the constructor does."""
        return cls(Checkpoint.open(path), ops, dtype)

    def geometry(self, page_size: int, dtype: str = "f32") -> PageLayout:
        """Returns the page geometry of this model, with ``page_size`` tokens per page and K and V of ``dtype``."""
        return PageLayout(page_size, self.config.layers, self.config.kv_heads, self.config.head_dim, dtype)

    def forward(self, rows: Sequence[Row], pages: Any, drawn: Any = None) -> Any:
        """Compute all tokens of ``rows`` and return the logits that the rows want.

        ``drawn``, needed if a row's token is `Row`'s ``-1 - row``, has what the sampler drew in the step before: int32,
        on the device of the backend, where it may still be computed.
        ``pages`` is the arena, ``[page, layer, (k, v), kv_head, slot, head_dim]``, as the backend takes it; K and V of
        every token are written to its row's pages. Returns float32 ``[sum of want_logits, vocab_size]``, row by row, in
        a backend array that is valid until the next call. A pure function of weights, rows and pages; on NumPy rows are
        bitwise independent of each other (see `kernels.ops_numpy`). Raises ``ForwardFailed`` for a row or an arena that
        does not fit the model.
        """
        return self.logits(self.states(rows, pages, drawn))

    @property
    def logits_at_once(self) -> int:
        """The most states that `logits` should be called with at a time."""
        return max(1, MOST_LOGITS // self.config.vocab_size)

    def logits(self, states: Any) -> Any:
        """Returns the logits, float32 ``[n, vocab_size]``, of n consecutive `states`."""
        if not len(states):
            return np.empty((0, self.config.vocab_size), np.float32)  # a sampler does not read it
        return self._ops.linear(states, self._head, widen=True)

    def copy_page(self, pages: Any, source: int, target: int) -> None:
        """Make page ``target`` of the arena equal to page ``source``. Raises ``ForwardFailed`` as `forward` does."""
        pages = self._fitted(pages)
        total_pages, _ = self._ops.extent(pages)
        if not (0 <= source < total_pages and 0 <= target < total_pages):
            raise ForwardFailed(f"page {source} cannot be copied to page {target}: the arena has {total_pages} pages")
        self._ops.copy_page(pages, source, target)

    def _fitted(self, pages: Any) -> Any:
        config = self.config
        try:
            return self._ops.fitted(pages, config.layers, config.kv_heads, config.head_dim)
        except ValueError as error:
            raise ForwardFailed(str(error)) from error

    def states(self, rows: Sequence[Row], pages: Any, drawn: Any = None) -> Any:
        """Like `forward`, but return the final hidden states for `logits`: ``[sum of want_logits, hidden_size]``."""
        config, ops = self.config, self._ops
        pages = self._fitted(pages)
        total_pages, page_size = ops.extent(pages)
        if not rows:
            return np.empty((0, config.hidden_size), np.float32)
        known = 0 if drawn is None else len(drawn)
        batch = Batch.build(rows, page_size, total_pages, config.vocab_size, config.max_context, known)
        step = self._prepared(batch, pages, drawn)
        states = ops.computed(lambda: self._computed(step, pages), pages, (self._weights, step.count > 0))
        return states if len(states) == len(batch.wanted) else states[: len(batch.wanted)]

    def _prepared(self, batch: Batch, pages: Any, drawn: Any) -> _Step:
        """Prepare a batch's inputs to the layers."""
        step = self._planned(batch, pages)
        if drawn is not None:
            step.tokens = self._ops.fill_drawn(step.tokens, drawn)
        return step

    def _planned(self, batch: Batch, pages: Any) -> _Step:
        config, ops = self.config, self._ops
        every = len(batch.wanted) == len(batch.tokens)
        with ops.step(batch.lengths):
            places = ops.places(batch.page, batch.slot)
            angles = ops.rotation(self._rope_table, batch.positions)
            plan = ops.attention_plan(batch.block_tables, batch.starts, batch.lengths, pages, config.query_heads)
            tokens = ops.indices(batch.tokens)
            if every or not len(batch.wanted):
                return _Step(tokens, places, angles, plan, len(batch.wanted))
            # The last layer computes K and V of every token, but the rest only for tokens whose logits are wanted.
            wanted = ops.indices(batch.wanted)
            firsts = batch.positions[batch.wanted[np.cumsum(batch.asked) - batch.asked]]
            tables = batch.block_tables[batch.asking]
            last_plan = ops.attention_plan(tables, firsts, batch.asked, pages, config.query_heads)
            return _Step(tokens, places, angles, plan, len(batch.wanted), wanted, last_plan)

    def _computed(self, step: _Step, pages: Any) -> Any:
        """Run the layers and the final norm. Returns the states of the wanted tokens."""
        config, ops, plan = self.config, self._ops, step.plan
        total = ops.take(self._embedding, step.tokens)
        change: Any = None  # what the previous block adds to the residual stream
        for index, layer in enumerate(self._layers):
            qkv, total = ops.norm_linear(total, layer.attention_norm, config.rms_norm_eps, layer.qkv, change)
            q = ops.rope_write_kv(
                qkv.reshape(len(qkv), -1, config.head_dim), step.angles, pages, index, step.places, config.query_heads,
                layer.qkv_bias, layer.qk_norms, config.rms_norm_eps,
            )  # fmt: skip
            if index == config.layers - 1 and not step.count:
                return np.empty((0, config.hidden_size), np.float32)
            if index == config.layers - 1 and step.wanted is not None:
                q, total, plan = ops.take(q, step.wanted), ops.take(total, step.wanted), step.last_plan
            attended = ops.paged_attention(q, pages, index, plan, config.head_dim**-0.5)
            change = ops.linear(attended.reshape(len(q), config.query_heads * config.head_dim), layer.output)
            gated, total = ops.norm_gated(total, layer.mlp_norm, config.rms_norm_eps, layer.gate_up, change)
            change = ops.linear(gated, layer.down)
        normed, _ = ops.rms_norm(total, self._norm, config.rms_norm_eps, change)
        return normed


def _layer(weight: Callable[..., Any], config: ModelConfig, prefix: str) -> _Layer:
    def joined(what: str, *names: str) -> Any:
        """Concatenate along the outputs, to compute one product instead of several."""
        return weight(*(f"{prefix}{name}.{what}" for name in names))

    qkv = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
    norms = (joined("weight", "self_attn.q_norm"), joined("weight", "self_attn.k_norm")) if config.qk_norm else None
    return _Layer(
        attention_norm=joined("weight", "input_layernorm"),
        qkv=joined("weight", *qkv),
        qkv_bias=joined("bias", *qkv) if config.qkv_bias else None,
        qk_norms=norms,
        output=joined("weight", "self_attn.o_proj"),
        mlp_norm=joined("weight", "post_attention_layernorm"),
        gate_up=joined("weight", "mlp.gate_proj", "mlp.up_proj"),
        down=joined("weight", "mlp.down_proj"),
    )
