"""The decoder: one forward pass over a mixed batch of prompt chunks and single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels import ops_numpy
from kernels.ops import Ops
from services.engine import weights
from services.engine.batch import Batch, Row
from services.engine.modelconfig import ModelConfig
from services.engine.pagesource import Geometry
from services.errors import ForwardFailed, ModelInvalid

F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, as the backend has them; matrices are ``[outputs, inputs]``."""

    attention_norm: Any
    qkv: Any  # outputs: query heads, then key heads, then value heads
    output: Any
    mlp_norm: Any
    gate_up: Any  # outputs: gate, then up
    down: Any


class Model:
    """Weights and the forward pass. No state but the weights: K and V live in the caller's pages and nowhere else.

    ``ops`` is the backend that computes, with weights and activations of ``dtype``, a name such as ``f32``.
    """

    def __init__(self, config: ModelConfig, tensors: dict[str, F32], ops: Ops = ops_numpy, dtype: str = "f32") -> None:
        """Take the tensors of `weights.load`, which checked them. They are copied, so the files may go."""
        self.config = config
        self.parameters = sum(tensor.size for tensor in tensors.values())
        self._ops = ops
        self._embedding = ops.weight(tensors["model.embed_tokens.weight"], dtype)
        self._layers = [_layer(ops, dtype, tensors, f"model.layers.{index}.") for index in range(config.layers)]
        self._norm = ops.weight(tensors["model.norm.weight"], dtype)
        frequencies = ops_numpy.rope_frequencies(config.head_dim, config.rope_theta)
        self._rope_table = ops.rope_table(frequencies, config.max_context)
        self._head = self._embedding if config.tied_embeddings else ops.weight(tensors["lm_head.weight"], dtype)

    @classmethod
    def load(cls, folder: Path | str, ops: Ops = ops_numpy, dtype: str = "f32") -> Model:
        """Read the checkpoint in a Hugging Face ``folder``.

        Raises ``ModelInvalid``, also when a weight does not fit ``dtype``; MemoryError when there is no room for them.
        """
        config = ModelConfig.from_folder(folder)
        tensors = weights.load(folder, config)
        try:
            return cls(config, tensors, ops, dtype)
        except ValueError as error:
            raise ModelInvalid(f"{folder}: {error}") from error

    def geometry(self, page_size: int, dtype: str = "f32") -> Geometry:
        """The pages this model needs, of ``page_size`` tokens, K and V of ``dtype``."""
        return Geometry(page_size, self.config.layers, self.config.kv_heads, self.config.head_dim, dtype)

    def forward(self, rows: Sequence[Row], pages: Any) -> Any:
        """Run all tokens of ``rows`` and return the logits the rows ask for.

        ``pages`` is the arena, ``[page, layer, (k, v), kv_head, slot, head_dim]``, as the backend takes it; K and V of
        every token are written to its row's pages. Returns float32 ``[rows with want_logits, vocab_size]``, of each
        such row's last token, an array of the backend. A pure function of weights, rows and pages; on NumPy no row
        influences another, bit for bit (see `kernels.ops_numpy`). Raises ``ForwardFailed`` for a row or an arena that
        does not fit the model.
        """
        config, ops = self.config, self._ops
        try:
            pages = ops.fitted(pages, config.layers, config.kv_heads, config.head_dim)
        except ValueError as error:
            raise ForwardFailed(str(error)) from error
        total_pages, page_size = ops.extent(pages)
        if not rows:
            return np.empty((0, config.vocab_size), np.float32)  # nothing that a sampler would look at
        batch = Batch.build(rows, page_size, total_pages, config.vocab_size, config.max_context)
        places = ops.places(batch.page, batch.slot)
        angles = ops.rotation(self._rope_table, batch.positions)
        plan = ops.attention_plan(batch.block_tables, batch.starts, batch.lengths, pages, config.query_heads)

        total = ops.take(self._embedding, ops.indices(batch.tokens))
        change: Any = None  # what the block before adds to the residual stream
        for index, layer in enumerate(self._layers):
            normed, total = ops.rms_norm(total, layer.attention_norm, config.rms_norm_eps, change)
            qkv = ops.linear(normed, layer.qkv).reshape(len(normed), -1, config.head_dim)
            q = ops.rope_write_kv(qkv, angles, pages, index, places, config.query_heads)
            if index == config.layers - 1 and not len(batch.wanted):
                break
            if index == config.layers - 1 and len(batch.wanted) < len(total):
                # Of the last layer only K and V are needed, but for the tokens whose logits are wanted.
                wanted = ops.indices(batch.wanted)
                q, total = ops.take(q, wanted), ops.take(total, wanted)
                ends, ones = batch.positions[batch.wanted], np.ones(len(batch.wanted), np.int64)
                plan = ops.attention_plan(batch.block_tables[batch.asking], ends, ones, pages, config.query_heads)
            attended = ops.paged_attention(q, pages, index, plan, config.head_dim**-0.5)
            change = ops.linear(attended.reshape(len(q), config.query_heads * config.head_dim), layer.output)
            normed, total = ops.rms_norm(total, layer.mlp_norm, config.rms_norm_eps, change)
            change = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
        if not len(batch.wanted):
            return np.empty((0, config.vocab_size), np.float32)
        normed, _ = ops.rms_norm(total, self._norm, config.rms_norm_eps, change)
        return ops.linear(normed, self._head, widen=True)


def _layer(ops: Ops, dtype: str, tensors: dict[str, F32], prefix: str) -> _Layer:
    def matrix(*names: str) -> Any:
        """Join matrices ``[outputs, inputs]`` along their outputs, for one product instead of several."""
        return ops.weight(np.concatenate([tensors[f"{prefix}{name}_proj.weight"] for name in names]), dtype)

    return _Layer(
        attention_norm=ops.weight(tensors[f"{prefix}input_layernorm.weight"], dtype),
        qkv=matrix("self_attn.q", "self_attn.k", "self_attn.v"),
        output=matrix("self_attn.o"),
        mlp_norm=ops.weight(tensors[f"{prefix}post_attention_layernorm.weight"], dtype),
        gate_up=matrix("mlp.gate", "mlp.up"),
        down=matrix("mlp.down"),
    )
