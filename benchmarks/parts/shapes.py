"""Models of known shapes with random weights: the time of a step does not depend on the weights' values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.ops_cupy import CupyOps
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.tensor import BF16, StoredTensor
from services.engine.checkpoint.weights import HEAD, Weights, shapes
from services.engine.model.checkpoint import Checkpoint

#: The count of random numbers that all tensors repeat; prime, so that the rows of a matrix differ.
BLOCK = 4_194_301
_ONE = 0x3F80  # of bfloat16


def _config(architecture: str, **values: Any) -> ModelConfig:
    shape = {"eos_token_ids": (), "bos_token_id": None, "rms_norm_eps": 1e-6, "dtype": "bf16", **values}
    return ModelConfig(architecture=architecture, **shape)


LLAMA_8B = _config(
    "LlamaForCausalLM", vocab_size=128256, hidden_size=4096, layers=32, query_heads=32, kv_heads=8, head_dim=128,
    intermediate_size=14336, max_context=131072, rope_theta=5e5, tied_embeddings=False,
)  # fmt: skip
QWEN3_600M = _config(
    "Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, layers=28, query_heads=16, kv_heads=8, head_dim=128,
    intermediate_size=3072, max_context=40960, rope_theta=1e6, tied_embeddings=True,
)  # fmt: skip
#: For tests: every part of the decoder, with very little work.
TINY = _config(
    "Qwen3ForCausalLM", vocab_size=1024, hidden_size=128, layers=2, query_heads=4, kv_heads=2, head_dim=64,
    intermediate_size=256, max_context=1024, rope_theta=1e4, tied_embeddings=True,
)  # fmt: skip
SHAPES = {"llama-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_600M, "tiny": TINY}


def _bits(scale: float) -> NDArray[np.uint16]:
    """`BLOCK` normal numbers times ``scale``, as bits of bfloat16, truncated."""
    normal = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(scale)
    bits: NDArray[np.uint16] = (normal.view(np.uint32) >> 16).astype(np.uint16)
    return bits


def _tile(out: Any, bits: Any) -> None:
    """Fill a flat array on the host or a device."""
    for at in range(0, out.size, bits.size):
        out[at : at + bits.size] = bits[: min(bits.size, out.size - at)]


class RandomTensor(StoredTensor):
    """A tensor without a file: a norm's weights are 1; a matrix preserves the magnitude of its input.

    A head starts with a 1, so that it differs from the embedding.
    """

    def read_into(self, out: NDArray[Any], progress: Callable[[int], None] = lambda size: None) -> None:
        """Fill ``out``."""
        values = np.ones(1, np.float32) if len(self.shape) == 1 else _bits(self.shape[1] ** -0.5)
        numbers = values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)
        flat = out.reshape(-1)
        flat[0] = 1
        _tile(flat[1:] if self.name == HEAD else flat, numbers)
        progress(self.stored_bytes)

    def equals(self, other: StoredTensor) -> bool:
        """Always false: no two tensors are equal, in particular a head and its embedding."""
        return False


class UnreadTensor(RandomTensor):
    """A tensor for `RandomOps`, which uses only its shape: its memory is never accessed."""

    def read_into(self, out: NDArray[Any], progress: Callable[[int], None] = lambda size: None) -> None:
        """Does nothing."""
        progress(self.stored_bytes)


@dataclass(frozen=True, slots=True)
class RandomCheckpoint(Checkpoint):
    """A checkpoint without files. ``tensor`` makes each of its tensors."""

    tensor: type[StoredTensor] = RandomTensor

    @classmethod
    def of(cls, config: ModelConfig, tensor: type[StoredTensor] = RandomTensor) -> RandomCheckpoint:
        """A checkpoint of a shape."""
        return cls(Path("random"), config, None, tensor)

    def weights(self) -> Weights:
        """Every tensor of the shape."""
        found = {name: self.tensor(self.path, name, shape, 0, BF16) for name, shape in shapes(self.config).items()}
        return Weights(self.path, self.config, found)


class RandomOps(CupyOps):
    """A backend that replaces weights by random numbers made on the device; bfloat16 only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._blocks: dict[float, Any] = {}

    def weight(self, tensor: NDArray[Any], dtype: str) -> Any:
        """A weight of the tensor's shape."""
        import cupy

        out = cupy.empty(tensor.shape, cupy.uint16)
        if tensor.ndim == 1:
            out.fill(_ONE)
            return out
        _tile(out.reshape(-1), self._block(tensor.shape[1] ** -0.5))
        return out

    def _block(self, scale: float) -> Any:
        import cupy

        if scale not in self._blocks:
            self._blocks[scale] = cupy.asarray(_bits(scale))
        return self._blocks[scale]


class UncutOps(RandomOps):
    """`RandomOps` whose attention gives all keys of a row and head to one block, as on a very small GPU."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gpu = dataclasses.replace(self._gpu, processors=1)


def described(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a model in Hugging Face's terms; ``dtype`` is that of its tensors, in torch's."""
    return {
        "architectures": [config.architecture],
        # Ours does not read it; vLLM does.
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "dtype": dtype,
    }


def write_folder(config: ModelConfig, folder: Path, tokenizer: Path) -> None:
    """Write a checkpoint of random weights as a Hugging Face folder, with the tokenizer file of another."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    values = described(config, "bfloat16")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    header, at = dict[str, Any](), 0
    for name, shape in shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = dict[float, bytes]()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes(config).items():
            if len(shape) == 1:
                file.write(_ONE.to_bytes(2, "little") * shape[0])
                continue
            scale = shape[1] ** -0.5
            if scale not in blocks:
                blocks[scale] = _bits(scale).tobytes()
            block = blocks[scale]
            left = 2 * shape[0] * shape[1]
            if name == HEAD:
                left -= file.write(_ONE.to_bytes(2, "little"))
            while left:
                left -= file.write(block[:left])
