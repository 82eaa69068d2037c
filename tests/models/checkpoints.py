"""Small random Llama checkpoints, written as a Hugging Face folder holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def llama_config(
    *,
    hidden: int = 64,
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    vocab: int = 128,
    context: int = 512,
    tied: bool = True,
) -> dict[str, Any]:
    """A ``config.json``, as a dict."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a checkpoint of ``config``, float32, scaled so that activations neither vanish nor explode."""
    generator = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(outputs: int, inputs: int) -> NDArray[np.float32]:
        return generator.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)

    def gains() -> NDArray[np.float32]:
        return generator.normal(1, 0.1, hidden).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": gains()}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": gains(),
            f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden) * 2,  # attention that is not all but flat
            f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden) * 2,
            f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries),
            f"{prefix}post_attention_layernorm.weight": gains(),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, NDArray[np.float32]],
    *,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Write ``folder``, its tensors stored as ``dtype`` in one file or several with an index; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    names = list(stored)
    weight_map = dict[str, str]()
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: stored[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
