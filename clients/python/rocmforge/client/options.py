"""What a client is opened with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypedDict

from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.client.events import EventLog
from rocmforge.client.transport.tls import ClientTls

#: Hears of each call that has ended: its method, the name of its gRPC status code, and its seconds.
OnCall: TypeAlias = Callable[[str, str, float], object]


class Options(TypedDict, total=False):
    """What `KvCache` takes beside the address, the pool and the layout; it says what each is."""

    client_name: str
    engine_name: str
    model: str
    pool_pages: int | None
    max_pages: int | None
    ttl_s: float | None
    gpu: Gpu | int | None
    owner: int | None
    tls: ClientTls | None
    flag: str
    on_call: OnCall | None
    log: EventLog
    clock: Callable[[], float]
