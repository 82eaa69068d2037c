"""transformers' continuous batching on the daemon's pages, which all processes share.

    python examples/transformers/engine.py ADDRESS MODEL_FOLDER "PROMPT" ["PROMPT" ...]

Run it twice: the second process takes the whole pages of the prompts from the first. docs/clients.md explains it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from shared_cache import SharedCache
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from rocmforge.client import KvCache, KvCacheDown, OpaqueLayout, SessionExpired

PAGE_SIZE, POOL_PAGES, BATCH_TOKENS, NEW_TOKENS = 16, 1024, 256, 32


def generate(model: Any, session: KvCache, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], int]:
    """The greedy tokens of prompts that run side by side, and how many of the prompts' were cached.

    Raises SessionExpired or KvCacheDown when the daemon is lost: nothing writes pages any more, and no view is left.
    """
    found: dict[str, int] = {}
    sampling = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, max_batch_tokens=BATCH_TOKENS, use_async_batching=False, use_cuda_graph=False
    )
    make = partial(SharedCache, session, found)
    with (
        patch.object(continuous_api, "PagedAttentionCache", make),  # transformers has no option for it
        model.continuous_batching_context_manager(
            sampling, continuous_batching_config=batching, warmup=False
        ) as manager,
    ):
        order, results = manager.add_requests(prompts, max_new_tokens=new_tokens), dict[str, Any]()
        while len(results) < len(order):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                break
        lost = manager.batch_processor.cache.lost if manager.batch_processor else None
    # Its thread has ended.
    if (error := manager.background_thread_status.fatal_error or lost) is not None:
        raise error.with_traceback(None)  # its frames have the cache, and that has views of the pages
    for result in results.values():
        if result.error is not None:
            raise RuntimeError(result.error)
    return [results[name].generated_tokens for name in order], sum(found.values())


def session_for(address: str, model: Any, folder: Path, **options: Any) -> KvCache:
    """A session on the pool of all that compute the same K and V: by these weights, this code, on such a device."""
    config, digest = model.config.get_text_config(), hashlib.blake2b(digest_size=12)
    for part in (transformers.__version__, torch.__version__, model.device.type, model.dtype, config):
        digest.update(f"{part}\0".encode())
    for weights in sorted(folder.glob("*.safetensors")):
        with weights.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    heads, head_dim = find_num_key_value_heads(config), find_head_dim(config)
    block_bytes = FullAttentionCacheAllocator.get_bytes_per_page(heads, head_dim, model.dtype, PAGE_SIZE)
    return KvCache.connect(
        address,
        f"transformers/{folder.name[:60]}@{digest.hexdigest()}",
        OpaqueLayout(PAGE_SIZE, "[layer][k, v][slot][kv_head][head_dim]", config.num_hidden_layers * block_bytes),
        gpu=model.device.index if model.device.type == "cuda" else None,
        client_name="transformers",
        **{"pool_pages": POOL_PAGES, **options},
    )


def persist(model: Any, session: KvCache, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], int]:
    """`generate`, again with another session for as long as the daemon is lost."""
    while True:
        try:
            return generate(model, session, prompts, new_tokens)
        except (SessionExpired, KvCacheDown) as error:
            print(f"{error.reason}: computing it again", file=sys.stderr)
        while True:  # nothing writes now, so the lost session may be closed, and another opened
            try:
                session.reopen()
                break
            except KvCacheDown:
                time.sleep(0.2)


def main(address: str, name: str, *texts: str) -> None:
    """Continue texts."""
    folder, device = Path(name).resolve(), "cuda:0" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if device != "cpu" else torch.float32).to(device)
    prompts = [tokenizer(text).input_ids for text in texts]
    with session_for(address, model, folder) as session:
        tokens, cached = persist(model, session, prompts, NEW_TOKENS)
    print(f"{cached} of {sum(map(len, prompts))} prompt tokens were cached")
    for text, new in zip(texts, tokens, strict=True):
        print(text + tokenizer.decode(new))


if __name__ == "__main__":
    main(*sys.argv[1:])
