"""What vLLM serves: refused if the connector cannot share it, and named so that only what computes the same shares."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocmforge.client.layout import PageLayout

#: Changes with what a page of this connector holds.
FORMAT = 1

_DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10
_WHOLE_FILE_BYTES = _SAMPLES << 20


class Unsupported(ValueError):
    """The connector cannot serve what vLLM is configured to do."""


def check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise Unsupported, naming the setting, for anything that the connector was not made for."""
    transfer, parallel, cache = vllm_config.kv_transfer_config, vllm_config.parallel_config, vllm_config.cache_config
    for name, value, wanted in (
        ("kv_transfer_config.kv_role", transfer.kv_role, "kv_both"),
        ("kv_transfer_config.kv_load_failure_policy", transfer.kv_load_failure_policy, "recompute"),
        ("tensor_parallel_size", parallel.tensor_parallel_size, 1),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
        ("data_parallel_size", parallel.data_parallel_size, 1),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("speculative_config", vllm_config.speculative_config, None),
        ("enable_prefix_caching", cache.enable_prefix_caching, True),
        ("is_encoder_decoder", vllm_config.model_config.is_encoder_decoder, False),
        ("runner", vllm_config.model_config.runner_type, "generate"),
    ):
        if value != wanted:
            raise Unsupported(f"{name} is {value!r}: the RocmForgeConnector supports {wanted!r} alone")
    spec = _spec(kv_cache_config)
    dtype = str(vllm_config.model_config.dtype)
    if cache.cache_dtype not in ("auto", dtype.removeprefix("torch.")):
        raise Unsupported(
            f"kv_cache_dtype is {cache.cache_dtype!r}: the RocmForgeConnector supports {dtype} alone, 'auto'"
        )
    if str(spec.dtype) not in _DTYPES:
        raise Unsupported(f"the KV cache is of {spec.dtype}: the RocmForgeConnector supports {', '.join(_DTYPES)}")


def _spec(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(
            f"the model has {len(groups)} groups of layers with KV caches of different kinds: the RocmForgeConnector "
            "supports models of full attention alone, not hybrid ones"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind != "FullAttentionSpec":
        raise Unsupported(f"the KV cache is a {kind}: the RocmForgeConnector supports full attention alone")
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            raise Unsupported(f"{name} is {getattr(spec, name)}: the RocmForgeConnector supports full attention alone")
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise Unsupported("heads of K and V differ in size: the RocmForgeConnector supports equal ones alone")
    return spec


def layer_names(kv_cache_config: Any) -> list[str]:
    """The layers whose K and V a page holds, in order."""
    return list(kv_cache_config.kv_cache_groups[0].layer_names)


def block_size(kv_cache_config: Any) -> int:
    """Tokens in one of vLLM's blocks."""
    return int(_spec(kv_cache_config).block_size)


def page_layout(kv_cache_config: Any, page_size: int) -> PageLayout:
    """The layout of a page of this model. Raises Unsupported unless page and block size divide one another."""
    spec = _spec(kv_cache_config)
    if page_size % spec.block_size and spec.block_size % page_size:
        raise Unsupported(
            f"kv_connector_extra_config.page_size is {page_size}: it must be a multiple or a divisor of vLLM's block "
            f"size, {spec.block_size}"
        )
    layers = len(layer_names(kv_cache_config))
    return PageLayout(page_size, layers, spec.num_kv_heads, spec.head_size, _DTYPES[str(spec.dtype)])


def pool_id(vllm_config: Any, *, engine: str, backend: str, order: str, chosen: str = "") -> str:
    """The pool that this engine shares with those that compute the same K and V, and with no others; 128 characters at
    most.

    ``engine`` is vLLM and its version, ``backend`` the attention backend, ``order`` how pages are filled; ``chosen``
    stands for the rest, if it is set. Raises Unsupported when the weights cannot be distinguished from others.
    """
    if chosen:
        return f"{chosen}/{order}"
    model = vllm_config.model_config
    digest = hashlib.blake2b(digest_size=12)
    for part in (
        f"format {FORMAT} {engine} {backend} {order} rank 0 of 1",
        f"{model.dtype} {model.quantization} {vllm_config.cache_config.cache_dtype}",
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
        *_weights(model, str(vllm_config.load_config.load_format)),
    ):
        digest.update(part.encode() + b"\0")
    return f"{engine}/{Path(model.model).name[:60]}@{digest.hexdigest()}"


def _weights(model: Any, load_format: str) -> Iterator[str]:
    folder = Path(model.model)
    if "dummy" in load_format or not folder.is_dir():
        raise Unsupported(
            f"the weights of {model.model!r} (load_format {load_format}) cannot be told from others: serve a local "
            "folder, or set kv_connector_extra_config.pool_id"
        )
    files = sorted(path for kind in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for path in folder.glob(kind))
    if not files:
        raise Unsupported(f"{folder} has no weights: set kv_connector_extra_config.pool_id")
    for path in files:
        yield f"{path.name} {fingerprint(path)}"


def fingerprint(path: Path) -> str:
    """A hash of a file's size and bytes; above 64 MiB, of 64 blocks of 64 KiB spread evenly over it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    whole = size <= _WHOLE_FILE_BYTES
    places = (
        range(0, size, _SAMPLE_BYTES)
        if whole
        else [(size - _SAMPLE_BYTES) * n // (_SAMPLES - 1) for n in range(_SAMPLES)]
    )
    with path.open("rb") as file:
        for at in places:
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def nonce() -> str:
    """A string that was not there before."""
    return secrets.token_hex(16)


class Salts:
    """The salt of a request: requests share pages only under the same one.

    It is vLLM's ``cache_salt`` as it is, unless there is a LoRA adapter, which is named by its bytes, or the cache was
    reset, after which nothing from before is found.
    """

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, int, int], str] = {}
        self._resets = ""

    def reset(self, nonce: str) -> None:
        """From now on, salts differ from all before."""
        self._resets = nonce

    def of(self, request: Any) -> str | None:
        """The salt; None if the request must not share pages: with multimodal inputs, embeddings as prompt, input that
        is still streamed, or an adapter whose bytes are not in a local folder.
        """
        if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
            return None
        if getattr(request, "resumable", False) or request.pooling_params is not None:
            return None
        salt, adapter = request.cache_salt or "", ""
        if request.lora_request is not None:
            found = self._adapter(Path(request.lora_request.lora_path))
            if found is None:
                return None
            adapter = found
        if not adapter and not self._resets and len(salt) <= 128 and not salt.startswith("vllm:"):
            return salt
        parts = json.dumps([salt, adapter, self._resets]).encode()
        return f"vllm:{hashlib.blake2b(parts, digest_size=32).hexdigest()}"

    def _adapter(self, folder: Path) -> str | None:
        digest = hashlib.blake2b(digest_size=16)
        try:
            files = sorted(path for path in folder.iterdir() if path.is_file())
            for path in files:
                stat = path.stat()
                key = (str(path), stat.st_size, stat.st_mtime_ns)
                if key not in self._adapters:
                    self._adapters[key] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
                digest.update(f"{path.name} {self._adapters[key]}\0".encode())
        except OSError:
            return None
        return digest.hexdigest() if files else None
