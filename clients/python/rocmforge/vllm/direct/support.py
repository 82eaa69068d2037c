"""What vLLM may be configured to do with the daemon's pages as its blocks."""

from __future__ import annotations

from typing import Any

from rocmforge.vllm.config import Settings
from rocmforge.vllm.model import Unsupported, block_size

#: Of vLLM, where the replaced methods and the order of calls are known.
VERSIONS = ("0.32",)


def check(vllm_config: Any, kv_cache_config: Any, settings: Settings, version: str) -> None:
    """Raise Unsupported, naming the setting, beside what `rocmforge.vllm.model.check` refuses."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise Unsupported(f"direct: vLLM is {version}: supported is {', '.join(VERSIONS)} alone")
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    size = block_size(kv_cache_config)
    for name, value, wanted in (
        ("device", vllm_config.device_config.device_type, "cpu"),
        ("distributed_executor_backend", parallel.distributed_executor_backend, "uni"),
        ("async_scheduling", scheduler.async_scheduling, False),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1), 1),
        ("kv_connector_extra_config.page_size", settings.page_size or size, size),
    ):
        if value != wanted:
            raise Unsupported(f"direct: {name} is {value!r}: supported is {wanted!r} alone")
    pages = settings.pool_pages
    if pages is not None and pages * size < vllm_config.model_config.max_model_len:
        raise Unsupported(
            f"direct: kv_connector_extra_config.pool_pages is {pages}, which hold {pages * size} tokens: "
            f"max_model_len is {vllm_config.model_config.max_model_len}"
        )
