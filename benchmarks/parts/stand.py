"""The fixture of the engine benchmarks: a model with a backend and pages, assembled as in the engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parts.shapes import RandomCheckpoint, RandomOps, UnreadTensor
from kernels.ops_cupy import CupyOps
from rocmforge.client.arena.device import DevicePages
from services.engine.checkpoint.config import ModelConfig
from services.engine.model.backend import Backend, on_gpu, on_host
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.local import LocalPageSource
from services.engine.pages.source import PageSource
from services.engine.sampling.params import Drawer
from services.healthcheck import wait_serving
from services.kvcache.arena.host import default_directory

ROOT = Path(__file__).resolve().parents[2]
PAGE_SIZE = 16


@dataclass
class Pages:
    """A page source, and its memory."""

    source: PageSource
    memory: Callable[[], Any]


@dataclass
class Stand:
    """A model, loaded and compiled. ``daemon_flags`` are the flags of a daemon that serves it."""

    model: Model
    backend: Backend
    draw: Drawer
    daemon_flags: tuple[str, ...] = ()

    @classmethod
    def on_cpu(cls, model: Path | ModelConfig) -> Stand:
        """NumPy, in f32, with a checkpoint or a shape."""
        checkpoint = RandomCheckpoint.of(model) if isinstance(model, ModelConfig) else Checkpoint.open(model)
        backend = on_host(None, None)
        return cls(Model(checkpoint, backend.ops, backend.dtype), backend, backend.prepare(checkpoint.config))

    @classmethod
    def on_gpu(
        cls,
        model: Path | ModelConfig,
        memory: str = "48GiB",
        replay: str | None = None,
        make_ops: Callable[..., Any] | None = None,
    ) -> Stand:
        """GPU 0, in bfloat16, with a checkpoint, or a shape whose random weights are made on the GPU.

        ``make_ops`` makes a `CupyOps` or, for a shape, a `RandomOps`. Daemons are started with ``memory`` bytes.
        """
        checkpoint, ops = (
            (RandomCheckpoint.of(model, UnreadTensor), RandomOps)
            if isinstance(model, ModelConfig)
            else (Checkpoint.open(model), CupyOps)
        )
        backend = on_gpu(0, "bf16", None, PAGE_SIZE, replay, make_ops or ops)
        loaded = Model(checkpoint, backend.ops, "bf16")
        return cls(loaded, backend, backend.prepare(checkpoint.config), ("--device", "gpu", "--memory", memory))

    @property
    def on_device(self) -> bool:
        """Whether the backend is a GPU."""
        return self.backend.gpu is not None

    @property
    def replayed(self) -> tuple[int, int]:
        """The numbers of steps that were recorded, and that were replayed."""
        replays = self.backend.ops.replays if isinstance(self.backend.ops, CupyOps) else None
        return (replays.recorded, replays.replayed) if replays else (0, 0)

    @contextlib.contextmanager
    def local(self, total: int) -> Iterator[Pages]:
        """Local pages."""
        memory = self.backend.private(self.model.geometry(PAGE_SIZE, self.backend.kv_dtype), total)
        if isinstance(memory, DevicePages):
            # Uninitialised memory may hold NaN in some type; its values are never used, but may affect times.
            view = self.backend.view(memory)
            view[:] = 0
            del view
        try:
            yield Pages(LocalPageSource(total, PAGE_SIZE), lambda: self.backend.view(memory))
        finally:
            self.backend.finish()
            if isinstance(memory, DevicePages):
                memory.close()

    @contextlib.contextmanager
    def daemon(self, total: int) -> Iterator[Pages]:
        """Pages of a daemon, which runs as a process."""
        with daemon(*self.daemon_flags) as address:
            source = GrpcPageSource(
                address,
                "bench",
                self.model.geometry(PAGE_SIZE, self.backend.kv_dtype),
                client_name="bench",
                pool_pages=total,
                gpu=self.backend.gpu,
            )
            source.reopen()
            try:
                yield Pages(source, lambda: self.backend.view(source.memory))
            finally:
                self.backend.finish()
                source.close()


@contextlib.contextmanager
def daemon(*flags: str) -> Iterator[str]:
    """A KV-cache daemon as a process; its address."""
    # In memory, like the daemon's default: the arena's pages must not wait for a disk.
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=default_directory().parent) as name:
        address = f"unix:{name}/k.sock"
        words = ["--listen", address, "--arena-dir", f"{name}/arena", *flags]
        with process("services.kvcache", address, *words):
            yield address


@contextlib.contextmanager
def process(module: str, address: str, *words: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A service as a process, once it serves; terminated at the end of the block if it still runs."""
    with contextlib.ExitStack() as stack:
        said: Any = stack.enter_context(log.open("ab")) if log else subprocess.DEVNULL
        command = [sys.executable, "-m", module, *words]
        started = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
        try:
            wait_serving(address, alive=lambda: started.poll() is None, timeout_s=180)
            yield started
        finally:
            started.terminate()
            started.wait(30)
