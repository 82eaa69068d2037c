"""Maps GGUF models to a ModelConfig and to Hugging Face tensor names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import ModelInvalid
from services.engine.checkpoint import sampling_defaults
from services.engine.checkpoint.config import MOST_LAYERS, ModelConfig, served_context
from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.header import GgufFile
from services.engine.checkpoint.gguf.vocabulary import ending_ids, named_ids
from services.engine.checkpoint.rope import Divisors, Linear, Scaling
from services.engine.checkpoint.tensor import F16, F32, StoredTensor

#: general.architecture -> decoder; Mistral models are stored as llama.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_EMBEDDING, _HEAD, _ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
_NAMES = {_EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", _HEAD: "lm_head.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MOST_HEAD_DIM = 1 << 12


def config_of(file: GgufFile, max_context: int | None = None) -> ModelConfig:
    """Returns the model's configuration from the metadata; ``max_context`` lowers its context.

    Raises ``ModelInvalid`` naming the file, the key and its value when a key is missing, malformed, or requires
    something that this decoder does not support.
    """
    keys = Fields(file.path, file.metadata)
    arch = keys.values.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        keys.refuse("general.architecture", f"it must be one of {', '.join(ARCHITECTURES)}")
    keys.require(f"{arch}.expert_count", 0, default=0)
    hidden = keys.integer(f"{arch}.embedding_length")
    query_heads = keys.integer(f"{arch}.attention.head_count")
    kv_heads = keys.integer(f"{arch}.attention.head_count_kv", default=query_heads)
    if query_heads % kv_heads:
        keys.refuse(f"{arch}.attention.head_count_kv", f"it must divide attention.head_count, {query_heads}")
    length = f"{arch}.attention.key_length"
    if not keys.has(length) and hidden % query_heads:
        keys.refuse(f"{arch}.attention.head_count", f"without key_length it must divide embedding_length, {hidden}")
    head_dim = keys.integer(length, most=_MOST_HEAD_DIM, default=hidden // query_heads)
    if head_dim % 2:
        keys.refuse(length, "it must be even for rotary embeddings")
    for same in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        keys.require(same, head_dim, default=head_dim)
    vocab = _vocab(file, keys, arch)
    window_key = f"{arch}.attention.sliding_window"
    window = keys.integer(window_key, least=0, default=0) or None
    bos = named_ids(keys, "bos", vocab)
    return ModelConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=vocab,
        hidden_size=hidden,
        layers=keys.integer(f"{arch}.block_count", most=MOST_LAYERS),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.integer(f"{arch}.feed_forward_length"),
        max_context=served_context(keys, window_key, keys.integer(f"{arch}.context_length"), window, max_context),
        rope_theta=keys.number(f"{arch}.rope.freq_base", 1.0, 1e12, default=10000.0),
        rms_norm_eps=keys.number(f"{arch}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        tied_embeddings=_HEAD not in file.tensors,
        eos_token_ids=ending_ids(keys, vocab),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(file),
        rope_scaling=_scaling(file, keys, arch, head_dim),
        **sampling_defaults.of_gguf(keys),
    )


def tensors_of(file: GgufFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns the file's tensors under their Hugging Face names; a tensor without one keeps its GGUF name.

    In llama files the rows of each q and k head are stored as interleaved rotary pairs, because ggml rotates adjacent
    components for this architecture (`permute` in llama.cpp's convert_hf_to_gguf.py).
    """
    pairs = {"attn_q": config.query_heads, "attn_k": config.kv_heads}
    found = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE:
            continue
        layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)", name)
        if layer and layer[2] in _IN_LAYER:
            if config.architecture == ARCHITECTURES["llama"] and layer[2] in pairs:
                if len(tensor.shape) != 2 or tensor.shape[0] != pairs[layer[2]] * config.head_dim:
                    raise ModelInvalid(
                        f"{file.path}: tensor {name} has shape {list(tensor.shape)}, "
                        f"not {pairs[layer[2]]} heads of {config.head_dim}"
                    )
                tensor = replace(tensor, paired_heads=pairs[layer[2]])
            found[f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"] = tensor
        else:
            found[_NAMES.get(name, name)] = tensor
    return found


def _vocab(file: GgufFile, keys: Fields, arch: str) -> int:
    """Returns the vocabulary size, from the embedding's shape; the metadata key for it is optional."""
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelInvalid(f"{file.path}: missing tensor {_EMBEDDING}, a matrix")
    vocab = embedding.shape[0]
    keys.require(f"{arch}.vocab_size", vocab, default=vocab)
    return vocab


def _dtype(file: GgufFile) -> str:
    """Returns the dtype of the matrices. For quantized ones it is bf16, in which these model families were trained."""
    stored = {tensor.encoding.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({F32.name}): "f32", frozenset({F16.name}): "f16"}.get(frozenset(stored), "bf16")


def _scaling(file: GgufFile, keys: Fields, arch: str, head_dim: int) -> Scaling | None:
    kind_key = f"{arch}.rope.scaling.type"
    kind: Any = keys.values.get(kind_key, "linear")
    if kind not in ("none", "linear"):
        keys.refuse(kind_key, "it must be none or linear; Llama 3 scaling is stored as a tensor")
    older = f"{arch}.rope.scale_linear"
    factor = keys.number(f"{arch}.rope.scaling.factor", 0.0, 1e6, default=keys.number(older, 0.0, 1e6, default=1.0))
    if kind == "none" or factor == 0.0:
        factor = 1.0
    tensor = file.tensors.get(_ROPE)
    if tensor is None:
        return None if factor == 1.0 else Linear(factor)
    if tensor.shape != (head_dim // 2,) or tensor.encoding is not F32 or factor != 1.0:
        raise ModelInvalid(
            f"{file.path}: tensor {_ROPE} must have {head_dim // 2} F32 values, and no other scaling may be set"
        )
    divisors = np.empty(tensor.shape, np.float32)
    tensor.read_into(divisors)
    if not (divisors > 0).all():
        raise ModelInvalid(f"{file.path}: tensor {_ROPE} has a divisor that is not positive")
    return Divisors(tuple(divisors.tolist()))


def is_gguf(path: Path) -> bool:
    """Whether ``path`` names a GGUF file rather than a folder."""
    return path.suffix == ".gguf" or path.is_file()
