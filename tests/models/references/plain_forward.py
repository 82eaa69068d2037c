"""The decoders served, written down as plainly as it goes, to check the engine: no pages, no tiles, no code of its own.

One sequence, contiguous K and V, float64 throughout but for the rotary angles: these are float32 at every operation, as
the models are trained with, and as they stay in `transformers` whatever the type of all else. Weights come from a
folder, read by the safetensors library, or as arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  the safetensors library finds bfloat16 only once this was imported
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

F64: TypeAlias = NDArray[np.float64]


def read_folder(folder: Path | str) -> tuple[dict[str, Any], dict[str, F64]]:
    """Return the parsed ``config.json`` and every tensor of every safetensors file in ``folder``."""
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            tensors.update({name: opened.get_tensor(name).astype(np.float64) for name in opened.keys()})  # noqa: SIM118
    return config, tensors


def frequencies(config: Mapping[str, Any], dim: int) -> NDArray[np.float32]:
    """The angle that each pair of components turns by from one position to the next, ``[dim / 2]``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    f = np.float32
    plain = []
    for i in range(0, dim, 2):
        frequency = f(1) / f(float(f(theta)) ** float(f(i) / f(dim)))
        if kind == "linear":
            frequency = frequency / f(rope["factor"])
        elif kind == "llama3":
            low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], f(rope["factor"])
            original = rope["original_max_position_embeddings"]
            length = f(1) / frequency * f(2 * np.pi)
            if length > f(original / low):
                frequency = frequency / factor
            elif length >= f(original / high):
                kept = (f(1) / length * f(original) - f(low)) / f(high - low)
                frequency = (f(1) - kept) * frequency / factor + kept * frequency
        plain.append(frequency)
    return np.array(plain, np.float32)


def forward(
    model: Path | str | tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]], token_ids: Sequence[int]
) -> tuple[F64, list[F64], list[F64]]:
    """Run a checkpoint, a folder or (config, tensors), over ``token_ids`` from position 0 on.

    Returns logits ``[n, vocab]`` of every position, and for each layer K, after the rotary embedding, and V,
    ``[n, kv_heads, head_dim]``, all float64.
    """
    config, tensors = read_folder(model) if isinstance(model, Path | str) else model
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    query_heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", query_heads)
    dim = config.get("head_dim") or config["hidden_size"] // query_heads
    n = len(token_ids)

    def norm(x: F64, name: str) -> F64:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    angles = np.outer(np.arange(n, dtype=np.float32), frequencies(config, dim)).astype(np.float64)

    def rotate(x: F64) -> F64:
        turned = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
        turned = turned * np.exp(1j * angles)[:, None, :]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    hidden = weights["model.embed_tokens.weight"][list(token_ids)]
    all_k, all_v = [], []
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."

        def project(x: F64, name: str, prefix: str = prefix) -> F64:
            return x @ weights[f"{prefix}{name}.weight"].T + weights.get(f"{prefix}{name}.bias", np.zeros(1))

        def heads(x: F64, part: str, count: int, prefix: str = prefix) -> F64:
            projected = project(x, f"self_attn.{part}_proj").reshape(n, count, dim)
            name = f"{prefix}self_attn.{part}_norm.weight"
            return norm(projected, name) if name in weights else projected

        x = norm(hidden, f"{prefix}input_layernorm.weight")
        q, k, v = rotate(heads(x, "q", query_heads)), rotate(heads(x, "k", kv_heads)), heads(x, "v", kv_heads)
        attended = np.empty((n, query_heads, dim))
        for head in range(query_heads):
            shared = head * kv_heads // query_heads
            scores = q[:, head] @ k[:, shared].T / np.sqrt(dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended[:, head] = chances / chances.sum(axis=1, keepdims=True) @ v[:, shared]
        hidden = hidden + project(attended.reshape(n, -1), "self_attn.o_proj")
        x = norm(hidden, f"{prefix}post_attention_layernorm.weight")
        gate = project(x, "mlp.gate_proj")
        hidden = hidden + project(gate / (1 + np.exp(-gate)) * project(x, "mlp.up_proj"), "mlp.down_proj")
        all_k.append(k)
        all_v.append(v)
    head_name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    return norm(hidden, "model.norm.weight") @ weights[head_name].T, all_k, all_v
