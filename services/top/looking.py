"""Asks the daemon and the engines over gRPC, and compares with what they said before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.common import rpc
from services.top.view import EngineView, PoolView, SequenceView, SessionView, TierView, View

#: Seconds that an answer may take.
CALL_S = 2.0

#: Sequences requested: the most that one call lists.
MOST_SEQUENCES = 1000


class Looker:
    """Keeps a channel to the daemon and to each engine; ``look`` never raises for what they do."""

    def __init__(self, kvcache: str, engines: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._target = kvcache
        self._clock = clock
        self._channels = [grpc.insecure_channel(target) for target in (kvcache, *engines)]
        self._cache = kvcache_pb2_grpc.KvCacheServiceStub(self._channels[0])
        self._engines = [
            (target, engine_pb2_grpc.EngineServiceStub(channel))
            for target, channel in zip(engines, self._channels[1:], strict=True)
        ]
        self._models: dict[str, str] = {}
        self._pools_before: dict[str, kvcache_pb2.PoolStats] = {}
        self._tiers_before: dict[int, kvcache_pb2.TierStats] = {}
        self._engines_before: dict[str, engine_pb2.GetStatsResponse] = {}
        self._epoch = 0
        self._looked_at: float | None = None
        self._callers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="top")

    def close(self) -> None:
        """Close the channels."""
        self._callers.shutdown(cancel_futures=True)
        for channel in self._channels:
            channel.close()

    def look(self) -> View:
        """Everything now. Blocks for a few seconds at most."""
        now = self._clock()
        passed = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        asked = [self._callers.submit(self._look_at, target, stub, passed) for target, stub in self._engines]
        view = self._look_at_daemon(passed)
        view.engines.extend(answer.result() for answer in asked)
        return view

    def _look_at_daemon(self, passed: float) -> View:
        try:
            stats = self._cache.GetStats(kvcache_pb2.GetStatsRequest(), timeout=CALL_S)
            listed = self._cache.ListSequences(
                kvcache_pb2.ListSequencesRequest(limit=MOST_SEQUENCES), timeout=CALL_S
            ).sequences
        except grpc.RpcError as failure:
            self._pools_before.clear()
            return View(self._target, trouble=rpc.error_from(failure).message)
        if stats.epoch != self._epoch:
            self._pools_before.clear()
            self._tiers_before.clear()
        names = {one.session_handle: one.engine_name or one.client_name or "?" for one in stats.sessions}
        view = View(
            self._target,
            stats.epoch,
            stats.uptime.ToNanoseconds() / 1e9,
            [_pool(pool, self._pools_before.get(pool.pool_id), passed) for pool in stats.pools],
            [*map(_session, stats.sessions), *map(_lost, stats.lost_sessions)],
            [_sequence(one, names.get(one.session_handle, "")) for one in listed],
            sum(pool.active_sequences for pool in stats.pools),
            tiers=[_tier(tier, self._tiers_before.get(tier.tier), passed) for tier in stats.tiers],
        )
        self._tiers_before = {tier.tier: tier for tier in stats.tiers}
        self._epoch = stats.epoch
        self._pools_before = {pool.pool_id: pool for pool in stats.pools}
        return view

    def _look_at(self, target: str, stub: engine_pb2_grpc.EngineServiceStub, passed: float) -> EngineView:
        try:
            if target not in self._models:
                model = stub.GetModel(engine_pb2.GetModelRequest(), timeout=CALL_S)
                self._models[target] = model.model_id
            now = stub.GetStats(engine_pb2.GetStatsRequest(), timeout=CALL_S)
        except grpc.RpcError as failure:
            self._engines_before.pop(target, None)
            self._models.pop(target, None)  # another may come back
            return EngineView(target, trouble=rpc.error_from(failure).message)
        before = self._engines_before.get(target, now)
        if now.generated_tokens < before.generated_tokens:
            before = now
        self._engines_before[target] = now
        firsts = now.first_tokens - before.first_tokens
        took = (now.first_token_time.ToNanoseconds() - before.first_token_time.ToNanoseconds()) / 1e9
        return EngineView(
            target,
            self._models[target],
            now.running_requests,
            now.queued_requests,
            now.queue_limit,
            took / firsts if firsts else None,
            _rate(now.generated_tokens - before.generated_tokens, passed),
            now.preemptions,
            now.recoveries,
            now.draining,
        )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _pool(now: kvcache_pb2.PoolStats, before: kvcache_pb2.PoolStats | None, passed: float) -> PoolView:
    if before is None or now.granted_pages < before.granted_pages:
        before = now  # the first look, or another pool of this name
    return PoolView(
        now.pool_id,
        now.free_pages,
        now.held_pages,
        now.cached_pages - now.retained_pages,
        now.retained_pages,
        now.quarantined_pages,
        _share(now.hit_tokens - before.hit_tokens, now.lookup_tokens - before.lookup_tokens),
        _share(now.hit_tokens, now.lookup_tokens),
        _rate(now.granted_pages - before.granted_pages, passed),
        _rate(now.evicted_pages + now.expired_pages - before.evicted_pages - before.expired_pages, passed),
        now.filling_pages,
    )


def _tier(now: kvcache_pb2.TierStats, before: kvcache_pb2.TierStats | None, passed: float) -> TierView:
    before = now if before is None else before
    return TierView(
        "host" if now.tier == kvcache_pb2.TIER_HOST else "outer",
        now.pages,
        now.used_bytes,
        now.capacity_bytes,
        _share(now.found_pages - before.found_pages, now.looked_up_pages - before.looked_up_pages),
        _rate(now.stored_bytes - before.stored_bytes, passed),
        _rate(now.fetched_bytes - before.fetched_bytes, passed),
        now.failed_pages,
        "" if now.available else now.detail or "not used yet",
    )


def _session(one: kvcache_pb2.SessionStats) -> SessionView:
    return SessionView(
        one.session_handle,
        one.engine_name or one.client_name or "?",
        one.owner,
        one.pool_id,
        one.sequences,
        one.held_pages,
        one.lease.ToNanoseconds() / 1e9,
        one.ttl.ToNanoseconds() / 1e9,
        "" if one.attached else "attaching",
    )


def _lost(one: kvcache_pb2.LostSession) -> SessionView:
    fence = kvcache_pb2.Fence.Name(one.fence).removeprefix("FENCE_").lower()
    name = one.client_name or "?"
    return SessionView(one.session_handle, name, "", one.pool_id, 0, one.quarantined_pages, 0.0, 0.0, f"lost: {fence}")


def _sequence(one: kvcache_pb2.Sequence, session: str) -> SequenceView:
    return SequenceView(
        one.sequence_id,
        session,
        one.age.ToNanoseconds() / 1e9,
        one.idle.ToNanoseconds() / 1e9,
        one.total_tokens,
        one.total_pages,
        one.cached_tokens,
    )
