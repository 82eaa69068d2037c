"""Published pages as vLLM's KV events, for routers that follow them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from rocmforge.vllm.scheduler import Published


def stored(published: Published, block_size: int, medium: str) -> BlockStored | None:
    """The event of the whole blocks that were published; None if there is none yet.

    Hashes are vLLM's, so a block has the same one here and in vLLM's own cache. A salt is in the extra keys of the
    first block.
    """
    request: Any = published.request
    first, last = -(-published.start // block_size), published.stop // block_size
    hashes = [maybe_convert_block_hash(one) for one in request.block_hashes[first:last]]
    if not hashes:
        return None
    last = first + len(hashes)
    lora = request.lora_request
    names = () if lora is None else (lora.lora_name,)
    salts = (request.cache_salt,) if request.cache_salt and first == 0 else ()
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
        token_ids=list(request.all_token_ids[first * block_size : last * block_size]),
        block_size=block_size,
        lora_id=None if lora is None else lora.adapter_id,
        medium=medium,
        lora_name=None if lora is None else lora.lora_name,
        extra_keys=[(names + salts) or None, *[names or None] * (len(hashes) - 1)],
    )
