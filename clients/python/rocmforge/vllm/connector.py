"""vLLM's seam: the `RocmForgeConnector` that ``--kv-transfer-config`` names.

It only translates: `scheduler.SchedulerHalf` decides, `worker.WorkerHalf` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from rocmforge.client.cache import KvCache
from rocmforge.vllm import model
from rocmforge.vllm.base import ANSWER_WAIT_S, IDLE_WAIT_S, Connector
from rocmforge.vllm.blocks.host import HostBlocks
from rocmforge.vllm.config import Settings
from rocmforge.vllm.events import stored
from rocmforge.vllm.metrics import Stats
from rocmforge.vllm.plan import Plan, Report
from rocmforge.vllm.scheduler import Scheduled, SchedulerHalf
from rocmforge.vllm.worker import Blocks, WorkerHalf


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """A plan on its way to the worker."""

    plan: Plan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A report on its way to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Raises ValueError: there is one worker."""
        raise ValueError("the RocmForgeConnector has one worker")


class RocmForgeConnector(Connector):
    """Shares prefixes with other engines through ROCmForge's KV-cache daemon; docs/vllm.md says how to use it.

    Raises `model.Unsupported` and ValueError at vLLM's start for what it cannot serve.
    """

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        """One that copies, or with the setting ``direct`` one that does not."""
        if not Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config or {}).direct:
            return super().__new__(cls)
        from rocmforge.vllm.direct.connector import DirectConnector

        return DirectConnector(vllm_config, role, kv_cache_config)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        size = self._block_size
        self._layout = model.page_layout(kv_cache_config, self._settings.page_size or size)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._report = Report()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                page_size=self._layout.page_size,
                block_size=size,
                salt_of=self._salts.of,
                lookup_timeout_s=self._settings.lookup_timeout_s,
            )

    # --- the worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's KV cache, and open the session."""
        names = model.layer_names(self._kv_cache_config)
        layers = [kv_caches[name] for name in names]
        blocks, gpu = self._blocks(layers)
        backend = self._backend(names[0])
        settings = self._settings
        pool = model.pool_id(
            self._vllm_config,
            engine=f"vllm-{vllm.__version__}",
            backend=backend,
            order=f"{blocks.order}-{backend}-{self._block_size}" if blocks.order == "packed" else blocks.order,
            chosen=settings.pool_id,
        )
        session = KvCache(
            settings.daemon,
            pool,
            self._layout,
            client_name=f"vllm-{vllm.__version__}",
            pool_pages=settings.pool_pages,
            ttl_s=settings.ttl_s,
            gpu=gpu,
            owner=settings.owner,
            flag="kv_connector_extra_config.daemon",
        )
        self._worker = WorkerHalf(session, blocks, page_size=self._layout.page_size)
        self._worker.start()

    def _blocks(self, layers: list[torch.Tensor]) -> tuple[Blocks, int | None]:
        device, count = layers[0].device, self._kv_cache_config.num_blocks
        if device.type == "cpu":
            return HostBlocks(layers, self._layout, self._block_size, count), None
        from rocmforge.vllm.blocks.device import DeviceBlocks

        return DeviceBlocks(layers, self._layout, self._block_size, count), device.index or 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Send what the step asks for, but for its saves."""
        if self._worker is not None and (plan := self._plan()) is not None:
            self._worker.submit(plan, saves=False)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Send the saves, and take what has happened: which loads are over."""
        worker, plan = self._worker, self._plan()
        if worker is None:
            return None, None
        if plan is not None:
            worker.submit(plan, saves=True)
            if plan.idle:
                worker.wait(ANSWER_WAIT_S if plan.waits else IDLE_WAIT_S)
        self._report = worker.collect()
        return None, self._report.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that were not filled, to be computed."""
        return self._report.unloaded

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The report that `get_finished` took."""
        return None if self._worker is None else ReportMetadata(self._report)

    def _plan(self) -> Plan | None:
        metadata = self._connector_metadata
        return metadata.plan if isinstance(metadata, PlanMetadata) else None

    # --- the scheduler --------------------------------------------------------------------------------------------

    @property
    def _half(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("this half of the connector is the worker's")
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool whose blocks are held while a save reads them."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many more tokens the daemon has; None until it has answered. Loads are asynchronous."""
        return self._half.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM gave the request blocks."""
        self._half.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of a step."""
        tables: dict[str, list[int]] = {}
        grown: dict[str, list[int]] = {}
        computed: dict[str, int] = {}
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            tables[new.req_id] = new.block_ids[0]
            computed[new.req_id] = new.num_computed_tokens + scheduled[new.req_id]
        cached = scheduler_output.scheduled_cached_reqs
        for nth, name in enumerate(cached.req_ids):
            if (ids := cached.new_block_ids[nth]) is not None:
                (tables if name in cached.resumed_req_ids else grown)[name] = ids[0]
            computed[name] = cached.num_computed_tokens[nth] + scheduled[name]
        return PlanMetadata(self._half.plan(Scheduled(tables, grown, computed)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the worker's report."""
        if isinstance(metadata := connector_output.kv_connector_worker_meta, ReportMetadata):
            self._half.report(metadata.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. Its blocks may go at once: those that are still saved are held."""
        self._half.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether saves are in progress, so that vLLM has to keep stepping."""
        return self._half.pending

    def take_events(self) -> Iterable[Any]:
        """What was published since the last call, as KV events of vLLM."""
        published = self._half.take_published()
        events = [stored(one, self._block_size, self._medium) for one in published if self._tells_events]
        return [event for event in events if event is not None]

    def reset_cache(self) -> bool:
        """Find nothing any more that was cached until now. Pages that others may use stay."""
        self._salts.reset(model.nonce())
        self._half.reset()
        return True

    # --- both -----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        """The worker's counts since the last call; None if nothing happened."""
        if self._worker is None:
            return None
        counts = self._worker.take_counts()
        if (connected := self._worker.connected) != self._was_connected:
            self._was_connected = connected
            counts["connected"] = float(connected)
        return Stats(data=counts) if counts else None

    def shutdown(self) -> None:
        """End the session."""
        if self._worker is not None:
            self._worker.close()
