"""The daemon's settings, from flags, environment and file, and the cache limits made from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from services.common import settings
from services.common.listening import LIVE, Listening, listen
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
ON, OFF = "on", "off"
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
    """An absolute path, since it is sent to engines in other directories. Raises ValueError unless it is UTF-8."""
    if not text or os.fsencode(text).decode(errors="replace") != text:
        raise ValueError("expected a directory whose name is UTF-8")
    return Path(text).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Listening):
    """All settings. Sizes are in bytes, times in seconds. ``echo`` holds everything, for a log event."""

    listeners: list[Listener] = listen("kvcache.sock", PORT)
    device: str = setting(
        one_of(*DEVICES),
        CPU,
        "where pages live: `cpu`, in files that engines map, or `gpu`, in the memory of each engine's GPU",
        metavar="D",
    )
    arena_dir: Path = setting(
        Kind(_directory, "path"), default_directory, "directory of the arena files", metavar="DIR"
    )
    memory: int = setting(
        byte_size,
        None,
        "memory budget of all pools together; with --device gpu, per GPU; "
        f"default: {MEMORY}, or three quarters of the file system of --arena-dir if that is smaller",
        metavar="SIZE",
    )
    pool_pages: int | None = setting(
        whole(1, MAX_PAGES),
        _DEFAULTS.pool_pages,
        "pages of a new pool if the engine does not specify; default: as many as the budget allows",
        metavar="N",
    )
    session_ttl_s: float = setting(
        seconds(MIN_TTL_S, MAX_TTL_S),
        _DEFAULTS.default_ttl_s,
        "session lease, in seconds, if the engine does not specify one",
        name="session-ttl",
        metavar="S",
    )
    drain_s: float = setting(
        seconds(0, 3600),
        _DEFAULTS.drain_s,
        "seconds that a lost session's unfinished pages stay in quarantine, unless its process is proven gone",
        name="drain",
        metavar="S",
    )
    cache_ttl_s: float | None = setting(
        seconds(0.001, 10**9),
        _DEFAULTS.cache_ttl_s,
        "seconds after which an unused cached page expires; default: never",
        name="cache-ttl",
        metavar="S",
    )
    eviction: str = setting(
        Kind(policy_name, " or ".join(POLICIES)),
        _DEFAULTS.eviction,
        f"eviction policy: {', '.join(POLICIES)}",
        metavar="P",
    )
    retained_share: float = setting(
        share,
        _DEFAULTS.retained_share,
        "maximum share of a pool's pages, 0 to 1, that requested retention may keep in the cache",
        metavar="X",
    )
    max_sessions: int = setting(whole(1, 65536), _DEFAULTS.max_sessions, "maximum number of sessions", metavar="N")
    max_sequences: int = setting(
        whole(1, 10**7), _DEFAULTS.max_sequences, "maximum live sequences per session", metavar="N"
    )
    # The one default that differs from Limits: by default the cache itself never ends an idle sequence.
    sequence_ttl_s: float = setting(
        seconds(0.001, 10**9),
        3600.0,
        "seconds without access after which a sequence counts as leaked and is ended",
        name="sequence-ttl",
        metavar="S",
    )
    event_ring: int = setting(
        whole(1, 10**8), _DEFAULTS.event_ring, "page events kept for readers of the prefix cache's changes", metavar="N"
    )
    checksums: str = setting(
        one_of(ON, OFF),
        ON if _DEFAULTS.checksums else OFF,
        "whether published pages get checksums, so that a page whose bytes change is found",
        metavar="X",
    )
    verify_share: float = setting(
        share,
        _DEFAULTS.verify_share,
        "share of prefix hits, 0 to 1, whose pages are verified before they are served",
        metavar="X",
    )
    echo: dict[str, Any]

    @classmethod
    def read(cls, arguments: list[str] | None, environ: Mapping[str, str]) -> Config:
        """Read all settings; flags override environment, file and defaults. Raises InvalidConfiguration."""
        values = settings.read(cls, PROGRAM, arguments, environ)
        fields = values.fields
        if fields["memory"] is None:
            room = Room.of(fields["arena_dir"]) if fields["device"] == CPU else None
            fields["memory"] = default_memory(byte_size(MEMORY), room)
        config = cls(**fields, echo=values.echo())
        config.check_exposure()
        return config

    #: The fields that can change while the daemon runs.
    LIVE: ClassVar[frozenset[str]] = LIVE | {
        "session_ttl_s",
        "drain_s",
        "cache_ttl_s",
        "max_sequences",
        "sequence_ttl_s",
    }

    @property
    def limits(self) -> Limits:
        """The settings that the cache uses."""
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
            checksums=self.checksums == ON,
            verify_share=self.verify_share,
        )
