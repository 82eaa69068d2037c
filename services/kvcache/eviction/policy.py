"""The eviction policies.

A policy is an ``LruQueue`` or a subclass. It is notified when a page is cached (``push``), hit (``discard``) or evicted
(``evict``), and chooses the next page to evict (``victim``). Every policy must maintain an invariant that keeps the
prefix index exact: **a victim has no cached continuation.**
"""

from __future__ import annotations

from services.kvcache.eviction.density import DensityQueue
from services.kvcache.eviction.lru import Links, LruQueue

#: Least recently used, and least valuable by expected hits.
POLICIES = ("lru", "density")


def policy_name(text: str) -> str:
    """Validate a policy's name. Raises ValueError."""
    if text not in POLICIES:
        raise ValueError(f"expected one of {', '.join(POLICIES)}")
    return text


def make_queue(policy: str, total: int, links: Links) -> LruQueue:
    """The eviction queue of a pool of ``total`` pages. Raises ValueError for an unknown policy."""
    return DensityQueue(total, links) if policy_name(policy) == "density" else LruQueue(total)
