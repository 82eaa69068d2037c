"""Looks at the services all the while: Fsck, checksums, the balance of pages, memory and descriptors."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field

import grpc

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.chaos.cluster import Cluster, uses
from tests.chaos.schedule import DAEMON
from tests.chaos.verdict import Verdict

EVERY_S = 1.0
#: More descriptors than a service had when it first served, after all clients have left.
MORE_DESCRIPTORS = 24
#: A process is warm after that time: its caches, its allocator and gRPC's threads have the size that they keep.
WARM_S = 60.0
#: What memory may grow by beyond that: so many bytes, and so many a second. Far less than a leak of a page table's
#: entry a request, far more than what the bounded tables (removed ids, events) still fill up by.
GROWTH_BYTES, GROWTH_BYTES_S = 24 << 20, 8 << 10


@dataclass
class Series:
    """Memory and descriptors of one process: ``(second of the run, bytes, descriptors)``."""

    points: list[tuple[float, int, int]] = field(default_factory=list)

    def growth(self) -> tuple[float, float] | None:
        """Bytes it grew by once warm, and over how many seconds; None of a process that did not live long enough."""
        if not self.points:
            return None
        warm = [point for point in self.points if point[0] >= self.points[0][0] + WARM_S]
        part = len(warm) // 5
        if part < 4:
            return None
        first, last = warm[:part], warm[-part:]
        grown = statistics.median(point[1] for point in last) - statistics.median(point[1] for point in first)
        return grown, last[0][0] - first[0][0]


def leak(name: str, series: Series) -> str:
    """What is wrong with how a process's memory grew; "" if nothing is, or it did not live long enough."""
    found = series.growth()
    if found is None or found[0] <= GROWTH_BYTES + GROWTH_BYTES_S * found[1]:
        return ""
    return f"{name} grew by {found[0] / 2**20:.1f} MiB in {found[1]:.0f} s"


def unbalanced(pool: pb.PoolStats) -> str:
    """What is wrong with a pool's counts; "" if nothing is."""
    total = pool.free_pages + pool.held_pages + pool.cached_pages + pool.quarantined_pages
    if total != pool.total_pages or pool.never_used_pages + pool.recycled_pages != pool.free_pages:
        return f"the pages do not add up: {pool}"
    return ""


class Observer:
    """Call ``watch`` as a task, and ``settle`` when everything is over."""

    def __init__(self, cluster: Cluster, verdict: Verdict) -> None:
        self._cluster, self._verdict = cluster, verdict
        self.series: dict[str, Series] = {}
        self._corrupted = 0
        self.pages: list[tuple[float, int, int, int, int]] = []  # second, free, held, cached, quarantined

    async def watch(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            self.look_at_processes()
            await self._look_at_pages(5.0)
            await asyncio.sleep(EVERY_S)

    def look_at_processes(self) -> None:
        """Note what each process uses, and find those that died."""
        for node in self._cluster.nodes.values():
            if not node.lock.locked():
                node.check()
        for name, pid in self._cluster.pids().items():
            if found := uses(pid):
                self.series.setdefault(name, Series()).points.append((self._verdict.now_s(), *found))

    async def _look_at_pages(self, timeout_s: float, *, deep: bool = False) -> list[pb.PoolStats]:
        try:
            fsck = await self._cluster.cache.Fsck(pb.FsckRequest(deep=deep), timeout=timeout_s)
            stats = await self._cluster.cache.GetStats(pb.GetStatsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            self._verdict.count("looks in vain")  # it is down, or paused
            return []
        self._verdict.count("looks")
        for violation in fsck.violations:
            self._verdict.find("fsck", violation)
        for pool in stats.pools:
            if wrong := unbalanced(pool):
                self._verdict.find("balance", wrong)
            if pool.corrupted_pages > self._corrupted:
                self._verdict.find("corrupted", f"{pool.corrupted_pages} published pages have changed")
            self._corrupted = pool.corrupted_pages
        if stats.pools:
            pool = stats.pools[0]
            now = (self._verdict.now_s(), pool.free_pages, pool.held_pages, pool.cached_pages, pool.quarantined_pages)
            self.pages.append(now)
        return list(stats.pools)

    async def settle(self, timeout_s: float) -> None:
        """Wait until nothing is held and only the engines' sessions are left, then until all pages are free."""
        until = self._verdict.now_s() + timeout_s
        while True:
            pools = await self._look_at_pages(20.0)
            busy = [pool for pool in pools if pool.held_pages or pool.quarantined_pages or pool.active_sequences]
            sessions = sum(pool.sessions for pool in pools)
            if pools and not busy and sessions == sum(not name.startswith(DAEMON) for name in self._cluster.pids()):
                break
            if self._verdict.now_s() > until:
                self._verdict.find("leak", f"{timeout_s:g} s after the end: {sessions} sessions, pools {pools}")
                return
            await asyncio.sleep(0.2)
        await self._look_at_pages(20.0, deep=True)
        for pool in pools:
            request = pb.EvictPagesRequest(pool_id=pool.pool_id, include_retained=True)
            await self._cluster.cache.EvictPages(request, timeout=20.0)
        for pool in await self._look_at_pages(20.0):
            if pool.free_pages != pool.total_pages:
                self._verdict.find(
                    "leak", f"{pool.total_pages - pool.free_pages} pages are not free at the end: {pool}"
                )

    def judge(self, baselines: dict[str, int]) -> None:
        """Find what leaked: memory of any process, and descriptors of those that still live, by their first counts."""
        for name, series in self.series.items():
            if wrong := leak(name, series):
                self._verdict.find("memory", wrong)
        for name, pid in self._cluster.pids().items():
            found, first = uses(pid), baselines.get(name)
            if found and first is not None and found[1] > first + MORE_DESCRIPTORS:
                self._verdict.find("descriptors", f"{name} began with {first} descriptors and ended with {found[1]}")
        for name in (DAEMON, *(other for other in self._cluster.nodes if other != DAEMON)):
            for line in self._cluster.nodes[name].complaints():
                self._verdict.find("logged", line)
