"""The value of a cached page, learned from the traffic: expected hits per page and unit of time.

Time is measured in pages cached, so that it neither advances while the cache is idle nor depends on the machine. A
*stay* of a page begins when it is cached and ends when its content is requested again, whether it was still cached or
not. Stays are grouped by *level*: how often the content was reused before.

- A sample of stays is followed, inside the cache and out. It is sampled by the link's hash, so either all stays of a
  page are in it or none: the fixed-size form of SHARDS (Waldspurger, Park, Garthwaite, Ahmad, FAST 2015).
- The sample gives the hazard, by level and age: the probability that a page not yet requested will be requested within
  the next interval. Stays that have not ended count for the ages they have reached: the product-limit estimate (Kaplan
  and Meier, 1958).
- A page's value is the best ratio, over all times to keep it further, of the probability of a hit to the expected time
  kept: the index of Gittins (1979). LHD (Beckmann, Chen, Cidon, NSDI 2018) also ranks pages by hits over space and
  time, but over the whole remaining lifetime instead of the best part of it.

Before any data, the prior hazard is the same at every level and for each doubling of the age. A page's value then only
falls with age, which is LRU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator

#: Levels: content that was never reused, reused once, two or three times, or more often.
LEVELS = 4

#: Ages are resolved from 1/16 of the pool's size (anything younger counts as new) ...
FINEST = 1 / 16
#: ... to 16 times its size. Content that stays away longer counts as gone: no policy could have kept it.
HORIZON = 16
#: Bins per doubling in between: an age is known to within 41 %.
STEPS = 2

#: Stays followed at a time, whatever the pool's size: enough to distinguish probabilities of a few percent.
FOLLOWED = 4096
#: The weight of past data halves each time this many stays have ended: a few times per horizon, so that the model soon
#: adapts when the traffic changes.
HALF_LIFE = 1024

#: The prior: it weighs as much as 8 stays, one in ten of which ends in each bin.
PRIOR_STAYS, PRIOR_CHANCE = 8.0, 0.1
# The first bin is wider than the second by this factor. The prior is proportional to the width, since otherwise young
# pages would look less valuable.
_PRIOR_CHANCE_YOUNG = PRIOR_CHANCE / (2 ** (1 / STEPS) - 1)


class ReuseModel:
    """The values of pages in a pool of ``total`` pages. Every method is O(1) amortised; memory is bounded."""

    def __init__(self, total: int) -> None:
        steps = 8 * STEPS  # FINEST to HORIZON are eight doublings
        self._edges = [total * FINEST * 2 ** (step / STEPS) for step in range(steps + 1)]
        widths = [high - low for low, high in zip([0.0, *self._edges], self._edges, strict=False)]
        self._halves = [width / 2 for width in widths]
        self._bins = len(self._edges)
        self._horizon = self._edges[-1]
        # A link is followed if the low half of its hash is below this threshold, chosen so that about FOLLOWED stays
        # begin within a horizon.
        self._threshold = int(min(1.0, FOLLOWED / self._horizon) * 0x100000000)
        #: Link -> start of its stay, times LEVELS, plus its level; earliest first.
        self._stays: OrderedDict[int, int] = OrderedDict()
        # Ended stays, by level and age at the end; the last bin is for those that outlived the horizon.
        self._ended = [[0.0] * (self._bins + 1) for _ in range(LEVELS)]
        self._hits = [[0.0] * self._bins for _ in range(LEVELS)]
        self._recently_ended = 0
        self._interval = 1 + int(min(FOLLOWED, self._horizon)) // 2
        self._values: list[list[float]] = []
        self._due = 0
        self.refresh(0)

    def __len__(self) -> int:
        """The number of stays being followed."""
        return len(self._stays)

    def value(self, level: int, age: int) -> float:
        """Expected hits per page and unit of time for keeping a page of this level and age."""
        return self._values[level][bisect_right(self._edges, age)]

    def began(self, link: int, level: int, now: int) -> None:
        """Record that a page was cached. If its content was cached before and evicted, that stay ends now."""
        if now >= self._due:
            self.refresh(now)
        if link & 0xFFFFFFFF >= self._threshold:
            return
        self.returned(link, now)
        self._stays[link] = now * LEVELS + level
        while True:
            first, stay = next(iter(self._stays.items()))
            if len(self._stays) <= FOLLOWED and now - stay // LEVELS <= self._horizon:
                return
            del self._stays[first]
            self._end(stay, now)

    def returned(self, link: int, now: int) -> None:
        """Record a request for the content: its stay, if followed, ends in a hit."""
        if link & 0xFFFFFFFF < self._threshold and (stay := self._stays.pop(link, None)) is not None:
            level, age = self._end(stay, now)
            if age < self._bins:
                self._hits[level][age] += 1

    def _end(self, stay: int, now: int) -> tuple[int, int]:
        began, level = divmod(stay, LEVELS)
        age = bisect_right(self._edges, now - began)
        self._ended[level][age] += 1
        self._recently_ended += 1
        if self._recently_ended >= HALF_LIFE:
            self._recently_ended = 0
            for counts in (*self._ended, *self._hits):
                counts[:] = [count / 2 for count in counts]
        return level, age

    def refresh(self, now: int) -> None:
        """Recompute the values. Called automatically, so rarely that it costs a stay or two per page cached."""
        self._due = now + self._interval
        running = [[0] * (self._bins + 1) for _ in range(LEVELS)]
        for stay in self._stays.values():
            began, level = divmod(stay, LEVELS)
            running[level][bisect_right(self._edges, now - began)] += 1
        # Beyond the horizon a page is worth nothing, and age alone decides.
        self._values = [[*self._index(list(self._chances(level, running[level]))), 0.0] for level in range(LEVELS)]

    def _chances(self, level: int, running: list[int]) -> Iterator[float]:
        """For each age bin, the probability that a stay which reaches it ends in a hit there (the hazard)."""
        ended, hits = self._ended[level], self._hits[level]
        reached = sum(ended) + sum(running)
        for age in range(self._bins):
            # Running stays are, on average, halfway through their bin.
            at_risk = reached - running[age] / 2
            prior = PRIOR_CHANCE if age else _PRIOR_CHANCE_YOUNG
            yield min(1.0, (hits[age] + PRIOR_STAYS * prior) / (at_risk + PRIOR_STAYS))
            reached -= ended[age] + running[age]

    def _index(self, chances: list[float]) -> Iterator[float]:
        """The Gittins index of each bin."""
        for start in range(self._bins):
            best, alive, time = 0.0, 1.0, 0.0
            for chance, half in zip(chances[start:], self._halves[start:], strict=True):
                time += alive * half
                alive *= 1 - chance
                time += alive * half
                best = max(best, (1 - alive) / time)
            yield best
