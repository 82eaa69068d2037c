"""What computes, and where its pages lie: NumPy in the host's memory, or a GPU in its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels import ops_numpy
from kernels.device.module import KernelError
from kernels.ops import Ops
from kernels.ops_cupy import CupyOps
from kernels.replay.graphs import Graphs
from kernels.replay.tapes import Tapes
from kernels.sampling import reference
from services.common.errors import InvalidConfiguration
from services.common.gpu_ipc import Gpu, Runtime
from services.engine.checkpoint.config import ModelConfig
from services.engine.pages.device_arena import DevicePages, private_device_pages
from services.engine.pages.host_arena import private_pages
from services.engine.pages.source import Geometry
from services.engine.sampling.params import Drawer

CPU, GPU = "cpu", "gpu"
DEVICES = (CPU, GPU)
DTYPES = ("f32", "f16", "bf16")
KV_DTYPES = (*DTYPES, "int8")
TAPES, GRAPHS, OFF = "tapes", "graphs", "off"
REPLAYS = (TAPES, GRAPHS, OFF)


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute. ``dtype`` is of weights and activations, ``kv_dtype`` of K and V in pages.

    ``name`` is for people. ``gpu`` is None on the host. ``prepare`` makes all that a model's steps would otherwise wait
    for and returns what draws from its logits; it raises InvalidConfiguration for a model that is not computed here.
    ``finish`` returns when nothing of a step is under way: only then may its pages be told of or given up.
    """

    name: str
    ops: Ops
    dtype: str
    kv_dtype: str
    gpu: Gpu | None
    prepare: Callable[[ModelConfig], Drawer]
    finish: Callable[[], None]

    def private(self, geometry: Geometry, total_pages: int) -> Any:
        """Pages of this process's own. Raises MemoryError when there is no room for them."""
        if self.gpu is None:
            return private_pages(geometry, total_pages)
        return private_device_pages(geometry, total_pages, self.gpu)

    @staticmethod
    def view(memory: Any) -> Any:
        """A source's memory as a forward pass takes it, for one step: a view of a GPU's pages must not outlive it."""
        return memory.array if isinstance(memory, DevicePages) else memory


def on_host(dtype: str | None, kv_dtype: str | None, replay: str | None = None) -> Backend:
    """NumPy, which computes in f32. Raises InvalidConfiguration for other types, and for replays."""
    if replay not in (None, OFF):
        raise InvalidConfiguration(f"--replay {replay}: a CPU queues nothing; see --device", field="--replay")
    for flag, value in (("--dtype", dtype), ("--kv-dtype", kv_dtype)):
        if value not in (None, "f32"):
            raise InvalidConfiguration(f"{flag} {value}: a CPU computes in f32; see --device", field=flag)
    return Backend("numpy", ops_numpy, "f32", "f32", None, lambda config: reference.sample, lambda: None)


def on_gpu(
    ordinal: int,
    dtype: str,
    kv_dtype: str | None,
    page_size: int,
    replay: str | None = None,
    make_ops: Callable[..., CupyOps] = CupyOps,
) -> Backend:
    """CuPy on GPU ``ordinal``, its functions by ``make_ops``. Raises InvalidConfiguration when it cannot be used."""
    gpu = Runtime.load().gpu(ordinal)
    # A step's pages of int8 are written by launches whose extents are the step's own.
    replay = replay or (OFF if kv_dtype == "int8" else TAPES)
    try:
        replays = None if replay == OFF else Graphs() if replay == GRAPHS else Tapes()
        ops = make_ops(ordinal, dtype, kv_dtype or dtype, page_size, replays)
    except ValueError as error:
        raise InvalidConfiguration(f"--replay {replay}: {error}", field="--replay") from error

    def prepare(config: ModelConfig) -> Drawer:
        try:
            sampler = ops.sampler(config.vocab_size)
            ops.compile_products()
            ops.compile_attention(
                config.query_heads, config.layers, config.kv_heads, config.head_dim, config.head_dim**-0.5
            )
        except ValueError as error:
            raise InvalidConfiguration(f"--model: not served on a GPU: {error}", field="--model") from error
        except KernelError as error:
            raise InvalidConfiguration(f"--device gpu: {error}", field="--device") from error

        return sampler.sample

    name = "rocm" if gpu.runtime.is_hip else "cuda"
    return Backend(name, ops, dtype, kv_dtype or dtype, gpu, prepare, ops.synchronize)
