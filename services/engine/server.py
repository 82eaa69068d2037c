"""The engine as an object: model, page source, engine thread, listeners."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from threadpoolctl import threadpool_limits

from rocmforge.client.arena.device import DevicePages
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common.access.tokens import Tokens
from services.common.call_stats import CallStats
from services.common.edge.reloading import reread
from services.common.errors import Draining, InvalidConfiguration, ModelInvalid, ServiceError
from services.common.logs import configure_logging
from services.common.prometheus import Endpoint
from services.common.serving import Serving
from services.common.tracing.collector import tracing_to
from services.engine.api.limits import LIMITS
from services.engine.api.served import Served
from services.engine.api.servicer import SERVICE, EngineServicer
from services.engine.config import LOCAL, VLLM, Config, default_pool_id, model_id
from services.engine.delivery.registry import GenerationRegistry
from services.engine.delivery.streams import Streams
from services.engine.delivery.throttle import Throttle
from services.engine.metrics import EngineMetrics
from services.engine.model.backend import CPU, Backend, on_gpu, on_host
from services.engine.model.batch import Row
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from services.engine.model.runner import Runner
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import PageSource
from services.engine.pages.traced import TracedExchanges
from services.engine.sampling.params import Drawer, SamplingParams, sample
from services.engine.scheduling.event import Event
from services.engine.scheduling.loop import EngineLoop, Launcher, StepRunner
from services.engine.scheduling.prefill_speed import PrefillSpeed
from services.engine.text.chat import Chat
from services.engine.text.tokenizer import Tokenizer
from services.launch import typed
from services.version import VERSION

log = structlog.get_logger()

OPEN_RETRY_S = 0.2
#: Seconds that the engine's thread has to release its pages and end after all requests have ended.
STOP_S = 10.0
#: Seconds between sweeps for expired generations; calls also expire them.
SWEEP_S = 10.0
#: Advice to the operator when the daemon keeps the engine from starting, by error reason.
_CHANGE = {
    "KVCACHE_DOWN": f"start it with `{typed('services.kvcache')}`, or set --kvcache to its address",
    "LAYOUT_MISMATCH": "give this engine the pool's --page-size, --kv-dtype and --pool-pages, or another --pool-id",
    "EXCEEDS_BUDGET": "or start this engine with fewer --pool-pages",
    "HOST_MEMORY_EXCEEDED": "or start this engine with fewer --pool-pages",
}


class Engine:
    """Call ``start``, connect to ``bound``, call ``stop``. Tests run the same object on a free port.

    ``make_runner`` creates the step runner, and ``sleep`` waits; tests use them to inject faults and time.
    """

    def __init__(
        self,
        config: Config,
        *,
        make_runner: Callable[..., StepRunner] = Runner,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self._sleep = sleep
        self.streams = Streams()
        self.generations = GenerationRegistry(config.retention)
        self.servicer = EngineServicer(
            self.streams,
            self.generations,
            config.policy,
            self.begin_drain,
            throttle=Throttle(config.messages_per_s),
        )
        self.calls, self.kvcache_calls = CallStats(), CallStats()
        self.metrics = EngineMetrics(
            self.generations,
            self.calls,
            self.kvcache_calls,
            lambda: self.servicer.draining,
            vllm_names=config.metrics_names == VLLM,
        )
        self.tracing = tracing_to(
            config.otlp_endpoint,
            config.trace_ratio,
            service_name="rocmforge-engine",
            service_version=VERSION,
            service_instance_id=config.engine_name,
        )
        self.metrics.trace(self.tracing)
        self._endpoint = Endpoint(config.metrics, self.metrics) if config.metrics is not None else None
        self.loop: EngineLoop | None = None
        self._prefill = PrefillSpeed()
        self.pool_id = ""
        self._make_runner = make_runner
        self._serving = Serving(
            SERVICE,
            config.listeners,
            tls=config.tls,
            insecure=config.insecure,
            limits=LIMITS,
            max_connections=config.max_connections,
            guests=config.policy.guests,
            tokens=Tokens(config.tokens) if config.tokens is not None else None,
            tracing=self.tracing,
        )
        self._source: PageSource | None = None  # until the engine's thread takes it over
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None

    @property
    def bound(self) -> list[str]:
        """The addresses it listens on, with actual ports."""
        return self._serving.bound

    @property
    def metrics_bound(self) -> str | None:
        """The address of the metrics endpoint, with the actual port; None without one."""
        return self._endpoint.bound if self._endpoint is not None else None

    async def start(self) -> None:
        """Bind, load the model, open a session and warm up; then the health status becomes SERVING.

        Raises InvalidConfiguration when an address cannot be bound, ModelInvalid, and KvCacheDown when the daemon does
        not answer within the configured patience.
        """
        config = self.config
        self._serving.add(
            functools.partial(engine_pb2_grpc.add_EngineServiceServicer_to_server, self.servicer), self.calls
        )
        await self._serving.start()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.start)
        threadpool_limits(config.cpu_threads, user_api="blas")
        checkpoint = await asyncio.to_thread(Checkpoint.open, config.model, config.max_context)
        tokenizer = await asyncio.to_thread(checkpoint.tokenizer)
        chat = await asyncio.to_thread(_chat, checkpoint, tokenizer)
        backend = await asyncio.to_thread(self._make_backend, checkpoint)
        model, draw = await asyncio.to_thread(self._load, checkpoint, backend)
        if config.pool_id is not None:
            self.pool_id = config.pool_id
        else:
            self.pool_id = await asyncio.to_thread(default_pool_id, config.model, backend.dtype, backend.kv_dtype)
        source = await self._open_source(model, backend)
        await asyncio.to_thread(_warm_up, model, backend, draw, config.page_size)
        running = asyncio.get_running_loop()

        def outbox(events: list[Event]) -> None:
            running.call_soon_threadsafe(self.streams.deliver, events)

        def on_serving(serving: bool) -> None:
            say = self._serving.ready if serving else self._serving.not_ready
            running.call_soon_threadsafe(say)

        def on_failed() -> None:
            running.call_soon_threadsafe(self._serving.dead)

        runner = self._make_runner(model, lambda: backend.view(source.memory), draw, backend.finish)
        self.loop = EngineLoop(
            runner,
            source,
            config.limits,
            outbox,
            launch=runner.launch if config.asynchronous and isinstance(runner, Launcher) else None,
            exchange=TracedExchanges(source) if self.tracing and isinstance(source, GrpcPageSource) else None,
            prefill=self._prefill,
            patience_s=config.patience_s,
            unready_after_s=config.unready_after_s,
            on_serving=on_serving,
            on_failed=on_failed,
        )
        self._thread = threading.Thread(target=self.loop.run, name="engine", daemon=True)
        self._thread.start()
        self._source = None
        served = Served(
            model_id=model_id(config.model),
            config=model.config,
            parameters=model.parameters,
            geometry=model.geometry(config.page_size, backend.kv_dtype),
            backend=backend.name,
            matrix_units=backend.matrix_units(),
            tokenizer=tokenizer,
            chat=chat,
            loop=self.loop,
            limits=config.limits,
            source=source,
        )
        self.servicer.serve(served)
        self.metrics.serve(served)
        self._begin(self._sweep())
        self._serving.ready()

    def _make_backend(self, checkpoint: Checkpoint) -> Backend:
        """Create the backend that the flags select. Raises InvalidConfiguration."""
        config = self.config
        if config.device == CPU:
            return on_host(config.dtype, config.kv_dtype, config.replay, config.tuning)
        dtype = config.dtype or checkpoint.config.dtype
        return on_gpu(config.gpu, dtype, config.kv_dtype, config.page_size, config.replay, tuned=config.tuning)

    def _load(self, checkpoint: Checkpoint, backend: Backend) -> tuple[Model, Drawer]:
        """Load the model and prepare its sampler. Raises ModelInvalid, InvalidConfiguration."""
        try:
            model = Model(checkpoint, backend.ops, backend.dtype)
            return model, backend.prepare(model.config)
        except MemoryError as error:
            raise InvalidConfiguration(
                f"--model {self.config.model}: not enough memory for its weights in {backend.dtype}", field="--model"
            ) from error

    async def _open_source(self, model: Model, backend: Backend) -> PageSource:
        """Open the page source: the daemon's, with retries while it is unavailable, or local pages."""
        config, geometry = self.config, model.geometry(self.config.page_size, backend.kv_dtype)
        if config.kvcache == LOCAL:
            try:
                pages = backend.private(geometry, config.local_pages)
            except MemoryError as error:
                size = config.local_pages * geometry.page_bytes
                raise InvalidConfiguration(
                    f"--local-pages {config.local_pages}: not enough memory for {size} bytes", field="--local-pages"
                ) from error
            return LocalPageSource(config.local_pages, config.page_size, pages)
        source = GrpcPageSource(
            config.kvcache,
            self.pool_id,
            geometry,
            client_name=f"engine {model_id(config.model)}"[:128],
            engine_name=config.engine_name,
            model=model_id(config.model)[:128],
            pool_pages=config.pool_pages,
            gpu=backend.gpu,
            owner=config.kvcache_owner,
            tls=config.kvcache_tls,
            calls=self.kvcache_calls,
            prefill_tokens_per_s=self._prefill.tokens_per_s,
        )
        running = asyncio.get_running_loop()
        self._source = source
        deadline, attempt = running.time() + config.patience_s, 0
        while True:
            attempt += 1
            try:
                await asyncio.to_thread(source.reopen)
                return source
            except ServiceError as error:
                # Retry transient errors only.
                change = _CHANGE.get(error.reason)
                if error.retry_after_s is None or running.time() >= deadline:
                    error.message += f"; {change}" if change else ""
                    raise
                if attempt.bit_count() == 1:  # at powers of two
                    log.warning(
                        "kvcache_not_ready", attempt=attempt, reason=error.reason, detail=error.message, change=change
                    )
            await asyncio.sleep(OPEN_RETRY_S)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.generations.expire()

    def reload(self, read: Callable[[], Config]) -> None:
        """Take up the settings that ``read`` returns, as far as they can change, and certificates that have changed."""
        self.config = reread(self.config, read, Config.LIVE, self._prepare)
        configure_logging(self.config.log_level)
        self.generations.retention = self.config.retention
        self.servicer.policy = policy = self.config.policy
        self._serving.dismiss(set(self._serving.guests) - set(policy.guests), self.config.grace_s)
        self._serving.reload()

    def _prepare(self, config: Config) -> None:
        self._serving.admit(config.policy.guests)

    def begin_drain(self) -> asyncio.Future[None]:
        """Set readiness to NOT_SERVING at once, and ``lame_duck_s`` seconds later reject new and waiting requests.

        Returns what is done then. Later calls join the drain under way, and none can cancel it.
        """
        if self._draining is None:
            self._serving.leave()
            self._draining = asyncio.ensure_future(self._drain())
        return asyncio.shield(self._draining)

    async def _drain(self) -> None:
        if self.loop is not None:
            log.info("draining", live=len(self.streams), lame_duck_s=self.config.lame_duck_s)
            await self._sleep(self.config.lame_duck_s)
        self.servicer.drain()
        if self.loop is not None:
            self.loop.drain(Draining("the engine is shutting down and starts no more requests"))

    async def stop(self, grace_s: float) -> None:
        """Drain, give running requests ``grace_s`` seconds to finish, abort the rest, and release everything."""
        await self.begin_drain()
        until = asyncio.get_running_loop().time() + grace_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.streams.until_none(), grace_s)
        if self.streams:
            log.warning("grace_over", live=len(self.streams))
        if self.loop is not None and self._thread is not None:
            self.loop.stop(Draining(f"the engine is shutting down and its grace of {grace_s:g} s is over"))
            await asyncio.to_thread(self._thread.join, STOP_S)
            if self._thread.is_alive():
                log.error("engine_thread_stuck", live=len(self.streams))
        elif self._source is not None:
            await asyncio.to_thread(self._source.close)
        # The thread's last events are queued on the event loop by now; the calls need a moment to send them.
        await self._serving.drain(1.0)
        if self.tracing is not None:
            await self.tracing.stop(max(1.0, until - asyncio.get_running_loop().time()))
        for task in self._tasks:
            task.cancel()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.stop)


def _chat(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Chat:
    """Load the model's chat template. If it cannot be used, log a warning and serve text and tokens without it."""
    try:
        return checkpoint.chat(tokenizer)
    except ModelInvalid as error:
        log.warning("chat_template_unusable", reason=error.reason, detail=error.message)
        return Chat({}, tokenizer, error.message)


def _warm_up(model: Model, backend: Backend, draw: Drawer, page_size: int) -> None:
    """Compute one token in a private page: the engine holds no pages of the pool yet."""
    memory = backend.private(model.geometry(page_size, backend.kv_dtype), 1)
    logits = model.forward([Row([0], 0, [0], True)], backend.view(memory))
    sample(logits, [SamplingParams(0.0, 0, 1.0, 0.0, 0)], [1], draw=draw)
    backend.finish()
    if isinstance(memory, DevicePages):
        memory.close()
