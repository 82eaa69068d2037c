"""The daemon's settings, from flags, environment and file, and the cache limits made from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from services.common import settings
from services.common.access.identity import Identity
from services.common.access.policy import Allowance, Policy
from services.common.edge.listener import Listener
from services.common.errors import InvalidConfiguration
from services.common.listening import LIVE, listen, tcp_address
from services.common.settings import Program, setting
from services.common.values import Kind, byte_size, one_of, seconds, share, switch, whole
from services.kvcache.api.roles import ENGINE, INCLUDES, role_allowance
from services.kvcache.arena.host import default_directory
from services.kvcache.arena.room import Room, default_memory
from services.kvcache.cache.limits import MAX_TTL_S, MIN_TTL_S, Limits
from services.kvcache.eviction.policy import POLICIES, policy_name
from services.kvcache.kvevents.format import FORMATS, MAP
from services.kvcache.lease.quarantine import FENCES
from services.kvcache.pool.budget import MAX_PAGES
from services.kvcache.tier_config import TierConfig
from services.launch import typed

CPU, GPU = "cpu", "gpu"
ON, OFF = "on", "off"
POOLS, PAGES = "pools", "pages"
DEVICES = (CPU, GPU)

MEMORY = "256MiB"
_DEFAULTS = Limits(budget_bytes=byte_size(MEMORY))

PROGRAM = Program(
    typed("services.kvcache"),
    "The KV-cache daemon: owns the memory that holds KV pages, and shares it with engines.\n"
    f"`{typed('services.kvcache')} doctor` checks whether this machine can run it.",
    "ROCMFORGE_KVCACHE",
)


def _directory(text: str) -> Path:
    """An absolute path, since it is sent to engines in other directories. Raises ValueError unless it is UTF-8."""
    if not text or os.fsencode(text).decode(errors="replace") != text:
        raise ValueError("expected a directory whose name is UTF-8")
    return Path(text).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(TierConfig):
    """All settings. Sizes are in bytes, times in seconds. ``echo`` holds everything, for a log event."""

    listeners: list[Listener] = listen("kvcache.sock")
    allow: list[Allowance] = setting(
        role_allowance,
        list,
        f"a role for an identity, ROLE=uid:N, ROLE=cn:NAME or ROLE=anyone, with a role of {', '.join(INCLUDES)}; "
        "repeatable; the daemon's own user has all",
        many=True,
        metavar="R",
    )
    shared_pools: bool = setting(
        switch, False, "let engines of different identities share the pools they name, and the pages in them"
    )
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
    host_memory: int = setting(
        byte_size,
        _DEFAULTS.host_memory,
        "budget of the daemon's own memory, for what it keeps of pools, pages and sequences",
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
        "seconds that a lost session's engine has to come back before --fence applies to it",
        name="drain",
        metavar="S",
    )
    fence: str = setting(
        one_of(*FENCES),
        _DEFAULTS.fence,
        "what becomes of a lost engine whose process is alive past --drain: `wait` keeps its unfinished pages in "
        "quarantine until it ends or comes back, `kill` kills it",
        metavar="HOW",
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
    identity_sessions: int = setting(
        whole(1, 65536), _DEFAULTS.identity_sessions, "maximum number of sessions per identity", metavar="N"
    )
    identity_unattached: int = setting(
        whole(1, 65536),
        _DEFAULTS.identity_unattached,
        "maximum number of sessions per identity that have not attached",
        metavar="N",
    )
    identity_pools: int = setting(
        whole(1, 65536), _DEFAULTS.identity_pools, "maximum number of pools in use per identity", metavar="N"
    )
    identity_calls: int = setting(
        whole(1, 65536), 256, "maximum number of calls in flight per identity, streams included", metavar="N"
    )
    identity_share: float | None = setting(
        share,
        None,
        "share of the memory budget, 0 to 1, that the pools in use of one identity may have; default: half of it if "
        "--allow lets several identities open sessions, else all",
        metavar="X",
    )
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
    kv_events: Listener | None = setting(
        tcp_address,
        None,
        "publish what enters and leaves the prefix caches as vLLM's KV events over ZeroMQ on host:port, with tokens "
        "and without TLS; default: off",
        metavar="ADDR",
    )
    kv_events_replay: Listener | None = setting(
        tcp_address,
        None,
        "replay KV events on host:port to readers that missed some",
        metavar="ADDR",
    )
    kv_events_to: Listener | None = setting(
        tcp_address,
        None,
        "also send KV events to a router that listens for them on host:port",
        metavar="ADDR",
    )
    kv_events_format: str = setting(
        one_of(*FORMATS), MAP, "format of a KV event: `map` as since vLLM 0.25, `array` as before", metavar="F"
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
    zero: str = setting(
        one_of(POOLS, PAGES),
        PAGES if _DEFAULTS.zero_pages else POOLS,
        "what is zeroed before somebody else gets it: the memory of `pools`, or also single `pages` within a pool",
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
        config.check_kv_events()
        config.check_tiers()
        return config

    def check_kv_events(self) -> None:
        """Reject addresses of KV events that other hosts can reach: who does reads the tokens of all prompts.

        Raises InvalidConfiguration.
        """
        for flag, listener in (
            ("--kv-events", self.kv_events),
            ("--kv-events-replay", self.kv_events_replay),
            ("--kv-events-to", self.kv_events_to),
        ):
            if listener is not None and flag != "--kv-events" and self.kv_events is None:
                raise InvalidConfiguration(f"{flag} needs --kv-events", field=flag)
            if listener is not None and not listener.local_only and not self.insecure:
                raise InvalidConfiguration(
                    f"{flag} {listener}: other hosts could read the tokens of all cached prompts; use a loopback "
                    "address, or --insecure on a trusted network",
                    field=flag,
                )

    #: The fields that can change while the daemon runs.
    LIVE: ClassVar[frozenset[str]] = LIVE | {
        *("allow", "identity_sessions", "identity_unattached", "identity_pools", "identity_calls", "identity_share"),
        *("memory", "host_memory", "pool_pages", "max_sequences"),
        *("session_ttl_s", "drain_s", "fence", "cache_ttl_s", "sequence_ttl_s", "verify_share"),
    }

    @property
    def policy(self) -> Policy:
        """Who may do what."""
        return Policy(Identity.of_uid(os.geteuid()), self.allow, INCLUDES)

    @property
    def limits(self) -> Limits:
        """The settings that the cache uses."""
        return Limits(
            budget_bytes=self.memory,
            host_memory=self.host_memory,
            pool_pages=self.pool_pages,
            default_ttl_s=self.session_ttl_s,
            drain_s=self.drain_s,
            fence=self.fence,
            cache_ttl_s=self.cache_ttl_s,
            eviction=self.eviction,
            retained_share=self.retained_share,
            max_sessions=self.max_sessions,
            identity_sessions=self.identity_sessions,
            identity_unattached=self.identity_unattached,
            identity_pools=self.identity_pools,
            identity_share=self._share_of_one,
            max_sequences=self.max_sequences,
            sequence_ttl_s=self.sequence_ttl_s,
            event_ring=self.event_ring,
            checksums=self.checksums == ON,
            verify_share=self.verify_share,
            zero_pages=self.zero == PAGES,
        )

    @property
    def _share_of_one(self) -> float:
        """No memory is taken back from a session, so what is for others must be kept before they come."""
        if self.identity_share is not None:
            return self.identity_share
        return 0.5 if len(self.policy.holders(ENGINE)) > 1 else 1.0
