"""A model's shape and constants, from a Hugging Face folder's ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.errors import ModelInvalid

ARCHITECTURES = ("LlamaForCausalLM",)
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_MAX_FILE_BYTES = 1 << 20
_MAX_SIZE = 1 << 24  # of any one dimension; keeps products far from 64 bits


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder needs to know. ``default_*`` are ``None`` where the model states none."""

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
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    #: What the weights were trained or published in, f32, f16 or bf16.
    dtype: str = "f32"
    default_temperature: float | None = None
    default_top_k: int | None = None
    default_top_p: float | None = None

    @classmethod
    def from_folder(cls, path: Path | str) -> ModelConfig:
        """Read and check the folder's configuration.

        Raises ``ModelInvalid`` naming the file, the key and its value when something is missing, malformed, or asks for
        what this decoder does not compute.
        """
        folder = Path(path)
        config = _Keys.of(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = _Keys.of(generation_file) if generation_file.exists() else _Keys(generation_file, {})

        architectures = config.values.get("architectures")
        if not (isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in ARCHITECTURES):
            config.refuse("architectures", f"served are {', '.join(ARCHITECTURES)}, one to a model")
        # Each of these changes the computation; ignoring one would give other tokens than the model's.
        config.require("hidden_act", "silu", default="silu")
        config.require("attention_bias", False, default=False)
        config.require("mlp_bias", False, default=False)
        config.require("partial_rotary_factor", 1, default=1)
        config.require("quantization_config", None, default=None)

        vocab_size = config.integer("vocab_size")
        hidden_size = config.integer("hidden_size")
        query_heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", default=query_heads)
        if query_heads % kv_heads:
            config.refuse("num_key_value_heads", f"it must divide num_attention_heads, {query_heads}")
        if config.values.get("head_dim") is None and hidden_size % query_heads:
            config.refuse("num_attention_heads", f"without head_dim it must divide hidden_size, {hidden_size}")
        head_dim = config.integer("head_dim", default=hidden_size // query_heads)
        if head_dim % 2:
            config.refuse("head_dim", "rotary embeddings need an even one")

        # generation_config.json is the newer word on where to stop; config.json has one id even where there are more.
        eos = generation.token_ids("eos_token_id", vocab_size) or config.token_ids("eos_token_id", vocab_size)
        bos = generation.token_ids("bos_token_id", vocab_size) or config.token_ids("bos_token_id", vocab_size)
        temperature = generation.optional_number("temperature", 0.0, 100.0)
        if generation.values.get("do_sample") is False:
            temperature = 0.0
        top_p = generation.optional_number("top_p", 0.0, 1.0)
        if top_p == 0:
            generation.refuse("top_p", "it must be more than 0")
        top_k = None if generation.values.get("top_k") is None else generation.integer("top_k", least=0)
        return cls(
            architecture=architectures[0],
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            layers=config.integer("num_hidden_layers"),
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=config.integer("intermediate_size"),
            max_context=config.integer("max_position_embeddings", default=2048),
            rope_theta=_rope_theta(config),
            rms_norm_eps=config.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
            tied_embeddings=config.boolean("tie_word_embeddings", default=False),
            eos_token_ids=eos,
            bos_token_id=bos[0] if bos else None,
            dtype=_dtype(config),
            default_temperature=temperature,
            default_top_k=top_k,
            default_top_p=top_p,
        )


def _dtype(config: _Keys) -> str:
    """Newer configurations call it ``dtype``, older ones ``torch_dtype``; without either it is float32."""
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    value = config.values.get(key, "float32")
    if not isinstance(value, str) or value not in _DTYPES:
        config.refuse(key, f"served are {', '.join(_DTYPES)}")
    return _DTYPES[value]


def _rope_theta(config: _Keys) -> float:
    """Newer configurations keep theta and the kind of scaling in ``rope_parameters``, older ones in two places."""
    theta = config.number("rope_theta", 1.0, 1e12, default=10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        inner = config.values.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            config.refuse(key, "it must be an object")
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            config.refuse(key, "scaled rotary embeddings are not served, only rope_type default")
        nested = _Keys(config.path, inner, prefix=f"{key}.")
        nested.require("partial_rotary_factor", 1, default=1)
        theta = nested.number("rope_theta", 1.0, 1e12, default=theta)
    return theta


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one JSON object, read with checks; every complaint names file, key and value."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def of(cls, path: Path) -> _Keys:
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ModelInvalid(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelInvalid(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ModelInvalid(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelInvalid(f"{path} is not a JSON object")
        return cls(path, values)

    def refuse(self, key: str, why: str) -> NoReturn:
        value = json.dumps(self.values.get(key))[:100]
        raise ModelInvalid(f"{self.path}: {self.prefix}{key} is {value}: {why}")

    def require(self, key: str, only: Any, default: Any) -> None:
        if self.values.get(key, default) != only:
            self.refuse(key, f"only {json.dumps(only)} is served")

    def integer(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
            self.refuse(key, f"it must be a whole number from {least} to {_MAX_SIZE}")
        return value

    def number(self, key: str, low: float, high: float, *, default: float) -> float:
        value = self.optional_number(key, low, high)
        return default if value is None else value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        # An int too large for a float would raise in isfinite, so the range is checked first; NaN fails it.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                self.refuse(key, f"it must hold token ids from 0 to {vocab_size - 1}")
        return tuple(ids)
