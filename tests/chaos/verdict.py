"""What is held against the services: tokens that differ, violations, leaks. Each is noted with what led to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.schedule import Fault

#: Of the faults before a finding, how many are told.
HISTORY = 12

Expected = Mapping[tuple[int, int], tuple[Sequence[int], str]]  # (request, sample) -> tokens, text


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be. ``history`` are the faults before it, the latest last."""

    at_s: float
    what: str
    detail: str
    history: tuple[str, ...]


def difference(expected: Sequence[int], told: Sequence[int], *, whole: bool) -> str:
    """How tokens differ from what they should be; "" if they do not. Unless they are the whole, more may follow."""
    for at, (right, wrong) in enumerate(zip(expected, told, strict=False)):
        if right != wrong:
            return (
                f"token {at} is {wrong}, not {right} (of {len(expected)}; before it {list(told[max(0, at - 3) : at])})"
            )
    if len(told) > len(expected):
        return f"{len(told)} tokens, not {len(expected)}"
    if whole and len(told) < len(expected):
        return f"ended after {len(told)} of {len(expected)} tokens"
    return ""


@dataclass
class Verdict:
    """Collects findings, and the history of faults that is reported with them."""

    seed: int
    began: float = field(default_factory=time.monotonic)
    findings: list[Finding] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def count(self, what: str, more: int = 1) -> None:
        """One more of what happens all the time."""
        self.counts[what] = self.counts.get(what, 0) + more

    def did(self, fault: Fault, what: str) -> None:
        """Note what was done to the services."""
        self.history.append(f"{self.now_s():.2f} s: #{fault.number} {fault.kind} on {fault.target} {what}")

    def find(self, what: str, detail: str) -> None:
        """Hold something against the services."""
        self.findings.append(Finding(self.now_s(), what, detail, tuple(self.history[-HISTORY:])))

    def compare(
        self,
        where: str,
        expected: Expected,
        key: tuple[int, int],
        tokens: Sequence[int],
        *,
        whole: bool,
        text: str | None = None,
    ) -> bool:
        """Whether the tokens of a sample are right so far, or as a ``whole``, and its whole text if that is given."""
        right, right_text = expected[key]
        wrong = difference(right, tokens, whole=whole)
        if not wrong and text is not None and text != right_text:
            wrong = f"the text is {text[-80:]!r}, not {right_text[-80:]!r}"
        if wrong:
            self.find("wrong tokens", f"request {key[0]}, sample {key[1]}, {where}: {wrong}")
        return not wrong

    def told(self) -> str:
        """What was found, for people; "" if nothing was."""
        parts = []
        for finding in self.findings[:20]:
            lines = "".join(f"\n    {line}" for line in finding.history)
            parts.append(
                f"seed {self.seed}, {finding.at_s:.2f} s: {finding.what}: {finding.detail}\n  before it:{lines}"
            )
        if len(self.findings) > 20:
            parts.append(f"... and {len(self.findings) - 20} more")
        return "\n".join(parts)
