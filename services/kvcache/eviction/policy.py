"""Which cached page goes first: the policies to choose from.

A policy is an ``LruQueue`` or extends it: it is told what is cached (``push``), asked for again (``discard``) and given
up (``evict``), and names the next page to give up (``victim``). What every policy must keep, for the prefix index to
stay exact: **a victim has no cached continuation.**
"""

from __future__ import annotations

from services.kvcache.eviction.density import DensityQueue, Links
from services.kvcache.eviction.lru import LruQueue

#: Least recently used, and least valuable.
POLICIES = ("lru", "density")


def policy_name(text: str) -> str:
    """A policy's name. Raises ValueError."""
    if text not in POLICIES:
        raise ValueError(f"expected one of {', '.join(POLICIES)}")
    return text


def make_queue(policy: str, total: int, links: Links) -> LruQueue:
    """The eviction queue of a pool of ``total`` pages. Raises ValueError for an unknown policy."""
    return DensityQueue(total, links) if policy_name(policy) == "density" else LruQueue(total)
