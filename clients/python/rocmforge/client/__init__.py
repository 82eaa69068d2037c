"""A client of ROCmForge's KV-cache daemon, for any engine.

`KvCache` is a session on a pool of pages: the memory mapped, the lease kept, the step call. docs/clients.md has the
laws that a client keeps. Names are imported when they are first used, so that the errors need neither gRPC nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocmforge.client.arena.device import DevicePages
    from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
    from rocmforge.client.arena.host import HostPages
    from rocmforge.client.arena.views import TorchViews, Views
    from rocmforge.client.cache import KvCache
    from rocmforge.client.demands import Demand, Grant, Opening, PageCopy, Retention, ReuseHint
    from rocmforge.client.errors import KvCacheDown, PagesFilling, ServiceError, SessionExpired
    from rocmforge.client.events import EventLog
    from rocmforge.client.layout import OpaqueLayout, PageLayout
    from rocmforge.client.step import Step
    from rocmforge.client.transport.tls import ClientTls

_MODULES = {
    "ClientTls": "transport.tls",
    "Demand": "demands",
    "DevicePages": "arena.device",
    "EventLog": "events",
    "Gpu": "arena.gpu_ipc",
    "Grant": "demands",
    "HostPages": "arena.host",
    "KvCache": "cache",
    "KvCacheDown": "errors",
    "OpaqueLayout": "layout",
    "Opening": "demands",
    "PageCopy": "demands",
    "PageLayout": "layout",
    "PagesFilling": "errors",
    "Retention": "demands",
    "ReuseHint": "demands",
    "Runtime": "arena.gpu_ipc",
    "ServiceError": "errors",
    "SessionExpired": "errors",
    "Step": "step",
    "TorchViews": "arena.views",
    "Views": "arena.views",
}

__all__ = [
    "ClientTls",
    "Demand",
    "DevicePages",
    "EventLog",
    "Gpu",
    "Grant",
    "HostPages",
    "KvCache",
    "KvCacheDown",
    "OpaqueLayout",
    "Opening",
    "PageCopy",
    "PageLayout",
    "PagesFilling",
    "Retention",
    "ReuseHint",
    "Runtime",
    "ServiceError",
    "SessionExpired",
    "Step",
    "TorchViews",
    "Views",
]


def __getattr__(name: str) -> Any:
    """A public name, from the module that has it."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
