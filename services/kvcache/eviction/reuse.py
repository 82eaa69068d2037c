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

Pages of which a caller has said more are in a *class* (see ``hints``), and each class has levels of its own; a class
and a level are a *kind*. The prior of a class is what is known of its level over all classes, so a new class begins as
the average page does. Class 0, of which nothing was said, learns from its own stays alone.

Before any data, the prior hazard is the same at every level and for each doubling of the age. A page's value then only
falls with age, which is LRU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import repeat

from services.kvcache.eviction.hints import CLASSES

#: Levels: content that was never reused, reused once, two or three times, or more often.
LEVELS = 4
#: Kinds: a level for each class. The kinds below LEVELS are the levels of class 0.
KINDS = CLASSES * LEVELS

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
#: The same for a class other than 0. Its pages come and go a whole session at a time, so it takes more of them.
CLASS_HALF_LIFE = 4096

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
        self._prior = [_PRIOR_CHANCE_YOUNG, *repeat(PRIOR_CHANCE, self._bins - 1)]
        self._threshold = int(min(1.0, FOLLOWED / self._horizon) * 0x100000000)
        # How many classes have had each number before: stays of those count no more.
        self._serials = [0] * CLASSES
        #: Link -> start of its stay, 16 bits of its class's serial, and its kind; earliest first.
        self._stays: OrderedDict[int, int] = OrderedDict()
        # Ended stays, by kind and age at the end; the last bin is for those that outlived the horizon.
        self._ended = [[0.0] * (self._bins + 1) for _ in range(KINDS)]
        self._hits = [[0.0] * self._bins for _ in range(KINDS)]
        self._recently_ended = [0] * CLASSES
        self._interval = 1 + int(min(FOLLOWED, self._horizon)) // 2
        self._values: list[list[float]] = []
        self._due = 0
        self.refresh(0)

    def __len__(self) -> int:
        """The number of stays being followed."""
        return len(self._stays)

    def value(self, kind: int, age: int) -> float:
        """Expected hits per page and unit of time for keeping a page of this kind and age."""
        return self._values[kind][bisect_right(self._edges, age)]

    def forget(self, number: int) -> None:
        """Drop what was learned of a class that has ended."""
        for kind in range(number * LEVELS, number * LEVELS + LEVELS):
            self._ended[kind][:] = repeat(0.0, self._bins + 1)
            self._hits[kind][:] = repeat(0.0, self._bins)
        self._recently_ended[number] = 0
        self._serials[number] = (self._serials[number] + 1) & 0xFFFF

    def began(self, link: int, kind: int, now: int) -> None:
        """Record that a page was cached. If its content was cached before and evicted, that stay ends now."""
        if now >= self._due:
            self.refresh(now)
        if link & 0xFFFFFFFF >= self._threshold:
            return
        self.returned(link, now)
        self._stays[link] = (now << 16 | self._serials[kind // LEVELS]) * KINDS + kind
        while True:
            first, stay = next(iter(self._stays.items()))
            if len(self._stays) <= FOLLOWED and now - (stay // KINDS >> 16) <= self._horizon:
                return
            del self._stays[first]
            self._end(stay, now, hit=False)

    def returned(self, link: int, now: int) -> None:
        """Record a request for the content: its stay, if followed, ends in a hit."""
        if link & 0xFFFFFFFF < self._threshold and (stay := self._stays.pop(link, None)) is not None:
            self._end(stay, now, hit=True)

    def _kind_and_age(self, stay: int, now: int) -> tuple[int | None, int]:
        """The kind is None when its class has ended."""
        rest, kind = divmod(stay, KINDS)
        current = rest & 0xFFFF == self._serials[kind // LEVELS]
        return kind if current else None, bisect_right(self._edges, now - (rest >> 16))

    def _end(self, stay: int, now: int, *, hit: bool) -> None:
        kind, age = self._kind_and_age(stay, now)
        if kind is None:
            return
        self._ended[kind][age] += 1
        number = kind // LEVELS
        self._recently_ended[number] += 1
        if self._recently_ended[number] >= (CLASS_HALF_LIFE if number else HALF_LIFE):
            self._recently_ended[number] = 0
            for one in range(number * LEVELS, number * LEVELS + LEVELS):
                for counts in (self._ended[one], self._hits[one]):
                    counts[:] = [count / 2 for count in counts]
        if hit and age < self._bins:
            self._hits[kind][age] += 1

    def refresh(self, now: int) -> None:
        """Recompute the values. Called automatically, so rarely that it costs a stay or two per page cached."""
        self._due = now + self._interval
        running: dict[int, list[int]] = {}
        for stay in self._stays.values():
            kind, age = self._kind_and_age(stay, now)
            if kind is not None:
                running.setdefault(kind, [0] * (self._bins + 1))[age] += 1
        none = [0] * (self._bins + 1)
        # Beyond the horizon a page is worth nothing, and age alone decides.
        values = []
        for level in range(LEVELS):
            counts = self._ended[level], self._hits[level], running.get(level, none)
            values.append([*self._index(list(self._chances(*counts, self._prior))), 0.0])
        self._values = values * CLASSES
        heard = [kind for kind in range(LEVELS, KINDS) if kind in running or any(self._ended[kind])]
        for level in {kind % LEVELS for kind in heard}:
            self._learn_classes(level, [kind for kind in heard if kind % LEVELS == level], running, none)

    def _learn_classes(self, level: int, heard: list[int], running: dict[int, list[int]], none: list[int]) -> None:
        """The values of this level in every class but 0, of which those that were ``heard`` have counts."""
        every = [level, *heard]
        ended = [sum(column) for column in zip(*(self._ended[kind] for kind in every), strict=True)]
        hits = [sum(column) for column in zip(*(self._hits[kind] for kind in every), strict=True)]
        still = [sum(column) for column in zip(*(running.get(kind, none) for kind in every), strict=True)]
        prior = list(self._chances(ended, hits, still, self._prior))
        average = [*self._index(prior), 0.0]
        for kind in range(LEVELS + level, KINDS, LEVELS):
            self._values[kind] = average
        for kind in heard:
            counts = self._ended[kind], self._hits[kind], running.get(kind, none)
            self._values[kind] = [*self._index(list(self._chances(*counts, prior))), 0.0]

    def _chances(
        self, ended: list[float], hits: list[float], running: list[int], prior: list[float]
    ) -> Iterator[float]:
        """For each age bin, the probability that a stay which reaches it ends in a hit there (the hazard)."""
        reached = sum(ended) + sum(running)
        for age in range(self._bins):
            # Running stays are, on average, halfway through their bin.
            at_risk = reached - running[age] / 2
            yield min(1.0, (hits[age] + PRIOR_STAYS * prior[age]) / (at_risk + PRIOR_STAYS))
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
