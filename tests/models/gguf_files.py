"""Checkpoints of `families.py` as GGUF files, written by the `gguf` package the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Where a block of a K type has a float16 that all of it is multiplied by, and how large that may be.
SCALES = {
    Kind.Q4_K: {0: 0.0003, 2: 0.002},
    Kind.Q5_K: {0: 0.00015, 2: 0.002},
    Kind.Q6_K: {208: 0.00004},
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """What a Hugging Face tensor is called."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{kind}"


def paired(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """`permute` of llama.cpp's convert_hf_to_gguf.py: rows of a head in pairs that turn together."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model, but for its tokenizer."""
    arch = ARCHITECTURES[config["model_type"]]
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    return {"tokenizer.ggml.bos_token_id": config["bos_token_id"]} | {f"{arch}.{key}": v for key, v in keys.items()}


def rope_factors(config: dict[str, Any]) -> NDArray[np.float32] | None:
    """The tensor that Llama 3's scaling is, as the converter makes it (`generate_extra_tensors`)."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    dim, factors = config["head_dim"], []
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    for frequency in 1.0 / config["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        length = 2 * np.pi / frequency
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def rows_of(tensor: NDArray[np.float32], kind: Kind) -> NDArray[Any]:
    """A matrix's rows as ``kind``. Nobody writes the K types in Python: of those, random bits with scales that suit."""
    if kind not in SCALES:
        return quantize(tensor, kind)
    values, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(tensor.size)
    blocks = random.integers(0, 256, (tensor.size // values, size)).astype(np.uint8)
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = (scale * random.uniform(0.5, 1, (len(blocks), 1))).astype(np.float16).view(np.uint8)
    return blocks.reshape(len(tensor), -1)


def write_gguf(
    file: Path,
    config: dict[str, Any],
    tensors: dict[str, NDArray[np.float32]],
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    **split: Any,
) -> dict[str, NDArray[np.float32]]:
    """Write a file, its matrices as ``kind``, with ``metadata`` over that of the model; None leaves a key out.

    With ``split``, what GGUFWriter takes to write several files, their names are made of that of ``file``.
    Returns the tensors as they are after that, under their Hugging Face names.
    """
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]], **split)
    for key, value in (metadata_of(config) | (metadata or {})).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    kept = {}
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        plain = tensor.ndim == 1 or kind is Kind.F32
        # Rows are quantised one by one, so that their order changes nothing.
        stored = tensor if plain else rows_of(tensor, kind)
        kept[name] = tensor if plain else dequantize(stored, kind)
        part = ".".join(name.split(".")[-2:])
        if ARCHITECTURES[config["model_type"]] == "llama" and part in heads:
            stored = paired(stored, heads[part])
        writer.add_tensor(gguf_name(name), stored, raw_dtype=None if plain else kind)
    if (factors := rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept
