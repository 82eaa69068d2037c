"""File descriptors: every connection takes one, and a process that has none left can neither accept nor log.

So callers get a share that leaves some for the service itself, and TCP and the unix sockets have one each: whoever can
reach a port cannot lock out those who may use the socket.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import structlog

log = structlog.get_logger()

#: For what is not a caller's: arenas, weights, the log, metrics, GPUs.
RESERVED = 256
#: Kinds of listeners with a share of their own: unix sockets and TCP.
SHARES = 2
LEAST = 8


def raise_limit(
    get: Callable[[int], tuple[int, int]] = resource.getrlimit,
    set: Callable[[int, tuple[int, int]], None] = resource.setrlimit,
) -> int:
    """Raise this process's soft limit on descriptors to the hard one; returns it."""
    soft, hard = get(resource.RLIMIT_NOFILE)
    if soft != hard:
        set(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections(wanted: int, limit: int) -> int:
    """How many connections of the ``wanted`` ones each kind of listener may have, out of ``limit`` descriptors.

    At least `LEAST`, however low the limit. Fewer than wanted are logged.
    """
    share = (limit - RESERVED) // SHARES if limit != resource.RLIM_INFINITY else wanted
    if share >= wanted:
        return wanted
    granted = max(LEAST, share)
    log.warning("descriptors_short", limit=limit, connections=granted, wanted=wanted, reserved=RESERVED)
    return granted
