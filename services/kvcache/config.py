"""The daemon's settings: flags, environment, file, limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import settings
from services.common.listening import Listening, listen
from services.common.serving import Listener
from services.common.settings import Program, setting
from services.common.values import Kind, byte_size, one_of, seconds, share, whole
from services.kvcache.arena.host import default_directory
from services.kvcache.arena.room import Room, default_memory
from services.kvcache.cache.cache import MAX_TTL_S, MIN_TTL_S, Limits
from services.kvcache.eviction.policy import POLICIES, policy_name
from services.kvcache.pool.budget import MAX_PAGES

PORT = 50052
CPU, GPU = "cpu", "gpu"
DEVICES = (CPU, GPU)

MEMORY = "256MiB"
_DEFAULTS = Limits(budget_bytes=byte_size(MEMORY))

PROGRAM = Program(
    "python -m services.kvcache",
    "The KV-cache daemon: owns the memory that holds KV pages, and shares it with engines.\n"
    "`python -m services.kvcache doctor` checks whether this machine can run it.",
    "ROCMFORGE_KVCACHE",
)


def _directory(text: str) -> Path:
    """An absolute path, since engines elsewhere are told it. Raises ValueError when it cannot be told as text."""
    if not text or os.fsencode(text).decode(errors="replace") != text:
        raise ValueError("expected a directory whose name is UTF-8")
    return Path(text).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Listening):
    """Everything that can be set. Sizes in bytes, times in seconds. ``echo`` is all of it for a log event."""

    listeners: list[Listener] = listen("kvcache.sock", PORT)
    device: str = setting(
        one_of(*DEVICES),
        CPU,
        "where pages lie: `cpu`, in files that engines map, or `gpu`, in the memory of the GPU each engine is on",
        metavar="D",
    )
    arena_dir: Path = setting(
        Kind(_directory, "path"), default_directory, "directory of the arena files", metavar="DIR"
    )
    memory: int = setting(
        byte_size,
        None,
        "memory budget of all pools; with --device gpu, on each GPU; "
        f"default: {MEMORY}, or three quarters of a smaller file system of --arena-dir",
        metavar="SIZE",
    )
    pool_pages: int | None = setting(
        whole(1, MAX_PAGES),
        _DEFAULTS.pool_pages,
        "pages of a new pool whose engine does not say; default: what the budget holds",
        metavar="N",
    )
    session_ttl_s: float = setting(
        seconds(MIN_TTL_S, MAX_TTL_S),
        _DEFAULTS.default_ttl_s,
        "lease of a session that does not say",
        name="session-ttl",
        metavar="S",
    )
    drain_s: float = setting(
        seconds(0, 3600),
        _DEFAULTS.drain_s,
        "seconds that a lost session's unfinished pages are kept from others while its process may live",
        name="drain",
        metavar="S",
    )
    cache_ttl_s: float | None = setting(
        seconds(0.001, 10**9),
        _DEFAULTS.cache_ttl_s,
        "seconds after which an unused cached page is forgotten; default: never",
        name="cache-ttl",
        metavar="S",
    )
    eviction: str = setting(
        Kind(policy_name, " or ".join(POLICIES)),
        _DEFAULTS.eviction,
        f"which cached page goes first: {', '.join(POLICIES)}",
        metavar="P",
    )
    retained_share: float = setting(
        share,
        _DEFAULTS.retained_share,
        "share of a pool's pages, 0 to 1, that may stay cached longer because sequences asked for retention",
        metavar="X",
    )
    max_sessions: int = setting(whole(1, 65536), _DEFAULTS.max_sessions, "sessions at a time", metavar="N")
    max_sequences: int = setting(whole(1, 10**7), _DEFAULTS.max_sequences, "live sequences of one session", metavar="N")
    # The one default that is not the limits' own: a cache by itself ends no sequence unasked.
    sequence_ttl_s: float = setting(
        seconds(0.001, 10**9),
        3600.0,
        "seconds after which an untouched sequence is taken for leaked and ended",
        name="sequence-ttl",
        metavar="S",
    )
    event_ring: int = setting(
        whole(1, 10**8), _DEFAULTS.event_ring, "pages whose coming and going is remembered", metavar="N"
    )
    echo: dict[str, Any]

    @classmethod
    def read(cls, arguments: list[str] | None, environ: Mapping[str, str]) -> Config:
        """Flags over environment over file over defaults. Raises InvalidConfiguration."""
        values = settings.read(cls, PROGRAM, arguments, environ)
        fields = values.fields
        if fields["memory"] is None:
            room = Room.of(fields["arena_dir"]) if fields["device"] == CPU else None
            fields["memory"] = default_memory(byte_size(MEMORY), room)
        config = cls(**fields, echo=values.echo())
        config.check_exposure()
        return config

    @property
    def limits(self) -> Limits:
        """What of these the cache goes by."""
        return Limits(
            budget_bytes=self.memory,
            pool_pages=self.pool_pages,
            default_ttl_s=self.session_ttl_s,
            drain_s=self.drain_s,
            cache_ttl_s=self.cache_ttl_s,
            eviction=self.eviction,
            retained_share=self.retained_share,
            max_sessions=self.max_sessions,
            max_sequences=self.max_sequences,
            sequence_ttl_s=self.sequence_ttl_s,
            event_ring=self.event_ring,
        )
