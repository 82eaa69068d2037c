"""What one identity may hold of a pool that several share, while another waits.

Pages are taken back from nobody, so a pool that one identity has filled is full. But from the moment another is refused
for want of pages, and has less than its share, those that have more get none: what they give up goes to the other.

An identity has what is in the block tables of its sessions (a page counts for each sequence that holds it, as in a
session's quota), and what its lost sessions and its expired sequences keep from others. A cached page that nobody holds
counts for nobody: whoever asks can have it.
"""

from __future__ import annotations

from services.kvcache.lease.quarantine import Quarantine
from services.kvcache.lease.sessions import Session, Sessions
from services.kvcache.pool.pool import Pool

#: Seconds for which an identity counts as waiting after it was refused: engines ask again within that.
WAITS_S = 2.0


class Shares:
    """``share`` is what one identity may have of a pool, 0 to 1. `Pool.waiting` has who waits, and until when."""

    def __init__(self, share: float, sessions: Sessions, quarantine: Quarantine) -> None:
        self.share = share
        self._sessions = sessions
        self._quarantine = quarantine

    def held_by(self, owner: str, pool: Pool) -> int:
        """How many pages of the pool an identity has, or keeps from others."""
        live = sum(session.held_pages for session in self._sessions.of(owner) if session.pool_id == pool.id)
        return live + self._quarantine.kept_by(owner, pool)

    def most(self, session: Session, pool: Pool, now: float) -> int | None:
        """How many pages the session may have for now; None when nobody waits for what its identity would take."""
        for owner in [owner for owner, until in pool.waiting.items() if until <= now]:
            del pool.waiting[owner]
        # Rounded first, so that a share of 0.29 of 100 pages is 29.
        allowed = int(round(pool.table.total * self.share, 6))
        others = (owner for owner in pool.waiting if owner != session.owner)
        if self.share >= 1 or not any(self.held_by(owner, pool) < allowed for owner in others):
            return None
        return max(0, allowed - self.held_by(session.owner, pool) + session.held_pages)

    @staticmethod
    def waits(session: Session, pool: Pool, now: float) -> None:
        """A demand of the session was refused for want of pages."""
        pool.waiting[session.owner] = now + WAITS_S
