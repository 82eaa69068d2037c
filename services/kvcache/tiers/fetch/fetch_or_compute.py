"""What an opening is answered while lower tiers have pages of its prompt: to ask again, or that it can be opened."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import count

from services.common.errors import PagesFilling, ServiceError
from services.kvcache import slices
from services.kvcache.pool.sequence import digest_prompt
from services.kvcache.slices import Work
from services.kvcache.tiers.counts import HOST, OUTER, MovedCounts
from services.kvcache.tiers.digests import chain_digest
from services.kvcache.tiers.fetch.choice import Leg, arrival, worth_fetching
from services.kvcache.tiers.fetch.fetcher import Fetcher
from services.kvcache.tiers.fetch.fill import Fill
from services.kvcache.tiers.fetch.lookups import Lookups
from services.kvcache.tiers.fetch.waits import Key, Waits
from services.kvcache.tiers.host.host_tier import HostTier
from services.kvcache.tiers.pool_tiers import PoolTiers

#: Seconds after which to ask again: at least, and at most.
_SOONEST_S, _LATEST_S = 0.001, 0.25


class FetchOrCompute:
    """Decides page by page whether to fetch or to compute, and begins fills.

    An engine that does not say how fast it prefills is taken to do ``default_speed`` tokens a second.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        host: HostTier | None,
        lookups: Lookups,
        counts: MovedCounts,
        default_speed: float,
        clock: Callable[[], float],
    ) -> None:
        self._fetcher = fetcher
        self._host = host
        self._lookups = lookups
        self._counts = counts
        self._default_speed = default_speed
        self._clock = clock
        self._waits = Waits()
        self._numbers = count(1)

    def look(
        self, lower: PoolTiers, key: Key, prompt: array[int], salt: str, wait_s: float | None, speed: float
    ) -> Work[ServiceError | None]:
        """See ``LowerTiers.look``."""
        pool, size, now = lower.pool, lower.page_size, self._clock()
        whole = (len(prompt) - 1) // size
        if whole <= 0 or not lower.is_mapped:
            return None
        name = digest_prompt(prompt, salt) if wait_s is not None else b""
        until = self._waits.until(key, name)
        if until is not None and until <= now:
            return None
        found, last = yield from self._matched(lower, prompt, salt)
        if found >= whole:
            return None
        chunk = prompt[found * size : (found + 1) * size].tobytes()
        compute_s = size / (speed or self._default_speed)
        ahead = self._fetcher.of(chain_digest(last, chunk))
        if ahead is not None and wait_s is not None:
            left = [self._leg(HOST, ahead.planned - ahead.head, lower.page_bytes)]
            if not ahead.waited:
                ahead.until = now
            ahead.waited = True
            refusal = self._refusal(key, name, wait_s, ahead.planned * compute_s, arrival(left, left[0].pages))
            ahead.until = max(ahead.until, self._waits.until(key, name) or now)
            return refusal
        if ahead is not None:
            return None
        chunks, digests = list[bytes](), list[bytes]()
        digest, host = last, 0
        for at in range(found, whole):
            chunk = prompt[at * size : (at + 1) * size].tobytes()
            digest = chain_digest(digest, chunk)
            chunks.append(chunk)
            digests.append(digest)
            stored = self._host is not None and self._host.find(digest) is not None
            if stored and host == len(digests) - 1:
                host += 1
            if host < len(digests) and (wait_s is None or not self._lookups.is_up):
                break
            if len(digests) >= host + self._lookups.most:
                break
            if len(digests) % slices.ENTRIES == 0:
                yield None
        beyond = digests[host:] if wait_s is not None and self._lookups.is_up else []
        if len(beyond) * compute_s <= self._fetcher.rates[OUTER].latency(self._clock()):
            beyond = []  # computed before anybody could say whether they are there
        outer = self._lookups.known(beyond, self._clock()) if beyond else 0
        if until is None:
            self._count(HOST, whole - found, host)
        if outer is None:
            if wait_s is None or not self._lookups.ask(beyond, self._found, self._clock()):
                outer = 0
            else:
                soon = self._fetcher.rates[OUTER].latency(self._clock())
                return self._refusal(key, name, wait_s, len(digests) * compute_s, soon)
        legs = [self._leg(HOST, host, lower.page_bytes), self._leg(OUTER, outer, lower.page_bytes)]
        most = worth_fetching(legs, compute_s)
        if most < host + outer:
            rest = host + outer - most
            self._fetcher.regret.computed(rest * lower.page_bytes, rest * compute_s)
        # This sequence goes first: what is fetched for others takes free pages that it does not need.
        if not most or (wait_s is None and pool.table.clean_count < most + whole + 2 - found):
            return None
        fill = Fill(lower, next(self._numbers), salt, found, chunks[:most], digests[:most], self._clock())
        fill.compute_s = most * compute_s
        fill.waited = wait_s is not None
        if wait_s is not None:
            fill.until = self._clock() + min(wait_s, fill.compute_s)
        if not (yield from self._fetcher.begin(fill, prompt, last)):
            return None
        if wait_s is None:
            return None
        refusal = self._refusal(key, name, wait_s, fill.compute_s, arrival(legs, most))
        fill.until = max(fill.until, self._waits.until(key, name) or now)
        return refusal

    def _matched(self, lower: PoolTiers, prompt: array[int], salt: str) -> Work[tuple[int, bytes]]:
        """How many whole pages of the prompt the pool has, and the digest of the last of them, or of the root."""
        pool, found, last = lower.pool, list[int](), lower.root(salt)
        while True:
            more = pool.match(prompt, salt, slices.ENTRIES, behind=found)
            found += more
            if more:
                last = lower.digests[more[-1]]
            if len(more) < slices.ENTRIES:
                return len(found), last
            generation = pool.table.generation(found[-1])
            yield None
            if pool.table.generation(found[-1]) != generation or not pool.index.is_published(found[-1]):
                return len(found), last

    def _refusal(self, key: Key, name: bytes, wait_s: float, compute_s: float, arrives_s: float) -> ServiceError | None:
        now = self._clock()
        until = self._waits.until(key, name)
        if until is None:
            until = now + min(wait_s, compute_s)
            self._counts.waited_openings += 1
            self._waits.begin(key, name, until)
        if until <= now:
            return None
        after = min(max(_SOONEST_S, arrives_s), _LATEST_S, max(_SOONEST_S, until - now))
        return PagesFilling(
            f"sequence {key[1]!r}: pages of its prompt are being copied from a lower tier", retry_after_s=after
        )

    def _leg(self, tier: str, pages: int, page_bytes: int) -> Leg:
        rate, now = self._fetcher.rates[tier], self._clock()
        return Leg(pages, rate.latency(now), page_bytes / max(1.0, rate.bandwidth(now)))

    def _found(self, asked: int, there: int, seconds: float | None) -> None:
        self._count(OUTER, asked, there)
        if seconds is not None:  # what was not answered says nothing of how fast answers are
            self._fetcher.rates[OUTER].measured(seconds, 0, 0.0, self._clock())

    def _count(self, tier: str, asked: int, found: int) -> None:
        self._counts.tiers[tier].looked_up_pages += asked
        self._counts.tiers[tier].found_pages += found
