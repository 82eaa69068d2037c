"""What a cached page is worth, learned from the traffic: expected hits for the room it takes.

Time here is counted in pages cached, so that it neither stops at night nor depends on the machine. A *stay* of a page
begins when it is cached and ends when its content is asked for again, whether it was still there or not. Stays are
told apart by *level*: how often the content came back before.

- A sample of stays is followed, in the cache and out of it. It is a sample by hash of the link, so that a page is in
  it with all its stays or with none: SHARDS (Waldspurger, Park, Garthwaite, Ahmad, FAST 2015), its fixed-size form.
- They give the chance, by level and age, that a page that was not asked for yet will be in the next while. Stays that
  have not ended yet count for the ages they have reached: the product-limit estimate (Kaplan and Meier, 1958).
- A page's value is the best ratio, over all further times to keep it, of the chance of a hit to the expected time
  kept: the index of Gittins (1979). Ranking pages by hits over space and time is LHD's (Beckmann, Chen, Cidon,
  NSDI 2018), which takes the whole remaining life instead of the best part of it.

Before anything is seen, the chance is the same at every level and for each doubling of the age. Then a page's value
falls with its age alone: least recently used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator

#: Levels: content that never came back, came back once, two or three times, more often.
LEVELS = 4

#: Ages are told apart from a 16th of the pool's size (younger is as good as new to it) ...
FINEST = 1 / 16
#: ... to 16 times its size. Content that stays away longer is as good as gone: no policy could have kept it.
HORIZON = 16
#: Steps for each doubling in between: an age is known to within 41 %.
STEPS = 2

#: Stays followed at a time, whatever the pool's size: enough to tell chances of a few percent apart.
FOLLOWED = 4096
#: The past's weight halves each time so many stays have ended: a few times in a horizon, so that what was learned from
#: one kind of traffic does not stay long in the way of the next.
HALF_LIFE = 1024

#: What is assumed before anything is seen: it weighs as much as 8 stays, of which one in ten ends in each step.
PRIOR_STAYS, PRIOR_CHANCE = 8.0, 0.1
# The first bin is that much wider than the second: as likely for its width, or being young would look like a fault.
_PRIOR_CHANCE_YOUNG = PRIOR_CHANCE / (2 ** (1 / STEPS) - 1)


class ReuseModel:
    """The values of pages in a pool of ``total``. Every method is O(1), amortised; memory is bounded."""

    def __init__(self, total: int) -> None:
        steps = 8 * STEPS  # FINEST to HORIZON are eight doublings
        self._edges = [total * FINEST * 2 ** (step / STEPS) for step in range(steps + 1)]
        widths = [high - low for low, high in zip([0.0, *self._edges], self._edges, strict=False)]
        self._halves = [width / 2 for width in widths]
        self._bins = len(self._edges)
        self._horizon = self._edges[-1]
        # A link is followed when the low half of its hash is below this: so many that the stays begun within the
        # horizon are about as many.
        self._threshold = int(min(1.0, FOLLOWED / self._horizon) * 0x100000000)
        #: Link -> when its stay began, times LEVELS, plus its level; earliest first.
        self._stays: OrderedDict[int, int] = OrderedDict()
        # Stays that ended, by level and age at the end; the last bin has those that outlived the horizon.
        self._ended = [[0.0] * (self._bins + 1) for _ in range(LEVELS)]
        self._hits = [[0.0] * self._bins for _ in range(LEVELS)]
        self._recently_ended = 0
        self._interval = 1 + int(min(FOLLOWED, self._horizon)) // 2
        self._values: list[list[float]] = []
        self._due = 0
        self.refresh(0)

    def __len__(self) -> int:
        """Stays being followed."""
        return len(self._stays)

    def value(self, level: int, age: int) -> float:
        """Expected hits for each page and unit of time spent on a page of this level and age."""
        return self._values[level][bisect_right(self._edges, age)]

    def began(self, link: int, level: int, now: int) -> None:
        """A page was cached. When its content was cached before and then lost, that stay has ended now."""
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
        """The content was asked for: its stay, if it is followed, has ended in a hit."""
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
        """Work the values out anew. Done by itself, so seldom that it costs a stay or two for each page cached."""
        self._due = now + self._interval
        running = [[0] * (self._bins + 1) for _ in range(LEVELS)]
        for stay in self._stays.values():
            began, level = divmod(stay, LEVELS)
            running[level][bisect_right(self._edges, now - began)] += 1
        # Beyond the horizon a page is worth nothing: there it goes by age alone.
        self._values = [[*self._index(list(self._chances(level, running[level]))), 0.0] for level in range(LEVELS)]

    def _chances(self, level: int, running: list[int]) -> Iterator[float]:
        """For each bin of age, the chance that a stay which reached it ends in a hit there."""
        ended, hits = self._ended[level], self._hits[level]
        reached = sum(ended) + sum(running)
        for age in range(self._bins):
            # Running stays are on average half way through their bin.
            at_risk = reached - running[age] / 2
            prior = PRIOR_CHANCE if age else _PRIOR_CHANCE_YOUNG
            yield min(1.0, (hits[age] + PRIOR_STAYS * prior) / (at_risk + PRIOR_STAYS))
            reached -= ended[age] + running[age]

    def _index(self, chances: list[float]) -> Iterator[float]:
        """Gittins's index of each bin."""
        for start in range(self._bins):
            best, alive, time = 0.0, 1.0, 0.0
            for chance, half in zip(chances[start:], self._halves[start:], strict=True):
                time += alive * half
                alive *= 1 - chance
                time += alive * half
                best = max(best, (1 - alive) / time)
            yield best
