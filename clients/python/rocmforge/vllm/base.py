"""What the connector that copies and the one that does not have in common."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from rocmforge.vllm import model
from rocmforge.vllm.config import Settings
from rocmforge.vllm.metrics import Metrics, Stats

#: How long a step that computes nothing waits for an answer that requests wait for. If vLLM spun instead, it would keep
#: the interpreter from the thread that gets the answer.
ANSWER_WAIT_S = 0.02
#: How long one waits that only has saves to see the end of. A request that comes meanwhile waits as long.
IDLE_WAIT_S = 0.001


class Connector(KVConnectorBase_V1, SupportsHMA):
    """A connector for models that `model.check` does not refuse. Raises ValueError for settings that are none."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config or {})
        model.check(vllm_config, kv_cache_config)
        self._block_size = model.block_size(kv_cache_config)
        self._salts = model.Salts()
        self._was_connected: bool | None = None
        kv_events = vllm_config.kv_events_config
        self._tells_events = kv_events is not None and kv_events.enable_kv_cache_events
        self._medium = "CPU" if vllm_config.device_config.device_type == "cpu" else "HBM"

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a later miss."""
        return False

    def _backend(self, name: str) -> str:
        """The attention backend of a layer, and the instruction set that it packs blocks for."""
        attention = self._vllm_config.compilation_config.static_forward_context[name]
        return " ".join((attention.get_attn_backend().get_name(), getattr(attention, "isa", "")))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM runs a request only when its load is over."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Nothing: saves are sent by `get_finished`, which comes next, and nothing waits for them."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, by groups of layers, of which there is one."""
        return self.request_finished(request, block_ids[0])

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Counts as they came from the worker."""
        return Stats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Metrics:
        """The Prometheus metrics."""
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
