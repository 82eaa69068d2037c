"""The connector's counts, as vLLM logs them and as Prometheus reads them from vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

#: A count of the worker's half, the name of its metric, and what it says.
COUNTERS = {
    "lookup_tokens": ("vllm:rocmforge_lookup_tokens", "Tokens looked up at the KV-cache daemon."),
    "hit_tokens": ("vllm:rocmforge_hit_tokens", "Tokens that the KV-cache daemon had."),
    "refused_lookups": ("vllm:rocmforge_refused_lookups", "Lookups that the KV-cache daemon refused."),
    "loaded_tokens": ("vllm:rocmforge_loaded_tokens", "Tokens whose K and V were loaded into blocks."),
    "unloaded_tokens": ("vllm:rocmforge_unloaded_tokens", "Tokens whose load failed, to be computed."),
    "load_bytes": ("vllm:rocmforge_load_bytes", "Bytes copied from pages to blocks."),
    "load_seconds": ("vllm:rocmforge_load_seconds", "Seconds that copies from pages to blocks took."),
    "saved_tokens": ("vllm:rocmforge_saved_tokens", "Tokens whose K and V were published."),
    "unsaved_tokens": ("vllm:rocmforge_unsaved_tokens", "Tokens whose save failed or was refused."),
    "save_bytes": ("vllm:rocmforge_save_bytes", "Bytes copied from blocks to pages."),
    "save_seconds": ("vllm:rocmforge_save_seconds", "Seconds that copies from blocks to pages took."),
    "sessions": ("vllm:rocmforge_sessions", "Sessions opened with the KV-cache daemon."),
    "lost_sessions": ("vllm:rocmforge_lost_sessions", "Sessions with the KV-cache daemon that were lost."),
}
CONNECTED = ("connected", "vllm:rocmforge_connected", "Whether there is a session with the KV-cache daemon, 0 or 1.")


@dataclass
class Stats(KVConnectorStats):
    """Counts of an interval, by the keys of `COUNTERS`; ``connected`` as of its end."""

    def reset(self) -> None:
        """Forget them."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of a later interval."""
        for name, value in other.data.items():
            self.data[name] = value if name == "connected" else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, and the bandwidth of both copies in GB/s."""
        shown = {name: value for name, value in self.data.items() if not name.endswith("_seconds")}
        for kind in ("load", "save"):
            if seconds := self.data.get(f"{kind}_seconds"):
                shown[f"{kind}_gb_per_s"] = round(self.data[f"{kind}_bytes"] / seconds / 1e9, 3)
        return shown

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics of vLLM, with its labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            key: self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            for key, (name, text) in COUNTERS.items()
        }
        _, name, text = CONNECTED
        self._connected = self._gauge_cls(name=name, documentation=text, labelnames=labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count an interval of one engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            if key == "connected":
                self._connected.labels(*labels).set(value)
            else:
                self._counters[key].labels(*labels).inc(value)
