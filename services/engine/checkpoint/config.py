"""A model's configuration, from a Hugging Face folder's ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ModelInvalid
from services.engine.checkpoint import sampling_defaults
from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.rope import Linear, Llama3, Scaling

#: More than any model has. Bounds the memory for tensor names.
MOST_LAYERS = 1024
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture's decoder variant, and the defaults that ``transformers`` uses for missing keys."""

    qkv_bias: bool = False
    qk_norm: bool = False
    max_context: int = 32768
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / query heads
    sliding_window: int | None = None


FAMILIES = {
    "LlamaForCausalLM": Family(max_context=2048),
    "MistralForCausalLM": Family(max_context=131072, kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, kv_heads=32, sliding_window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, kv_heads=32, head_dim=128, sliding_window=4096),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The decoder's configuration. ``default_*`` is ``None`` where the model sets no default."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool  # as configured; `Weights.tied` is the truth
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    #: The dtype that the weights were trained or published in: f32, f16 or bf16.
    dtype: str = "f32"
    default_temperature: float | None = None
    default_top_k: int | None = None
    default_top_p: float | None = None
    default_min_p: float | None = None
    default_repetition_penalty: float | None = None
    #: Tokens that are never sampled, and tokens that are never sampled as the first one.
    suppressed_tokens: tuple[int, ...] = ()
    begin_suppressed_tokens: tuple[int, ...] = ()
    #: Unsupported sampling settings in the model's files, as (key, value), for a warning.
    unserved_sampling: tuple[tuple[str, Any], ...] = ()
    rope_scaling: Scaling | None = None

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return FAMILIES[self.architecture].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalized."""
        return FAMILIES[self.architecture].qk_norm

    @classmethod
    def from_folder(cls, path: Path | str, max_context: int | None = None) -> ModelConfig:
        """Read and validate the folder's configuration; ``max_context`` lowers the model's context.

        Raises ``ModelInvalid`` naming the file, the key and its value when a key is missing, malformed, or requires
        something that this decoder does not support.
        """
        folder = Path(path)
        config = Fields.of(folder / "config.json")
        generation = sampling_defaults.generation_fields(folder, config)

        architectures = config.values.get("architectures")
        if not (isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in (*FAMILIES,)):
            config.refuse("architectures", f"it must be one of {', '.join(FAMILIES)}")
        family = FAMILIES[architectures[0]]
        # Each of these changes the computation; ignoring one would change the model's output.
        config.require("hidden_act", "silu", default="silu")
        if not family.qkv_bias:
            config.require("attention_bias", False, default=False)
        config.require("mlp_bias", False, default=False)
        config.require("partial_rotary_factor", 1, default=1)
        config.require("quantization_config", None, default=None)

        vocab_size = config.integer("vocab_size")
        hidden_size = config.integer("hidden_size")
        layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
        query_heads = config.integer("num_attention_heads")
        left_out = family.kv_heads if "num_key_value_heads" not in config.values else None
        kv_heads = config.integer("num_key_value_heads", default=left_out or query_heads)
        if query_heads % kv_heads:
            config.refuse("num_key_value_heads", f"it must divide num_attention_heads, {query_heads}")
        if family.head_dim is None and not config.has("head_dim") and hidden_size % query_heads:
            config.refuse("num_attention_heads", f"without head_dim it must divide hidden_size, {hidden_size}")
        head_dim = config.integer("head_dim", default=family.head_dim or hidden_size // query_heads)
        if head_dim % 2:
            config.refuse("head_dim", "it must be even for rotary embeddings")

        # generation_config.json takes precedence: config.json often has only one of several end-of-sequence ids.
        eos = generation.token_ids("eos_token_id", vocab_size) or config.token_ids("eos_token_id", vocab_size)
        bos = generation.token_ids("bos_token_id", vocab_size) or config.token_ids("bos_token_id", vocab_size)
        theta, scaling = _rope(config)
        trained = config.integer("max_position_embeddings", default=family.max_context)
        window = _window(config, family, layers)
        return cls(
            architecture=architectures[0],
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            layers=layers,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=config.integer("intermediate_size"),
            max_context=served_context(config, "sliding_window", trained, window, max_context),
            rope_theta=theta,
            rms_norm_eps=config.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
            tied_embeddings=config.boolean("tie_word_embeddings", default=False),
            eos_token_ids=eos,
            bos_token_id=bos[0] if bos else None,
            dtype=_dtype(config),
            rope_scaling=scaling,
            **sampling_defaults.of_folder(generation, vocab_size),
        )


def served_context(keys: Fields, window_key: str, trained: int, window: int | None, asked: int | None) -> int:
    """Returns the context length to serve. Raises ``ModelInvalid`` when it is above what the model supports.

    Sliding-window attention is not implemented. Within ``window`` tokens it equals full attention, so a context of at
    most ``window`` is served exactly.
    """
    if asked is not None and asked > trained:
        raise ModelInvalid(f"--max-context {asked}: the context of {keys.path} is {trained}")
    context = trained if asked is None else asked
    if window is not None and window < context:
        keys.refuse(
            window_key, f"sliding-window attention is not supported; --max-context {window} stays within the window"
        )
    return context


def _window(config: Fields, family: Family, layers: int) -> int | None:
    """Returns the sliding window in tokens; None when every layer has full attention."""
    if family.sliding_window is None:
        return None
    kinds = config.values.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        config.refuse("layer_types", "it must be a list")
    if config.values["architectures"][0] != "MistralForCausalLM":
        if not config.boolean("use_sliding_window", default=False):
            return None
        if kinds is None and config.integer("max_window_layers", least=0, default=28) >= layers:
            return None
    if kinds is not None and all(kind == "full_attention" for kind in kinds):
        return None
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", default=family.sliding_window)


def _dtype(config: Fields) -> str:
    """Newer configurations call it ``dtype``, older ones ``torch_dtype``; the default is float32."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    value = config.values.get(key, "float32")
    if not isinstance(value, str) or value not in _DTYPES:
        config.refuse(key, f"it must be one of {', '.join(_DTYPES)}")
    return _DTYPES[value]


def _rope(config: Fields) -> tuple[float, Scaling | None]:
    """Newer configurations have theta and the scaling in ``rope_parameters``, older ones in two separate keys."""
    theta = config.number("rope_theta", 1.0, 1e12, default=10000.0)
    found: list[Scaling | None] = []
    for key in ("rope_scaling", "rope_parameters"):
        inner = config.values.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            config.refuse(key, "it must be an object")
        nested = Fields(config.path, inner, prefix=f"{key}.")
        nested.require("partial_rotary_factor", 1, default=1)
        theta = nested.number("rope_theta", 1.0, 1e12, default=theta)
        found.append(_scaling(nested))
        if found[0] != found[-1]:
            config.refuse(key, "it contradicts rope_scaling")
    return theta, found[0] if found else None


def _scaling(keys: Fields) -> Scaling | None:
    key = "rope_type" if "rope_type" in keys.values else "type"
    kind = keys.values.get(key, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(keys.number("factor", 1.0, 1e6))
    if kind == "llama3":
        low = keys.number("low_freq_factor", 0.0, 1e6)
        high = keys.number("high_freq_factor", 0.0, 1e6)
        if high <= low:
            keys.refuse("high_freq_factor", f"it must be more than low_freq_factor, {low:g}")
        return Llama3(keys.number("factor", 1.0, 1e6), low, high, keys.integer("original_max_position_embeddings"))
    keys.refuse(key, f"it must be one of {', '.join(_ROPES)}")
