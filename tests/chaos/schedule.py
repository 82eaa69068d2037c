"""Which fault comes when: a function of the seed, so that a run that failed can be made again."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

ENGINES = ("engine-1", "engine-2")
DAEMON = "daemon"
WIRES = ("wire-1", "wire-2")


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault: whom it may hit, how long it lasts (seconds, least and most), and how often it comes."""

    targets: tuple[str, ...]
    least_s: float
    most_s: float
    weight: int
    ends_process: bool = False


#: The lease of an engine, and what a lost one has before it is reported: both short enough to be slept through.
TTL_S, DRAIN_S = 3.0, 3.0

KINDS = {
    # Processes. What ends is started again after that time.
    "kill-engine": Kind(ENGINES, 0.1, 1.5, 4, ends_process=True),
    "kill-daemon": Kind((DAEMON,), 0.1, 1.5, 2, ends_process=True),
    "drain-engine": Kind(ENGINES, 0.1, 1.0, 2, ends_process=True),
    "drain-daemon": Kind((DAEMON,), 0.1, 1.0, 1, ends_process=True),
    "pause-engine": Kind(ENGINES, 0.3, 1.5, 3),
    "pause-daemon": Kind((DAEMON,), 0.3, 2.0, 2),
    "lapse-engine": Kind(ENGINES, TTL_S + 0.5, TTL_S + 2.5, 2),
    "fence-engine": Kind(ENGINES, TTL_S + DRAIN_S + 1.0, TTL_S + DRAIN_S + 3.0, 2),
    # The bytes between an engine and the daemon.
    "delay": Kind(WIRES, 1.0, 4.0, 2),
    "half-open": Kind(WIRES, 1.0, 5.0, 2),
    "black-hole": Kind(WIRES, 1.0, 2.0, 2),
    "cut": Kind(WIRES, 0.1, 1.0, 3),
    # The calls between an engine and the daemon.
    "lose-requests": Kind(WIRES, 0.5, 3.0, 2),
    "lose-replies": Kind(WIRES, 0.5, 3.0, 2),
    "repeat-calls": Kind(WIRES, 1.0, 4.0, 2),
    "replay-calls-late": Kind(WIRES, 1.0, 4.0, 2),
    # A caller who means ill.
    "hostile": Kind((DAEMON, *ENGINES), 0.5, 3.0, 5),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: it begins ``at_s`` seconds after the faults began, and ends ``lasts_s`` later."""

    number: int
    at_s: float
    kind: str
    target: str
    lasts_s: float
    seed: int  # of whatever it draws itself

    def __str__(self) -> str:
        return f"#{self.number} {self.kind} on {self.target} at {self.at_s:.1f} s for {self.lasts_s:.1f} s"


def faults(
    seed: int, seconds: float, kinds: Collection[str] = frozenset(KINDS), *, processes_until_s: float | None = None
) -> list[Fault]:
    """The faults of a run of ``seconds``, of these kinds, a second or two apart. They may overlap.

    After ``processes_until_s`` no process is ended, so that the memory of those that live can be watched. Raises
    ValueError for a kind that there is not.
    """
    if unknown := set(kinds) - KINDS.keys():
        raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    draw = random.Random(f"faults {seed}")
    found = list[Fault]()
    at = draw.uniform(0.2, 1.0)
    while at < seconds:
        may_end = processes_until_s is None or at < processes_until_s
        names = [name for name in KINDS if name in kinds and (may_end or not KINDS[name].ends_process)]
        if not names:
            break
        name = draw.choices(names, [KINDS[one].weight for one in names])[0]
        kind = KINDS[name]
        lasts = draw.uniform(kind.least_s, kind.most_s)
        found.append(Fault(len(found), at, name, draw.choice(kind.targets), lasts, draw.randrange(1 << 32)))
        at += draw.uniform(0.4, 2.4)
    return found
