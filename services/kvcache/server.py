"""The daemon as an object: its cache, its listeners, and the sweeper that expires leases."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
from collections.abc import Callable

import structlog

from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common.access.acl import open_way
from services.common.access.identity import Identity
from services.common.access.in_flight import InFlight
from services.common.access.policy import Policy
from services.common.call_stats import CallStats
from services.common.edge.reloading import reread
from services.common.errors import GpuError, InvalidConfiguration
from services.common.logs import configure_logging
from services.common.prometheus import Endpoint
from services.common.serving import Serving
from services.common.tracing.collector import tracing_to
from services.kvcache.api.limits import LIMITS
from services.kvcache.api.roles import ENGINE
from services.kvcache.api.servicer import SERVICE, KvCacheServicer
from services.kvcache.arena.device import DeviceArena, ReadChecksums
from services.kvcache.arena.host import FileArena, prepare_directory
from services.kvcache.arena.kernel_checksums import kernel_checksums
from services.kvcache.arena.room import Room, check_directory, check_gpus, check_host_cache
from services.kvcache.cache.cache import KvCache
from services.kvcache.config import GPU, Config
from services.kvcache.kvevents.publisher import KvEventPublisher
from services.kvcache.lease.process import ProcessTable
from services.kvcache.metrics import KvCacheMetrics
from services.kvcache.pool.arena import Arena
from services.kvcache.pool.layout import Layout, OpaqueLayout
from services.kvcache.presence import LoopWatch, PresentClock
from services.kvcache.scrub.scrubber import Scrubber
from services.kvcache.slices import Slices
from services.kvcache.tiering import Tiering
from services.version import VERSION

log = structlog.get_logger()

SWEEP_INTERVAL_S = 0.5


class Daemon:
    """Call ``start``, connect to ``bound``, call ``stop``. Tests run the same object on a free port.

    Without a ``clock`` time stands still while the event loop is away. With ``config.device`` gpu, raises
    InvalidConfiguration if there is no usable GPU.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] | None = None,
        load_runtime: Callable[[], Runtime] = Runtime.load,
        read_checksums: ReadChecksums = kernel_checksums,
    ) -> None:
        self.config = config
        self.epoch = secrets.randbits(64)
        self.read_checksums = read_checksums
        names = (f"{os.getpid()}-{self.epoch:016x}-{number}" for number in itertools.count())
        processes = ProcessTable()
        gpus = _gpus(load_runtime, config.limits.budget_bytes) if config.device == GPU else None

        def make_arena(layout: Layout, pages: int, canary_slots: int, device: int | None) -> Arena:
            arena: Arena
            if gpus is None or device is None:
                arena = FileArena(config.arena_dir, next(names), layout, pages, canary_slots)
                where = {"path": arena.file_path}
            else:
                arena = DeviceArena(gpus[device], layout, pages, canary_slots, self.read_checksums)
                where = {"device": str(device), "device_id": gpus[device].id}
            log.info("arena_made", **where, bytes=arena.size_bytes, pages=pages, layout=str(layout))
            return arena

        clock = PresentClock() if clock is None else clock
        work, self._owed = asyncio.Event(), asyncio.Event()
        self.cache = KvCache(
            config.limits,
            epoch=self.epoch,
            clock=clock,
            random_bytes=secrets.token_bytes,
            make_arena=make_arena,
            observe=processes.observe,
            devices=None if gpus is None else len(gpus),
            wake=work.set,
            wake_debts=self._owed.set,
        )
        self.tiering: Tiering | None = None
        if config.has_tiers:

            def make_slab(page_bytes: int, slots: int) -> FileArena:
                layout = OpaqueLayout(page_size=1, label="host-cache", page_bytes=page_bytes)
                return FileArena(config.arena_dir, f"{next(names)}-host-cache", layout, slots, 0)

            self.tiering = Tiering(self.cache, config.read_tier_settings(), config.outer_tier, make_slab)
        self.slices = Slices(self.cache.now)
        self.scrubber = Scrubber(self.cache, work)
        self.calls = CallStats()
        self.watch = LoopWatch(clock, self.calls)
        self._gpus = gpus
        self.tracing = tracing_to(
            config.otlp_endpoint,
            config.trace_ratio,
            service_name="rocmforge-kvcache",
            service_version=VERSION,
            service_instance_id=f"{self.epoch:016x}",
        )
        self._policy = config.policy
        self._in_flight = InFlight(config.identity_calls)
        self._servicer = KvCacheServicer(
            self.cache,
            self.scrubber,
            self._policy,
            owner_of=processes.owner,
            shared_pools=config.shared_pools,
            slices=self.slices,
            tiers=self.tiering.tiers if self.tiering is not None else None,
        )
        self._serving = Serving(
            SERVICE,
            config.listeners,
            tls=config.tls,
            insecure=config.insecure,
            max_connections=config.max_connections,
            guests=self._policy.guests,
            in_flight=self._in_flight,
            limits=LIMITS,
            tracing=self.tracing,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._endpoint: Endpoint | None = None
        self.kv_events: KvEventPublisher | None = None
        if config.kv_events is not None:
            self.kv_events = KvEventPublisher(
                self.cache,
                config.kv_events,
                config.kv_events_replay,
                config.kv_events_format,
                to=config.kv_events_to,
            )

    @property
    def bound(self) -> list[str]:
        """The addresses it listens on, with the actual ports."""
        return self._serving.bound

    @property
    def metrics_bound(self) -> str | None:
        """The address of the metrics endpoint, with the actual port; None if it is off."""
        return self._endpoint.bound if self._endpoint is not None else None

    async def start(self) -> None:
        """Start serving. Raises InvalidConfiguration if an address, the arena directory or memory is unavailable."""
        if self.config.device != GPU or self.config.host_cache is not None:
            for name in prepare_directory(self.config.arena_dir):
                log.info("stale_arena_removed", name=name)
            room = Room.of(self.config.arena_dir)
            check_host_cache(self.config.arena_dir, self.config.host_cache or 0, self._arena_bytes, room)
        if self.config.device != GPU:
            self._open_arenas(self._policy)
            check_directory(self.config.arena_dir, self.config.limits.budget_bytes, room)
        if self.tiering is not None:
            try:
                await self.tiering.start()
            except OSError as error:
                raise InvalidConfiguration(f"the mover does not start: {error.strerror or error}") from error
        self._serving.add(
            functools.partial(kvcache_pb2_grpc.add_KvCacheServiceServicer_to_server, self._servicer), self.calls
        )
        await self._serving.start()
        if self.kv_events is not None:
            self.kv_events.start()
        if self.config.metrics is not None:
            loop = asyncio.get_running_loop()
            tiers = self.tiering.tiers if self.tiering is not None else None
            collector = KvCacheMetrics(self.cache, self.calls, self.watch, loop, self.kv_events, self.tracing, tiers)
            self._endpoint = Endpoint(self.config.metrics, collector)
            await asyncio.to_thread(self._endpoint.start)
        self._tasks = [
            asyncio.create_task(self._sweep()),
            asyncio.create_task(self._pay()),
            asyncio.create_task(self.watch.run()),
            asyncio.create_task(self.scrubber.run()),
            *([asyncio.create_task(self.tiering.run())] if self.tiering is not None else []),
        ]
        self._serving.ready()

    @property
    def _arena_bytes(self) -> int:
        """What pools may take in --arena-dir."""
        return self.config.memory if self._gpus is None else 0

    def reload(self, read: Callable[[], Config]) -> None:
        """Take up the settings that ``read`` returns, as far as they can change, and certificates that have changed.

        An identity that has lost the role `ENGINE` has its calls refused from now on, and so its sessions end with
        their leases, as those of engines that are gone: until then it may rely on the pages that it reads.
        """
        self.config = reread(self.config, read, Config.LIVE, self._prepare)
        configure_logging(self.config.log_level)
        self.cache.take_up(self.config.limits)
        self._in_flight.most = self.config.identity_calls
        before, self._policy = self._policy, self.config.policy
        self._servicer.set_policy(self._policy)
        self._revoke({one.text for one in before.holders(ENGINE)} - {one.text for one in self._policy.holders(ENGINE)})
        self._dismiss_guests()
        self._serving.reload()

    def _prepare(self, config: Config) -> None:
        """What may fail of taking up settings. Raises InvalidConfiguration, and has changed nothing then."""
        self.cache.check_limits(config.limits)
        if config.memory != self.config.memory:
            if self._gpus is None:
                check_directory(config.arena_dir, config.memory, Room.of(config.arena_dir))
            else:
                check_gpus(self._gpus, config.memory)
        self._open_arenas(config.policy)
        self._serving.admit(config.policy.guests)

    def _open_arenas(self, policy: Policy) -> None:
        """Let other users' engines reach the arenas. Raises InvalidConfiguration."""
        for uid in policy.guests:
            if self._gpus is None and policy.has(Identity.of_uid(uid), ENGINE):
                open_way(self.config.arena_dir, uid, "--arena-dir")

    def _revoke(self, lost: set[str]) -> None:
        """Let identities that have lost the role `ENGINE` map no arena any more."""
        for session in self.cache.live_sessions():
            if session.owner in lost:
                log.warning("session_without_role", session=session.handle, owner=session.owner)
        for pool in self.cache.pools:
            for owner in lost:
                try:
                    pool.arena.dismiss(owner)
                except OSError as error:
                    log.error("arena_not_shut", pool=pool.id, owner=owner, detail=error.strerror)

    def _dismiss_guests(self) -> None:
        """Take users without a role their sockets, when they have no more sessions to close."""
        gone = [uid for uid in self._serving.guests if uid not in self._policy.guests]
        self._serving.dismiss([uid for uid in gone if not self.cache.knows(f"uid:{uid}")], self.config.grace_s)

    async def stop(self, grace_s: float) -> None:
        """Drain, then free all memory."""
        self._servicer.drain()
        until = asyncio.get_running_loop().time() + grace_s
        await self._serving.drain(grace_s)
        if self.tiering is not None:
            await self.tiering.drain(max(0.0, until - asyncio.get_running_loop().time()))
        if self.tracing is not None:
            await self.tracing.stop(max(1.0, until - asyncio.get_running_loop().time()))
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.stop)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.kv_events is not None:
            await self.kv_events.stop()
        if self.tiering is not None:
            await self.tiering.stop()
        self.cache.close()
        self.scrubber.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                for session in await self.slices.run(self.cache.sweeping()):
                    log.warning(
                        "session_lost",
                        session=session.handle,
                        engine=session.engine_name or session.client_name,
                        client=session.client_name,
                        owner=session.owner,
                    )
                self._dismiss_guests()
            except Exception:
                # A failed sweep must not stop the sweeper: leases would never expire again.
                log.exception("sweep_failed")

    async def _pay(self) -> None:
        """Give up what ended sequences hold still."""
        while True:
            await self._owed.wait()
            self._owed.clear()
            try:
                await self.slices.run(self.cache.debts.paying())
            except Exception:
                log.exception("giving_up_failed")


def _gpus(load_runtime: Callable[[], Runtime], memory: int) -> list[Gpu]:
    """All GPUs visible to this process; each is first used when a pool is created on it.

    Raises InvalidConfiguration, also if no GPU has ``memory`` bytes.
    """
    try:
        runtime = load_runtime()
        gpus = [runtime.gpu(ordinal) for ordinal in range(runtime.count())]
        check_gpus(gpus, memory)
    except (InvalidConfiguration, GpuError) as error:
        if error.field == "--memory":
            raise
        raise InvalidConfiguration(f"--device {GPU}: {error.message}", field="--device") from error
    return gpus
