"""A service's metrics as Prometheus sees them, and which of them something moves."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests import polling

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """Samples by name and labels, and the family that each sample name is of, named as in the docs."""

    samples: dict[tuple[str, Labels], float]
    families: dict[str, str]

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 when there is none yet."""
        return self.samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each sample of that name."""
        return [dict(labels) for found, labels in self.samples if found == name]

    def own(self) -> set[str]:
        """Families of this project."""
        return {family for family in self.families.values() if family.startswith("rocmforge_")}

    def moved_since(self, before: Scrape) -> set[str]:
        """Families with a sample that is another than before."""
        keys = self.samples.keys() | before.samples.keys()
        changed = {
            name for name, labels in keys if self.samples.get((name, labels)) != before.samples.get((name, labels))
        }
        return {(self.families | before.families)[name] for name in changed}


NOTHING = Scrape({}, {})


def until(look: Callable[[], Scrape], name: str, value: float, **labels: str) -> Scrape:
    """Look until a sample is what it must become: a call that is refused is counted when its caller knows already."""
    return polling.until(lambda: seen if (seen := look()).value(name, **labels) == value else None, f"{name} {value}")


def read(address: str, accept: str = "text/plain") -> str:
    """What the endpoint answers."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with _DIRECT.open(request, timeout=30) as answer:
        return str(answer.read().decode())


def scrape(address: str) -> Scrape:
    """All metrics there are."""
    samples: dict[tuple[str, Labels], float] = {}
    families: dict[str, str] = {}
    for family in text_string_to_metric_families(read(address)):
        name = family.name + ("_total" if family.type == "counter" else "")
        families[name] = name
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            families[sample.name] = name
    return Scrape(samples, families)
