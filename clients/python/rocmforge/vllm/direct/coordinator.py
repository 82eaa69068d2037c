"""What vLLM's KV cache manager asks, answered with the daemon's pages.

`install` puts a coordinator and a block pool into a manager, in place of vLLM's own. They are subclasses, and refused
where vLLM's methods have other parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from rocmforge.vllm.direct.tables import BlockTables
from rocmforge.vllm.model import Unsupported


class Pool(BlockPool):
    """Blocks by number: block b is page b - 1. Whether one is free, the daemon says."""

    def __init__(self, tables: BlockTables, hash_block_size: int) -> None:
        super().__init__(1, True, hash_block_size)
        self._tables = tables

    def block(self, page: int) -> KVCacheBlock:
        """The block of a page."""
        while len(self.blocks) <= page + 1:
            self.blocks.append(KVCacheBlock(len(self.blocks), pool=self))
        return self.blocks[page + 1]

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Raises RuntimeError: blocks are granted to a request."""
        raise RuntimeError("a block of the daemon is granted to a request, not taken from the pool")

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raises RuntimeError, for the same reason."""
        raise RuntimeError("a block of the daemon is held by a request's sequence")

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Nothing: a request gives all its pages back at once."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Nothing: the daemon evicts."""

    def get_num_free_blocks(self) -> int:
        """Pages of the whole pool that are free or evictable."""
        return self._tables.available

    def get_usage(self) -> float:
        """The share of the whole pool that is held, 0 to 1."""
        return 1 - self._tables.available / self._tables.total if self._tables.total else 0.0


class Coordinator(UnitaryKVCacheCoordinator):
    """Gives requests the block tables that the daemon granted them. Hits are reported by the connector."""

    def __init__(self, replaced: UnitaryKVCacheCoordinator, tables: BlockTables, reset: Any) -> None:
        self.__dict__.update(vars(replaced))
        self._tables, self._reset = tables, reset
        self.block_pool: Pool = Pool(tables, replaced.block_pool.hash_block_size)
        manager = self.single_type_managers[0]
        manager.block_pool = self.block_pool
        self._blocks = manager.req_to_blocks

    def new_step_starts(self) -> None:
        """Take what the daemon answered."""
        self._tables.begin()

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """0 if the request has the pages, more than there are if the daemon does not grant them."""
        return self._tables.lacking(request_id, num_tokens)

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> None:
        """Begin the request's table with the pages that were cached."""
        self._take(request_id, num_local_computed_tokens + num_external_computed_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int, num_encoder_tokens: int = 0
    ) -> tuple[list[KVCacheBlock], ...]:
        """Extend the request's table by pages that it alone has."""
        return (self._take(request_id, num_tokens),)

    def _take(self, request_id: str, tokens: int) -> list[KVCacheBlock]:
        new = [self.block_pool.block(page) for page in self._tables.take(request_id, tokens)]
        self._blocks[request_id].extend(new)
        return new

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Nothing: pages are published once a step, after it."""

    def find_longest_cache_hit(
        self, block_hashes: list[Any], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
        """None: the connector reports what the daemon has."""
        return ([],), 0, 0

    def free(self, request_id: str) -> None:
        """The request gives its pages back."""
        self._blocks.pop(request_id, None)
        self._tables.free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Raises RuntimeError: nothing defers that blocks are freed, since no two steps overlap."""
        raise RuntimeError("blocks of the daemon are freed at once")

    def reset_prefix_cache(self) -> bool:
        """Find nothing any more that was cached until now; False while requests run."""
        if self._tables.held:
            return False
        self._reset()
        return True

    @property
    def used(self) -> set[int]:
        """The blocks in any request's table."""
        return {block.block_id for blocks in self._blocks.values() for block in blocks}


def check_seams() -> None:
    """Raise Unsupported if a method that is replaced here has other parameters in this vLLM."""
    for ours in (Pool, Coordinator):
        base = ours.__mro__[1]
        for name, method in vars(ours).items():
            if name.startswith("_") or not callable(method) or not hasattr(base, name):
                continue
            names, wanted = _parameters(getattr(base, name)), _parameters(method)
            if names != wanted:
                raise Unsupported(f"direct: {base.__name__}.{name} of this vLLM takes {names}, not {wanted}")


def _parameters(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def install(kv_cache_manager: Any, tables: BlockTables, reset: Any) -> Coordinator:
    """Put the daemon's pages in place of vLLM's own pool. Raises Unsupported for another kind of manager."""
    check_seams()
    coordinator = kv_cache_manager.coordinator
    managers = coordinator.single_type_managers
    for found, kind in ((coordinator, UnitaryKVCacheCoordinator), (managers[0], FullAttentionManager)):
        if type(found) is not kind or len(managers) != 1:
            raise Unsupported(f"direct: vLLM manages this KV cache with a {type(found).__name__}, not {kind.__name__}")
    kv_cache_manager.coordinator = Coordinator(coordinator, tables, reset)
    kv_cache_manager.block_pool = kv_cache_manager.coordinator.block_pool
    return kv_cache_manager.coordinator
