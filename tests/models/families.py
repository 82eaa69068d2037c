"""A small random checkpoint of every family served, the same on every machine, for `references.npz` to be about.

The numbers are of NumPy's legacy generator, whose stream never changes, and take no function of a mathematical library:
they are equal wherever they are made, so that only what `transformers` computes with them is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT_TOKENS = 96
GREEDY_TOKENS = 64
LONG_TOKENS = 2000
#: Where the logits of a long prompt are kept.
LONG_POSITIONS = [999, 1499, 1999]
VOCAB = 128

_SHAPE: dict[str, Any] = {
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: What a configuration has changed for a long prompt.
LONG = {"max_position_embeddings": 4096}

#: Name -> ``config.json``. Between them: as many heads of K and V as of queries and fewer, heads that together are not
#: as wide as the model, tied and untied, and each kind of rotary embedding.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": _SHAPE
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4, "attention_bias": False},
    "llama3": _SHAPE
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
    | {"rope_theta": 500000.0, "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
    "own head": _SHAPE  # as some fine-tuned models have it: the configuration of a tied one, and a head all the same
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
    | {"tie_word_embeddings": True, "own_head": True},
    "linear": _SHAPE
    | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
    | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": _SHAPE
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    | {"head_dim": 24, "rope_theta": 1000000.0, "num_key_value_heads": 1},
    "qwen2": _SHAPE
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    | {"sliding_window": 128, "max_window_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
    | {"tie_word_embeddings": True},
    "qwen3": _SHAPE
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    | {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "rms_norm_eps": 1e-6}
    | {"head_dim": 32, "rope_theta": 1000000.0},
}
#: Chosen so that no greedy choice is a close one.
SEEDS = {"llama2": 1, "llama3": 1, "own head": 0, "linear": 0, "mistral": 0, "qwen2": 0, "qwen3": 4}


def family_tensors(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a checkpoint of ``config``, one of `FAMILIES`, float32, under its Hugging Face name."""
    random = np.random.RandomState(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def spread(around: float, width: float, *shape: int) -> NDArray[np.float32]:
        return (around + width * (2 * random.random_sample(shape) - 1)).astype(np.float32)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> NDArray[np.float32]:
        return spread(0.0, gain * (3.0 / inputs) ** 0.5, outputs, inputs)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": spread(1.0, 0.2, hidden),
            f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden, 2.0),  # attention that is not all but flat
            f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden, 2.0),
            f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries),
            f"{prefix}post_attention_layernorm.weight": spread(1.0, 0.2, hidden),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
        if config["model_type"] == "qwen2":
            sizes = {"q": queries, "k": keys, "v": keys}
            tensors |= {f"{prefix}self_attn.{part}_proj.bias": spread(0.0, 1.0, n) for part, n in sizes.items()}
        if config["model_type"] == "qwen3":
            tensors |= {f"{prefix}self_attn.{part}_norm.weight": spread(1.0, 0.5, dim) for part in ("q", "k")}
    tensors["model.norm.weight"] = spread(1.0, 0.2, hidden)
    if not config["tie_word_embeddings"] or config.get("own_head"):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return tensors


def long_prompt_of(seed: int) -> list[int]:
    """The long prompt of a reference."""
    return np.random.RandomState(2000 + seed).randint(0, VOCAB, LONG_TOKENS).tolist()


def prompt_of(seed: int) -> list[int]:
    """The prompt of a reference."""
    return np.random.RandomState(1000 + seed).randint(0, VOCAB, PROMPT_TOKENS).tolist()
