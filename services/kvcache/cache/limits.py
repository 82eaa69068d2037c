"""What the daemon may use, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from services.kvcache.lease.quarantine import WAIT

MIN_TTL_S, MAX_TTL_S = 1.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the daemon may use and how long it waits. Bytes, pages, seconds."""

    budget_bytes: int
    host_memory: int = 1 << 30
    pool_pages: int | None = None
    default_ttl_s: float = 10.0
    drain_s: float = 30.0
    fence: str = WAIT
    cache_ttl_s: float | None = None
    eviction: str = "lru"
    retained_share: float = 0.5
    max_sessions: int = 256
    identity_sessions: int = 64
    identity_unattached: int = 8
    identity_pools: int = 16
    identity_share: float = 1.0
    max_sequences: int = 65536
    sequence_ttl_s: float | None = None
    event_ring: int = 65536
    checksums: bool = True
    verify_share: float = 0.01
    zero_pages: bool = False
