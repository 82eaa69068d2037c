"""vLLM's seam of the ``direct`` setting: the connector that puts vLLM's KV cache into the daemon's pages.

Both of its halves are in one process, and have the same block tables. Of vLLM it replaces, in the objects that it is
given, the memory of the KV tensors and the coordinator of the KV cache manager.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from rocmforge.client.cache import KvCache
from rocmforge.client.layout import OpaqueLayout
from rocmforge.vllm import model
from rocmforge.vllm.base import ANSWER_WAIT_S, Connector
from rocmforge.vllm.direct.coordinator import Coordinator, check_seams, install
from rocmforge.vllm.direct.link import Link
from rocmforge.vllm.direct.support import check
from rocmforge.vllm.direct.tables import BlockTables
from rocmforge.vllm.direct.tensors import Tensors, block_bytes
from rocmforge.vllm.events import stored
from rocmforge.vllm.metrics import Stats


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step on its way to the worker: whether it ``computes`` something."""

    computes: bool


@dataclass(slots=True)
class _Engine:
    """What both halves of one engine's connector have."""

    tables: BlockTables
    salts: model.Salts
    coordinator: Coordinator | None = None


#: By vLLM's id of the engine: the worker's half is made first, and the scheduler's takes what it made.
_ENGINES: dict[str, _Engine] = {}


class DirectConnector(Connector):
    """Gives vLLM the daemon's pages as its blocks. Raises `model.Unsupported` at vLLM's start where that cannot be."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check(vllm_config, kv_cache_config, self._settings, vllm.__version__)
        check_seams()
        self._name = str(self._kv_transfer_config.engine_id)
        self._engine: _Engine | None = None
        self._computed = False
        if role is KVConnectorRole.SCHEDULER:
            self._engine = _ENGINES.get(self._name)
            if self._engine is None:
                raise model.Unsupported("direct: the scheduler and the worker must be in one process")

    @property
    def _tables(self) -> BlockTables:
        if self._engine is None:
            raise RuntimeError("vLLM's KV cache was not registered")
        return self._engine.tables

    # --- the worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the session, and put vLLM's KV cache on its pages."""
        names = model.layer_names(self._kv_cache_config)
        layers, backend, settings = [kv_caches[name] for name in names], self._backend(names[0]), self._settings
        if backend.split()[0] not in BACKENDS:
            raise model.Unsupported(
                f"direct: the attention backend is {backend.split()[0]}: supported is {', '.join(BACKENDS)} alone, "
                "whose kernels take blocks that lie apart"
            )
        context = self._vllm_config.compilation_config.static_forward_context
        if any(context[name].kv_cache is not kv_caches[name] for name in names):
            raise model.Unsupported("direct: a layer has other tensors than those that vLLM registers")
        size = block_bytes(layers)
        shapes = " ".join(str(tuple(layer.shape[1:])) for layer in layers[:1])
        order = f"direct {backend} {len(layers)}x{shapes} {layers[0].dtype}"
        pool = model.pool_id(
            self._vllm_config, engine=f"vllm-{vllm.__version__}", backend=backend, order=order, chosen=settings.pool_id
        )
        session = KvCache(
            settings.daemon,
            pool,
            OpaqueLayout(self._block_size, f"vllm {order}"[:128], size),
            client_name=f"vllm-{vllm.__version__}",
            pool_pages=settings.pool_pages or self._kv_cache_config.num_blocks,
            ttl_s=settings.ttl_s,
            owner=settings.owner,
            flag="kv_connector_extra_config.daemon",
        )
        config = self._vllm_config
        tables = BlockTables(
            Link(session),
            Tensors(layers),
            page_size=self._block_size,
            most_tokens=config.model_config.max_model_len,
            most_running=config.scheduler_config.max_num_seqs,
            salt_of=self._salts.of,
        )
        self._engine = _ENGINES[self._name] = _Engine(tables, self._salts)
        tables.start()
        longest = config.model_config.max_model_len
        if tables.connected and tables.total * self._block_size < longest:
            self.shutdown()
            raise model.Unsupported(
                f"direct: the pool has {tables.total} pages, which hold {tables.total * self._block_size} tokens: "
                f"max_model_len is {longest}"
            )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to be computed: it reaches no pages if the lease may be over."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata) and connector_metadata.computes:
            self._tables.fence()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what was cached is in the request's blocks."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """A step is over. One that computed nothing waits a moment for the daemon."""
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata):
            self._computed = metadata.computes
            if not metadata.computes and self._tables.unanswered:
                self._tables.wait(ANSWER_WAIT_S)
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """All blocks, if the lease may have been over while the step read and wrote them: vLLM then drops what came of
        it.
        """
        engine = self._engine
        if engine is None or engine.coordinator is None or not self._computed or not engine.tables.fence():
            return set()
        return engine.coordinator.used

    def build_connector_worker_meta(self) -> None:
        """Nothing: both halves have the same tables."""

    # --- the scheduler --------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Have the manager ask the daemon."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._engine is not None:
            self._engine.coordinator = install(kv_cache_manager, self._engine.tables, self.reset_cache)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Nothing: no block is held for a copy."""

    def on_new_request(self, request: Any) -> None:
        """A request has come, and its prefix is looked up before it is its turn."""
        self._tables.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many of its tokens are in its first blocks; None until the daemon has answered."""
        return self._tables.matched(request), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing: the tables know."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """A step is scheduled: the call beside it begins."""
        self._tables.flush()
        return StepMetadata(bool(scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """Nothing: both halves have the same tables."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over, and its blocks may go at once: no step is in progress that uses them."""
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM has to keep stepping, so that pages are published and given back."""
        return self._tables.pending

    def take_events(self) -> Iterable[Any]:
        """What was published since the last call, as KV events of vLLM."""
        published = self._tables.take_published()
        events = [stored(one, self._block_size, self._medium) for one in published if self._tells_events]
        return [event for event in events if event is not None]

    def reset_cache(self) -> bool:
        """Find nothing any more that was cached until now. Pages that others may use stay."""
        if self._engine is not None:
            self._engine.salts.reset(model.nonce())
            self._engine.tables.reset()
        return True

    # --- both -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        """The counts since the last call; None if nothing happened. The worker's half reports them."""
        if self._engine is None or self.role is not KVConnectorRole.WORKER:
            return None
        counts = self._tables.take_counts()
        if (connected := self._tables.connected) != self._was_connected:
            self._was_connected = connected
            counts["connected"] = float(connected)
        return Stats(data=counts) if counts else None

    def shutdown(self) -> None:
        """End the session."""
        if (engine := _ENGINES.pop(self._name, None)) is not None:
            engine.tables.close()


#: Attention backends whose kernels take the stride of a block, and keep its bytes together.
BACKENDS = ("CPU_ATTN",)
