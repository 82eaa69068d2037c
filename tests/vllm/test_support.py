"""What the ``direct`` setting refuses at vLLM's start, with a sentence that names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rocmforge.vllm.config import Settings
from rocmforge.vllm.direct.support import check
from rocmforge.vllm.model import Unsupported


class FullAttentionSpec:
    """vLLM's, as far as it is read."""

    block_size, head_size, num_kv_heads, sliding_window = 32, 64, 2, None


def config(**changed: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """vLLM's configuration and its KV cache's, of which some are changed."""
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=changed.get("executor", "uni")),
        scheduler_config=SimpleNamespace(async_scheduling=changed.get("ahead", False)),
        device_config=SimpleNamespace(device_type=changed.get("device", "cpu")),
        model_config=SimpleNamespace(max_model_len=512),
    )
    group = SimpleNamespace(kv_cache_spec=changed.get("spec", FullAttentionSpec()))
    return vllm_config, SimpleNamespace(kv_cache_groups=[group] * changed.get("groups", 1))


def test_what_is_supported_is_not_refused() -> None:
    check(*config(), Settings("unix:x", direct=True, pool_pages=16), "0.32.0")


@pytest.mark.parametrize(
    ("changed", "version", "settings", "words"),
    [
        ({}, "0.33.0", {}, "vLLM is 0.33.0"),
        ({}, "0.25.1", {}, "supported is 0.32 alone"),
        ({"executor": "mp"}, "0.32.0", {}, "distributed_executor_backend is 'mp'"),
        ({"ahead": True}, "0.32.0", {}, "async_scheduling is True"),
        ({"device": "cuda"}, "0.32.0", {}, "device is 'cuda'"),
        ({"groups": 2}, "0.32.0", {}, "2 groups"),
        ({"spec": SimpleNamespace(block_size=32)}, "0.32.0", {}, "SimpleNamespace"),
        ({}, "0.32.0", {"page_size": 64}, "page_size is 64"),
        ({}, "0.32.0", {"pool_pages": 15}, "pool_pages is 15, which hold 480 tokens"),
    ],
)
def test_what_is_not_supported_is_refused(changed: Any, version: str, settings: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        check(*config(**changed), Settings("unix:x", direct=True, **settings), version)


def test_the_setting_is_true_or_false() -> None:
    assert Settings.of({"daemon": "unix:x", "direct": True}).direct
    assert not Settings.of({"daemon": "unix:x"}).direct
    with pytest.raises(ValueError, match="direct is 1: expected true or false"):
        Settings.of({"daemon": "unix:x", "direct": 1})
