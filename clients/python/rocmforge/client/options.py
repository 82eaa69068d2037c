"""What a client is opened with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, TypedDict

from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.client.errors import InvalidConfiguration
from rocmforge.client.events import EventLog
from rocmforge.client.transport.tls import ClientTls

#: The most pages of a pool, and of a session; the longest lease, in seconds.
MAX_PAGES, MAX_TTL_S = 2**32 - 1, 600.0

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


def check_options(*, pool_pages: int | None, max_pages: int | None, ttl_s: float | None) -> None:
    """Raise InvalidConfiguration, naming the option, for a number that no message can carry. The daemon checks the
    rest.
    """
    for name, value in (("pool_pages", pool_pages), ("max_pages", max_pages)):
        if value is not None and not 0 <= value <= MAX_PAGES:
            raise InvalidConfiguration(f"{name} is {value}; it must be 0 to {MAX_PAGES}", field=name)
    if ttl_s is not None and not (math.isfinite(ttl_s) and abs(ttl_s) <= MAX_TTL_S):
        raise InvalidConfiguration(f"ttl_s is {ttl_s:g}; it must be 1 to {MAX_TTL_S:g}", field="ttl_s")
