"""What the connector refuses, and what distinguishes models and requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocmforge.vllm import model
from rocmforge.vllm.config import Settings


class FullAttentionSpec(SimpleNamespace):
    """vLLM's, as far as it is read."""


class MLAAttentionSpec(FullAttentionSpec):
    """Another kind."""


def configured(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """vLLM's configurations of a model that is supported, but for ``changes``, by dotted names."""
    spec = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "head_size_v": 64, "sliding_window": None}
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=FullAttentionSpec(**spec, dtype="torch.bfloat16"))
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    served = {"dtype": "torch.bfloat16", "model": str(folder), "quantization": None, "runner_type": "generate"}
    vllm = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(**parallel, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        model_config=SimpleNamespace(
            **served, is_encoder_decoder=False, hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4})
        ),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    cache = SimpleNamespace(kv_cache_groups=[group])
    for name, value in changes.items():
        *path, last = name.split("__")
        target: Any = {"vllm": vllm, "spec": group.kv_cache_spec, "cache": cache}[path[0]]
        for part in path[1:]:
            target = getattr(target, part)
        setattr(target, last, value)
    return vllm, cache


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vllm__kv_transfer_config__kv_role": "kv_producer"}, "kv_role"),
        ({"vllm__kv_transfer_config__kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"vllm__parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"vllm__parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"vllm__parallel_config__data_parallel_size": 2}, "data_parallel_size"),
        ({"vllm__parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"vllm__speculative_config": object()}, "speculative_config"),
        ({"vllm__cache_config__enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"vllm__cache_config__cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"vllm__model_config__is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"vllm__model_config__runner_type": "pooling"}, "runner"),
        ({"spec__sliding_window": 512}, "sliding_window"),
        ({"spec__attention_chunk_size": 512}, "attention_chunk_size"),
        ({"spec__head_size_v": 32}, "differ in size"),
        ({"spec__dtype": "torch.uint8"}, "torch.uint8"),
        ({"cache__kv_cache_groups": [1, 2]}, "hybrid"),
        ({"cache__kv_cache_groups": [SimpleNamespace(kv_cache_spec=MLAAttentionSpec())]}, "MLAAttentionSpec"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    model.check(*configured(tmp_path))
    with pytest.raises(model.Unsupported, match=named):
        model.check(*configured(tmp_path, **changes))


def test_pages_and_blocks_divide_one_another(tmp_path: Path) -> None:
    _, cache = configured(tmp_path)
    assert [model.page_layout(cache, size).page_size for size in (4, 16, 64)] == [4, 16, 64]
    with pytest.raises(model.Unsupported, match="page_size is 24"):
        model.page_layout(cache, 24)


def named(folder: Path, chosen: str = "", backend: str = "FLASH_ATTN", **changes: Any) -> str:
    vllm, _ = configured(folder, **changes)
    return model.pool_id(vllm, engine="vllm-1", backend=backend, order="native", chosen=chosen)


def test_a_pool_is_named_by_all_that_k_and_v_depend_on(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    names = {named(tmp_path)}
    assert named(tmp_path) in names
    for changes in (
        {"backend": "TRITON_ATTN"},
        {"vllm__model_config__dtype": "torch.float16"},
        {"vllm__model_config__quantization": "awq"},
        {"vllm__model_config__hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 5e5})},
    ):
        names.add(named(tmp_path, **changes))
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    names.add(named(tmp_path))
    assert len(names) == 6
    assert all(len(name) <= 128 for name in names)
    assert named(tmp_path, "shared by hand") == "shared by hand/native"


def test_weights_that_cannot_be_told_apart_need_a_name(tmp_path: Path) -> None:
    with pytest.raises(model.Unsupported, match="has no weights"):
        named(tmp_path)
    with pytest.raises(model.Unsupported, match="cannot be told from others"):
        named(tmp_path, vllm__load_config__load_format="dummy")
    with pytest.raises(model.Unsupported, match="cannot be told from others"):
        named(Path("somebody/some-model"))


def asked(**values: Any) -> Any:
    request = {"mm_features": [], "prompt_embeds": None, "prompt_token_ids": [1], "pooling_params": None}
    return SimpleNamespace(**{**request, "resumable": False, "cache_salt": None, "lora_request": None, **values})


def test_salts_tell_requests_apart(tmp_path: Path) -> None:
    salts = model.Salts()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    lora = SimpleNamespace(lora_path=str(tmp_path))
    found = [salts.of(asked()), salts.of(asked(cache_salt="a")), salts.of(asked(cache_salt="a" * 200))]
    assert found[:2] == ["", "a"]
    found += [salts.of(asked(lora_request=lora)), salts.of(asked(lora_request=lora, cache_salt="a"))]
    found.append(salts.of(asked(cache_salt=found[3])))  # nobody can name another's
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    found.append(salts.of(asked(lora_request=lora)))
    salts.reset("nonce")
    found += [salts.of(asked()), salts.of(asked(cache_salt="a"))]
    assert len(set(found)) == len(found)
    assert all(salt is not None and len(salt) <= 128 for salt in found)


@pytest.mark.parametrize(
    "values",
    [
        {"mm_features": [1]},
        {"prompt_embeds": 1},
        {"prompt_token_ids": None},
        {"pooling_params": 1},
        {"resumable": True},
        {"lora_request": SimpleNamespace(lora_path="somebody/adapter")},
    ],
)
def test_requests_whose_tokens_do_not_say_all_are_not_shared(values: dict[str, Any]) -> None:
    assert model.Salts().of(asked(**values)) is None


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "daemon: expected"),
        ({"daemon": "unix:k", "pages": 1}, "pages: no such setting"),
        ({"daemon": "unix:k", "page_size": 0}, "page_size is 0: expected 1 to 1024"),
        ({"daemon": "unix:k", "page_size": True}, "page_size is True"),
        ({"daemon": "unix:k", "ttl_s": 0.5}, "ttl_s is 0.5: expected 1 to 600"),
        ({"daemon": "unix:k", "pool_id": "x" * 81}, "pool_id: expected at most 80"),
        ({"daemon": "unix:k", "lookup_timeout_s": -1}, "lookup_timeout_s is -1: expected 0 to 60"),
    ],
)
def test_settings_are_refused_by_name_and_limit(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings.of(values)
    assert Settings.of({"daemon": "unix:k", "page_size": 32}).page_size == 32
