"""transformers' paged cache, with its K and V in the daemon's pages. docs/clients.md explains it."""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from rocmforge.client import Demand, Grant, KvCache, KvCacheDown, ServiceError, SessionExpired

GROUP = FullAttentionCacheAllocator.layer_type
names = map(str, itertools.count())  # of sequences: each is used once in a session


@dataclass
class Sequence:
    """The daemon knows that ``reported`` tokens are resident. Those in ``due`` are, too, and are reported next."""

    name: str
    reported: int
    due: list[int] = field(default_factory=list)


class SharedCache(PagedAttentionCache):
    """transformers' paged cache on the daemon's memory, with the daemon in place of its pool of blocks.

    One of its blocks, ``[layer][k, v][slot][kv_head][head_dim]``, is a page. ``found`` hears how many tokens of each
    prompt were cached. Raises ValueError for a model or a configuration that would write pages that are not granted.
    """

    def __init__(
        self, session: KvCache, found: dict[str, int], config: Any, continuous_batching_config: Any, **rest: Any
    ):
        settings = continuous_batching_config
        padded = any(settings.cuda_graph_booleans) or settings.varlen_compile_config or settings.decode_compile_config
        if padded or settings.use_async_batching or settings.cpu_offload_space:
            raise ValueError("neither CUDA graphs, compiled steps, asynchronous batching nor offloading are supported")
        small = copy(settings)
        small.num_blocks = 1  # the tensor made of these goes in the next lines
        super().__init__(config, small, **rest)
        self.session, self.found, self.live = session, found, dict[str, Sequence]()
        self.lost: ServiceError | None = None
        self.allocator = self.cache_allocators.get(GROUP)
        layout = (settings.page_size, self.bytes_per_sector)
        if len(self.cache_allocators) != 1 or layout != (session.layout.page_size, session.layout.page_bytes):
            raise ValueError(
                f"full attention alone, on pages of {layout[0]} tokens and {layout[1]} bytes, is supported"
            )
        self.cache_tensor = session.pages.torch().raw.view(-1)
        self.num_blocks = self.num_sectors = session.total_pages
        self.max_tokens_read = session.total_pages * settings.page_size
        # It takes two leading blocks for those of padding, which there is none of: every page is one like any other.
        self.allocator.register_cache_tensor(
            self.bytes_per_sector, (self.num_blocks - 2) * self.bytes_per_sector, self.cache_tensor, self.pool
        )
        self.tables: dict[str, list[int]] = self.allocator.block_table

    # --- pages: found in the prefix cache, granted, given back ----------------------------------------------------

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Begin a sequence with the cached pages of its prompt, and no others. Returns how many tokens they hold."""
        self.free_blocks(request_id)  # if it found no room the last time
        name = next(names)
        grant = self._granted(Demand.of_prompt(name, prompt_ids, 0))
        if grant is None:
            return 0
        self.live[request_id], self.tables[request_id] = Sequence(name, grant.cached_tokens), list(grant.pages)
        self.found[request_id] = grant.cached_tokens
        return grant.cached_tokens

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Grow a sequence, if it has to, and report in the same call what was computed since the last."""
        if state.request_id not in self.live:
            return False
        missing = self.allocator.needs_new_blocks(state.request_id, state.current_len(), request_len)
        if dry_run:
            return missing <= (self.session.available_pages or 0)
        return not missing or self._step(state.request_id, missing)

    def prepare_fork_request(self, *fork: Any) -> list[str]:
        """No forks: each sample begins by itself, with the pages that its prompt has in the prefix cache by then."""
        return []

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """End a sequence, between two steps. Its whole pages stay in the prefix cache."""
        if request_id not in self.live:
            return
        try:
            self._step(request_id)
            self.session.step([], removed=[self.live[request_id].name])
        except (SessionExpired, KvCacheDown) as error:
            self.lost = error.bare()  # transformers is to end its requests all the same; these end with the session
        del self.live[request_id], self.tables[request_id]

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """End all sequences."""
        for request_id in list(self.live):
            self.free_blocks(request_id)

    def _step(self, request_id: str, more_pages: int = 0) -> bool:
        """Report what is due of a sequence, and grow it; whether there was room."""
        one, table = self.live[request_id], self.tables[request_id]
        grant = self._granted(Demand.of_step(one.name, one.reported, one.due, len(table) + more_pages, len(table)))
        if grant is None:
            return False
        table += grant.pages  # without copies: nothing is shared behind the resident tokens
        one.reported, one.due = one.reported + len(one.due), []
        return True

    def _granted(self, demand: Demand) -> Grant | None:
        [grant] = self.session.step([demand])
        if grant.error is None:
            return grant
        if grant.error.retry_after_s is None:
            raise grant.error
        return None  # there is no room now

    # --- steps: under the lease, and reported when they are over --------------------------------------------------

    def extend_read_and_write_indices(self, *step: Any) -> None:
        """Before a step: it is to end while the pages are this session's."""
        self._check_lease()
        super().extend_read_and_write_indices(*step)

    def fill_block_table(self, *step: Any) -> None:
        """The same, where a kernel reads block tables."""
        self._check_lease()
        super().fill_block_table(*step)

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """After a step, which has synchronised: if it was late, pages that it used could have been given to others."""
        self._check_lease()
        if complete_blocks:
            one = self.live[state.request_id]
            known = one.reported + len(one.due)
            one.due += (state.initial_tokens + state.generated_tokens)[known : state.current_len()]

    def _check_lease(self) -> None:
        if self.lost is not None:
            raise self.lost
        if not self.session.may_write():
            raise SessionExpired("the lease may be over")

    # --- room: of a pool that other engines use, too, and whose cached pages the daemon evicts --------------------

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Pages that are free or evictable: their share of the pool, or their bytes."""
        pages = self.session.available_pages or 0
        return pages / self.num_blocks if relative else pages * self.bytes_per_sector

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """How many of these, in order, find room."""
        sums = itertools.accumulate(needed[GROUP] for needed in list_blocks_needed)
        return sum(pages <= (self.session.available_pages or 0) for pages in sums)
