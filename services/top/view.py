"""What is shown: the daemon and the engines at one moment, and what happened since the moment before."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool. Pages by state; ``cached`` without ``retained``. Rates are per second since the last look."""

    id: str
    free: int
    held: int
    cached: int
    retained: int
    quarantined: int
    hit_rate: float | None  # of prompt tokens looked up since the last look; None if there were none
    hit_rate_ever: float | None
    granted_s: float
    evicted_s: float
    filling: int = 0

    @property
    def total(self) -> int:
        """All pages."""
        return self.free + self.held + self.cached + self.retained + self.quarantined + self.filling


@dataclass(frozen=True, slots=True)
class TierView:
    """A lower tier. Rates are bytes per second since the last look; ``trouble`` says why it is not used."""

    name: str
    pages: int
    used_bytes: int
    capacity_bytes: int
    found: float | None  # of pages looked up since the last look; None if there were none
    stored_s: float
    fetched_s: float
    failed: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class SessionView:
    """An engine's lease. ``lost`` says how a lost one is fenced, and is empty for a live one. Seconds."""

    handle: str
    name: str
    owner: str
    pool_id: str
    sequences: int
    pages: int
    lease_s: float
    ttl_s: float
    lost: str = ""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence of the daemon, with its session's name. Seconds."""

    id: str
    session: str
    age_s: float
    idle_s: float
    tokens: int
    pages: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine. Times in seconds, of what ended since the last look; ``trouble`` says why there is nothing else."""

    target: str
    model: str = ""
    running: int = 0
    queued: int = 0
    queue_limit: int = 0
    first_token_s: float | None = None
    tokens_s: float = 0.0
    preemptions: int = 0
    recoveries: int = 0
    draining: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """Everything at one moment. ``trouble`` says why the daemon's part is empty."""

    target: str
    epoch: int = 0
    uptime_s: float = 0.0
    pools: list[PoolView] = field(default_factory=list)
    sessions: list[SessionView] = field(default_factory=list)
    sequences: list[SequenceView] = field(default_factory=list)
    all_sequences: int = 0
    engines: list[EngineView] = field(default_factory=list)
    tiers: list[TierView] = field(default_factory=list)
    trouble: str = ""
