"""The decoder: one forward pass over a mixed batch of prompt chunks and single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels import ops_numpy as ops
from services.engine import weights
from services.engine.batch import Batch, Row
from services.engine.modelconfig import ModelConfig
from services.engine.pagesource import Geometry
from services.errors import ForwardFailed

F32: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; matrices are ``[outputs, inputs]``."""

    attention_norm: F32
    qkv: F32  # outputs: query heads, then key heads, then value heads
    output: F32
    mlp_norm: F32
    gate_up: F32  # outputs: gate, then up
    down: F32


class Model:
    """Weights and the forward pass. No state but the weights: K and V live in the caller's pages and nowhere else."""

    def __init__(self, config: ModelConfig, tensors: dict[str, F32]) -> None:
        """Take the tensors of `weights.load`, which checked them. They are copied, so the files may go."""
        self.config = config
        self.parameters = sum(tensor.size for tensor in tensors.values())
        self._embedding = np.array(tensors["model.embed_tokens.weight"])
        self._layers = [_layer(tensors, f"model.layers.{index}.") for index in range(config.layers)]
        self._norm = np.array(tensors["model.norm.weight"])
        self._head = self._embedding if config.tied_embeddings else np.array(tensors["lm_head.weight"])

    @classmethod
    def load(cls, folder: Path | str) -> Model:
        """Read the checkpoint in a Hugging Face ``folder``. Raises ``ModelInvalid``."""
        config = ModelConfig.from_folder(folder)
        return cls(config, weights.load(folder, config))

    def geometry(self, page_size: int) -> Geometry:
        """The pages this model needs, of ``page_size`` tokens."""
        return Geometry(page_size, self.config.layers, self.config.kv_heads, self.config.head_dim, "f32")

    def forward(self, rows: Sequence[Row], pages: F32) -> F32:
        """Run all tokens of ``rows`` and return the logits the rows ask for.

        ``pages`` is float32 ``[page, layer, (k, v), kv_head, slot, head_dim]``; K and V of every token are written to
        its row's pages. Returns float32 ``[rows with want_logits, vocab_size]``, of each such row's last token. A pure
        function of weights, rows and pages, in which no row influences another, bit for bit (see `kernels.ops_numpy`).
        Raises ``ForwardFailed`` for a row or an arena that does not fit the model.
        """
        config = self.config
        pages = np.asarray(pages)  # a memory map would make every index below slower
        if pages.dtype != np.float32 or pages.ndim != 6 or not pages.flags.c_contiguous:
            raise ForwardFailed(f"pages are not a contiguous float32 array of 6 dimensions but {pages.dtype}")
        total_pages, page_size = pages.shape[0], pages.shape[4]
        if pages.shape[1:] != (config.layers, 2, config.kv_heads, page_size, config.head_dim):
            raise ForwardFailed(f"pages of shape {list(pages.shape)} do not fit the model")
        if not rows:
            return np.empty((0, config.vocab_size), np.float32)
        batch = Batch.build(rows, page_size, total_pages, config.vocab_size, config.max_context)
        cosine, sine = ops.rope_angles(batch.positions, config.head_dim, config.rope_theta)
        plan = ops.attention_plan(batch.block_tables, batch.starts, batch.lengths, pages, config.query_heads)

        total = self._embedding[batch.tokens]
        change: F32 | None = None  # what the block before adds to the residual stream
        for index, layer in enumerate(self._layers):
            normed, total = ops.rms_norm(total, layer.attention_norm, config.rms_norm_eps, change)
            q, k, v = self._project(normed, layer, cosine, sine)
            ops.write_kv(k, v, pages, index, batch.page, batch.slot)
            if index == config.layers - 1 and len(batch.wanted) < len(total):
                # Of the last layer only K and V are needed, but for the tokens whose logits are wanted.
                q, total = q[batch.wanted], total[batch.wanted]
                ends, ones = batch.positions[batch.wanted], np.ones(len(batch.wanted), np.int64)
                plan = ops.attention_plan(batch.block_tables[batch.asking], ends, ones, pages, config.query_heads)
            attended = ops.paged_attention(q, pages, index, plan, config.head_dim**-0.5)
            change = ops.linear(attended.reshape(len(q), config.query_heads * config.head_dim), layer.output)
            normed, total = ops.rms_norm(total, layer.mlp_norm, config.rms_norm_eps, change)
            change = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
        normed, _ = ops.rms_norm(total, self._norm, config.rms_norm_eps, change)
        return ops.linear(normed, self._head)

    def _project(self, x: F32, layer: _Layer, cosine: F32, sine: F32) -> tuple[F32, F32, F32]:
        """Queries, keys and values ``[n, heads, head_dim]`` of ``x`` ``[n, hidden]``, the first two rotated."""
        query_heads, key_heads = self.config.query_heads, self.config.kv_heads
        qkv = ops.linear(x, layer.qkv).reshape(len(x), -1, self.config.head_dim)
        rotated = ops.rope(qkv[:, : query_heads + key_heads], cosine, sine)
        return rotated[:, :query_heads], rotated[:, query_heads:], qkv[:, query_heads + key_heads :]


def _layer(tensors: dict[str, F32], prefix: str) -> _Layer:
    def matrix(*names: str) -> F32:
        """Join matrices ``[outputs, inputs]`` along their outputs, for one product instead of several."""
        return np.concatenate([tensors[f"{prefix}{name}_proj.weight"] for name in names])

    return _Layer(
        attention_norm=np.array(tensors[f"{prefix}input_layernorm.weight"]),
        qkv=matrix("self_attn.q", "self_attn.k", "self_attn.v"),
        output=matrix("self_attn.o"),
        mlp_norm=np.array(tensors[f"{prefix}post_attention_layernorm.weight"]),
        gate_up=matrix("mlp.gate", "mlp.up"),
        down=matrix("mlp.down"),
    )
