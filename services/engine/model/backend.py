"""Compute backends: NumPy with pages in host memory, or a GPU with pages in its own memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kernels import ops_numpy
from kernels.attention.selftest import Verdict
from kernels.device import tuning
from kernels.device.gpu import target
from kernels.device.module import KernelError
from kernels.ops import Ops
from kernels.ops_cupy import CupyOps
from kernels.replay.graphs import Graphs
from kernels.replay.tapes import Tapes
from kernels.sampling import reference
from rocmforge.client.arena.device import DevicePages
from rocmforge.client.arena.gpu_ipc import Gpu, Runtime
from services.common.errors import InvalidConfiguration
from services.engine.checkpoint.config import ModelConfig
from services.engine.pages.private import private_device_pages, private_pages
from services.engine.pages.source import PageLayout
from services.engine.sampling.params import Drawer
from services.launch import typed

CPU, GPU = "cpu", "gpu"
DEVICES = (CPU, GPU)
DTYPES = ("f32", "f16", "bf16")
KV_DTYPES = (*DTYPES, "int8")
TAPES, GRAPHS, OFF = "tapes", "graphs", "off"
#: Of a tuning: the file that first light left, if it did. Of asynchronous steps: with a GPU.
AUTO = "auto"
ON = "on"
REPLAYS = (AUTO, GRAPHS, TAPES, OFF)
ASYNC_STEPS = (AUTO, ON, OFF)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Backend:
    """A compute backend. ``dtype`` is that of weights and activations, ``kv_dtype`` that of K and V in pages.

    ``name`` is for display. ``gpu`` is None on the host. ``prepare`` compiles ahead what the model's steps need and
    returns the sampler of its logits; it raises InvalidConfiguration for an unsupported model. ``finish`` synchronizes:
    a step's pages may be reported or released only after it returns. ``matrix_units`` says, once a model is prepared,
    whether its attention uses them: ``used``, ``wrong`` (the self-test failed, so scalar kernels compute) or ``none``;
    it is empty on the host.
    """

    name: str
    ops: Ops
    dtype: str
    kv_dtype: str
    gpu: Gpu | None
    prepare: Callable[[ModelConfig], Drawer]
    finish: Callable[[], None]
    matrix_units: Callable[[], str] = lambda: ""

    def private(self, geometry: PageLayout, total_pages: int) -> Any:
        """Allocates private pages. Raises MemoryError when there is not enough memory."""
        if self.gpu is None:
            return private_pages(geometry, total_pages)
        return private_device_pages(geometry, total_pages, self.gpu)

    @staticmethod
    def view(memory: Any) -> Any:
        """Returns a source's memory as the forward pass takes it. A view of GPU pages must not outlive its step."""
        return memory.array if isinstance(memory, DevicePages) else memory


def on_host(dtype: str | None, kv_dtype: str | None, replay: str | None = None, tuned: str = OFF) -> Backend:
    """The NumPy backend, which computes in f32. Raises InvalidConfiguration for other dtypes, and for replay."""
    if replay not in (None, AUTO, OFF):
        raise InvalidConfiguration(f"--replay {replay}: not available on a CPU; see --device", field="--replay")
    if tuned not in (AUTO, OFF):
        raise InvalidConfiguration(f"--tuning {tuned}: not available on a CPU; see --device", field="--tuning")
    for flag, value in (("--dtype", dtype), ("--kv-dtype", kv_dtype)):
        if value not in (None, "f32"):
            raise InvalidConfiguration(f"{flag} {value}: a CPU supports only f32; see --device", field=flag)
    return Backend("numpy", ops_numpy, "f32", "f32", None, lambda config: reference.sample, lambda: None)


def on_gpu(
    ordinal: int,
    dtype: str,
    kv_dtype: str | None,
    page_size: int,
    replay: str | None = None,
    make_ops: Callable[..., CupyOps] = CupyOps,
    tuned: str = OFF,
) -> Backend:
    """The CuPy backend on GPU ``ordinal``; ``make_ops`` creates its operations. ``tuned`` is a file that says which
    kernels are best, `AUTO` or `OFF`. Raises InvalidConfiguration when the GPU or the file cannot be used.
    """
    gpu = Runtime.load().gpu(ordinal)
    # Writing int8 pages launches kernels with extents specific to the step, so it cannot be replayed.
    if replay in (None, AUTO):
        replay = OFF if kv_dtype == "int8" else TAPES
    try:
        replays = None if replay == OFF else Graphs(refused=_graphs_refused) if replay == GRAPHS else Tapes()
        chosen = {} if tuned == OFF else {"tuned": _tuning(tuned, target(ordinal))}
        ops = make_ops(ordinal, dtype, kv_dtype or dtype, page_size, replays, **chosen)
    except ValueError as error:
        raise InvalidConfiguration(f"--replay {replay}: {error}", field="--replay") from error

    def prepare(config: ModelConfig) -> Drawer:
        try:
            sampler = ops.sampler(config.vocab_size)
            ops.compile_products()
            verdict = ops.compile_attention(
                config.query_heads, config.layers, config.kv_heads, config.head_dim, config.head_dim**-0.5
            )
        except ValueError as error:
            raise InvalidConfiguration(f"--model: not supported on a GPU: {error}", field="--model") from error
        except KernelError as error:
            raise InvalidConfiguration(f"--device gpu: {error}", field="--device") from error
        _tell(verdict, ordinal)
        units[:] = [verdict.state]
        return sampler

    units = [""]
    name = "rocm" if gpu.runtime.is_hip else "cuda"
    return Backend(name, ops, dtype, kv_dtype or dtype, gpu, prepare, ops.synchronize, lambda: units[0])


def _tuning(tuned: str, arch: str) -> tuning.Tuning:
    """Read the file. One that was named must be right; the one of the cache directory is only used if it is."""
    path = tuning.default_path(arch) if tuned == AUTO else Path(tuned)
    if tuned == AUTO and not path.exists():
        return tuning.NOTHING
    try:
        found = tuning.read(path, arch)
    except tuning.TuningError as error:
        if tuned != AUTO:
            raise InvalidConfiguration(f"--tuning {error}", field="--tuning") from error
        change = f"remove the file, or run `{typed('services.doctor')} first-light` again"
        log.warning("tuning_ignored", detail=str(error), change=change)
        return tuning.NOTHING
    log.info("tuning", path=str(path), attention=len(found.attention), products=len(found.products))
    return found


def _graphs_refused(detail: str) -> None:
    change = "--replay tapes; steps that were not captured before are launched one by one"
    log.warning("graphs_refused", detail=detail, change=change)


def _tell(verdict: Verdict, ordinal: int) -> None:
    gpu = verdict.gpu
    if verdict.occupancy_refused:
        change = "none: plans assume as many blocks as were measured on other GPUs"
        log.warning("occupancy_unknown", gpu=ordinal, detail=verdict.occupancy_refused, change=change)
    else:
        log.info("occupancy", gpu=ordinal, decode=dict(gpu.decode_fits), prefill=gpu.prefill_fits)
    if verdict.state == "wrong":
        log.warning(
            "matrix_units_wrong",
            gpu=ordinal,
            kernel=verdict.wrong,
            error=verdict.kernels[verdict.wrong],
            bound=verdict.bound,
            change="attention runs on the scalar kernels, which are right and slower; please report this GPU",
        )
    else:
        log.info("matrix_units", gpu=ordinal, state=verdict.state, errors=verdict.kernels)
