"""Pages of the KV-cache daemon, as the scheduler asks for them; `rocmforge.client` has the session."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import structlog

from rocmforge.client.arena.device import DevicePages
from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.client.cache import KvCache
from rocmforge.client.transport.tls import ClientTls
from services.common.call_stats import CallStats
from services.common.errors import InvalidConfiguration
from services.engine.pages.source import Demand, Exchange, PageLayout

log = structlog.get_logger()


class GrpcPageSource:
    """A page source on a daemon's pool. Call ``reopen`` to open the first session, too.

    Takes what `KvCache` takes; ``calls`` counts the RPCs; ``prefill_tokens_per_s`` is called for each exchange, which
    reports it. Raises InvalidConfiguration for a page dtype that the backend
    does not support: NumPy computes in f32.
    """

    def __init__(
        self,
        target: str,
        pool_id: str,
        layout: PageLayout,
        *,
        client_name: str = "",
        engine_name: str = "",
        model: str = "",
        pool_pages: int | None = None,
        ttl_s: float | None = None,
        gpu: Gpu | None = None,
        owner: int | None = None,
        tls: ClientTls | None = None,
        calls: CallStats | None = None,
        prefill_tokens_per_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if gpu is None and layout.dtype != "f32":
            raise InvalidConfiguration(f"pages of {layout.dtype} are not supported by this backend")
        self.calls = CallStats() if calls is None else calls
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._cache = KvCache(
            target,
            pool_id,
            layout,
            client_name=client_name,
            engine_name=engine_name,
            model=model,
            pool_pages=pool_pages,
            ttl_s=ttl_s,
            gpu=gpu,
            owner=owner,
            tls=tls,
            flag="--kvcache",
            on_call=self.calls.done,
            log=log,
            clock=clock,
        )

    @property
    def pool_id(self) -> str:
        """The pool's name, as requested."""
        return self._cache.pool_id

    @property
    def retains(self) -> bool:
        """Always true: the daemon supports retention."""
        return True

    @property
    def total_pages(self) -> int:
        """Pages in the pool, as of the last session."""
        return self._cache.total_pages

    @property
    def available_pages(self) -> int | None:
        """See `KvCache.available_pages`."""
        return self._cache.available_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._cache.layout.page_size

    @property
    def epoch(self) -> int:
        """The epoch of the daemon that the session belongs to; 0 without a session."""
        return self._cache.epoch

    @property
    def memory(self) -> Any:
        """This session's pages, f32 ``[page, layer, (k, v), kv_head, slot, head_dim]``; DevicePages on a GPU.

        Raises SessionExpired without a session.
        """
        pages = self._cache.pages
        return pages if isinstance(pages, DevicePages) else pages.numpy().kv

    @property
    def silent_since(self) -> float | None:
        """Since when the lease could not be renewed; None while it can, and without a session."""
        return self._cache.silent_since

    def may_launch(self) -> bool:
        """Whether the lease has not expired and lasts, with a safety margin."""
        return self._cache.may_write()

    def exchange(self, demands: Items[Demand], removed: Items[str], traceparent: str = "") -> Exchange:
        """Start a step call, with a W3C trace context. Raises SessionExpired without a session."""
        return self._cache.start_step(
            demands, removed, traceparent=traceparent, prefill_tokens_per_s=self._prefill_tokens_per_s()
        )

    def reopen(self) -> None:
        """See `KvCache.reopen`: no step may be in flight, and no view of the old memory may be kept."""
        self._cache.reopen()

    def close(self) -> None:
        """Close the session, best effort. Idempotent."""
        self._cache.close()
