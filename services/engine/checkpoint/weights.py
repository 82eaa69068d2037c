"""A checkpoint's tensors by name, checked against its configuration; each is still in its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.tensor import StoredTensor

log = structlog.get_logger()

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Weights(Mapping[str, StoredTensor]):
    """Every tensor of a model under its Hugging Face name, in the order that the decoder reads them.

    ``tied`` says whether the embedding is also the output matrix; then there is no `HEAD`. The files decide, as in
    ``transformers``: a model may be configured as tied although its files have a separate head.
    """

    def __init__(self, path: Path, config: ModelConfig, found: Mapping[str, StoredTensor]) -> None:
        """Check the tensors ``found`` at ``path``.

        Rotary frequencies, which follow from the configuration, and a head equal to the embedding are ignored. A tied
        model may have its matrix under the head's name. Raises ``ModelInvalid`` naming the tensor when one is missing,
        unexpected, or has a shape other than that of ``config``.
        """
        self.path = path
        if config.tied_embeddings and HEAD in found and EMBEDDING not in found:
            found = {EMBEDDING if name == HEAD else name: tensor for name, tensor in found.items()}
        expected = shapes(config)
        if HEAD in found:
            expected[HEAD] = expected[EMBEDDING]
        for name, tensor in found.items():
            if name.endswith(".rotary_emb.inv_freq"):
                continue
            if name not in expected:
                raise ModelInvalid(f"{tensor.file}: unexpected tensor {tensor.name[:100]}")
            if tensor.shape != expected[name]:
                raise ModelInvalid(
                    f"{tensor.file}: tensor {tensor.name[:100]} has shape {list(tensor.shape)}; "
                    f"the configuration requires {list(expected[name])}"
                )
        if missing := [name for name in expected if name not in found]:
            raise ModelInvalid(f"{path}: missing {len(missing)} tensors, the first {missing[0]}")
        self.tied = HEAD not in found or found[HEAD].equals(found[EMBEDDING])
        if config.tied_embeddings and not self.tied:
            log.warning("head_not_tied", model=str(path), tie_word_embeddings=True, used=HEAD)
        self._tensors = {name: found[name] for name in expected if not (name == HEAD and self.tied)}

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def parameters(self) -> int:
        """The number of values in all tensors."""
        return sum(tensor.size for tensor in self.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in their files."""
        return sum(tensor.stored_bytes for tensor in self.values())


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor that ``config`` requires; matrices are ``[outputs, inputs]``.

    A tied model's head is not included.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    every_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        widths = {"q": queries, "k": keys, "v": keys}
        every_layer |= {f"self_attn.{part}_proj.bias": (width,) for part, width in widths.items()}
    if config.qk_norm:
        every_layer |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in ("q", "k")}
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.layers):
        found.update({f"model.layers.{layer}.{name}": shape for name, shape in every_layer.items()})
    found["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        found[HEAD] = (config.vocab_size, hidden)
    return found
