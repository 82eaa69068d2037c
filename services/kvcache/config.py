"""The daemon's settings: flags, environment, file, limits."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.flags import FlagParser, Number, add_serving_flags, byte_size, one_of, seconds, tls_of, whole
from services.common.serving import Listener, Tls, check_exposure
from services.kvcache.arena.host import default_directory
from services.kvcache.cache.cache import MAX_TTL_S, MIN_TTL_S, Limits
from services.kvcache.eviction.policy import POLICIES, policy_name
from services.kvcache.pool.budget import MAX_PAGES
from services.kvcache.room import Room, default_memory

PORT = 50052
CPU, GPU = "cpu", "gpu"
DEVICES = (CPU, GPU)

MEMORY = "256MiB"
_DEFAULTS = Limits(budget_bytes=byte_size(MEMORY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set. Sizes in bytes, times in seconds. ``echo`` is all of it for a log event."""

    listeners: list[Listener]
    tls: Tls | None
    insecure: bool
    metrics: Listener | None
    grace_s: float
    log_level: str
    device: str
    arena_dir: Path
    limits: Limits
    echo: dict[str, Any]

    @classmethod
    def read(cls, arguments: list[str] | None, environ: Mapping[str, str]) -> Config:
        """Flags over environment over file over defaults. Raises InvalidConfiguration."""
        flags = FlagParser(
            "python -m services.kvcache",
            "The KV-cache daemon: owns the memory that holds KV pages, and shares it with engines.\n"
            "`python -m services.kvcache doctor` checks whether this machine can run it.",
            "ROCMFORGE_KVCACHE",
        )
        add_serving_flags(flags, "kvcache.sock", PORT)
        flags.add(
            "--device",
            one_of(*DEVICES),
            CPU,
            "where pages lie: `cpu`, in files that engines map, or `gpu`, in the memory of the GPU each engine is on",
            metavar="D",
        )
        flags.add("--arena-dir", _directory, default_directory(), "directory of the arena files", metavar="DIR")
        flags.add(
            "--memory",
            byte_size,
            None,
            "memory budget of all pools; with --device gpu, on each GPU; "
            f"default: {MEMORY}, or three quarters of a smaller file system of --arena-dir",
            metavar="SIZE",
        )
        flags.add(
            "--pool-pages",
            whole(1, MAX_PAGES),
            _DEFAULTS.pool_pages,
            "pages of a new pool whose engine does not say; default: what the budget holds",
            metavar="N",
        )
        flags.add(
            "--session-ttl",
            seconds(MIN_TTL_S, MAX_TTL_S),
            _DEFAULTS.default_ttl_s,
            "lease of a session that does not say",
            metavar="S",
        )
        flags.add(
            "--drain",
            seconds(0, 3600),
            _DEFAULTS.drain_s,
            "seconds that a lost session's unfinished pages are kept from others while its process may live",
            metavar="S",
        )
        flags.add(
            "--cache-ttl",
            seconds(0.001, 10**9),
            _DEFAULTS.cache_ttl_s,
            "seconds after which an unused cached page is forgotten; default: never",
            metavar="S",
        )
        flags.add(
            "--eviction",
            policy_name,
            _DEFAULTS.eviction,
            f"which cached page goes first: {', '.join(POLICIES)}",
            metavar="P",
        )
        flags.add(
            "--retained-share",
            Number(_share, (int, float)),
            _DEFAULTS.retained_share,
            "share of a pool's pages, 0 to 1, that may stay cached longer because sequences asked for retention",
            metavar="X",
        )
        flags.add("--max-sessions", whole(1, 65536), _DEFAULTS.max_sessions, "sessions at a time", metavar="N")
        flags.add(
            "--max-sequences", whole(1, 10**7), _DEFAULTS.max_sequences, "live sequences of one session", metavar="N"
        )
        # The one default that is not the limits' own: a cache by itself ends no sequence unasked.
        flags.add(
            "--sequence-ttl",
            seconds(0.001, 10**9),
            3600.0,
            "seconds after which an untouched sequence is taken for leaked and ended",
            metavar="S",
        )
        flags.add(
            "--event-ring",
            whole(1, 10**8),
            _DEFAULTS.event_ring,
            "pages whose coming and going is remembered",
            metavar="N",
        )
        values = flags.parse(arguments, environ)
        if values["memory"] is None:
            room = Room.of(values["arena-dir"]) if values["device"] == CPU else None
            values = values.with_default("memory", default_memory(byte_size(MEMORY), room))
        config = cls(
            listeners=values["listen"],
            tls=tls_of(values),
            insecure=values["insecure"],
            metrics=values["metrics"],
            grace_s=values["grace"],
            log_level=values["log-level"],
            device=values["device"],
            arena_dir=values["arena-dir"],
            limits=Limits(
                budget_bytes=values["memory"],
                pool_pages=values["pool-pages"],
                default_ttl_s=values["session-ttl"],
                drain_s=values["drain"],
                cache_ttl_s=values["cache-ttl"],
                eviction=values["eviction"],
                retained_share=values["retained-share"],
                max_sessions=values["max-sessions"],
                max_sequences=values["max-sequences"],
                sequence_ttl_s=values["sequence-ttl"],
                event_ring=values["event-ring"],
            ),
            echo=values.echo(),
        )
        check_exposure(config.listeners, config.tls, config.insecure, config.metrics)
        return config


def _share(text: str) -> float:
    """A part of a whole. Raises ValueError."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ValueError("want a number from 0 to 1")
    return share


def _directory(text: str) -> Path:
    """An absolute path, since engines elsewhere are told it. Raises ValueError when it cannot be told as text."""
    if not text or os.fsencode(text).decode(errors="replace") != text:
        raise ValueError("want a directory whose name is UTF-8")
    return Path(text).absolute()
