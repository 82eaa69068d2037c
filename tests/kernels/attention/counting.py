"""What attention executes for each key as AMD's machine code: counts of instructions, from two launches.

A launch has costs that do not grow with the keys; the difference between launches of many and of fewer keys has none of
them. Counts are of all waves of all blocks, for one kv head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kernels.attention.plan import Attention, Geometry, plan
from kernels.device.gpu import Gpu
from tests.kernels.attention.test_attention import LAYER, Case, batch_of
from tests.simulators import amdgpu

#: Keys of both launches, whole steps of every kernel.
FEWER, MORE = 256, 768


@dataclass(frozen=True, slots=True)
class Counted:
    """``each``: instructions a key by mnemonic; ``queries`` that attend to it; ``reads`` of the key, one a tile."""

    each: Mapping[str, float]
    queries: int
    reads: int


def counted(device: amdgpu.Amd, geometry: Geometry, gpu: Gpu, prefill: bool = False) -> Counted:
    """Count decoding of one token, or with ``prefill`` a whole tile of queries behind cached keys."""
    one = replace(geometry, query_heads=geometry.group, kv_heads=1, layers=2)
    new = max(1, geometry.prefill_tile // geometry.group) if prefill else 1
    (fewer, _), (more, reads) = (_executed(device, one, gpu, keys, new) for keys in (FEWER, MORE))
    keys = MORE - FEWER
    each = {name: (more[name] - fewer[name]) / keys for name in more if more[name] != fewer[name]}
    return Counted(each, new * geometry.group, reads)


def _executed(device: amdgpu.Amd, geometry: Geometry, gpu: Gpu, cached: int, new: int) -> tuple[Counter[str], int]:
    modules: list[amdgpu.Module] = []

    def load(name: str, defines: Mapping[str, str | int]) -> amdgpu.Module:
        modules.append(device.compile(name, defines))
        return modules[-1]

    case = Case(
        ((cached - (new == 1), new),), geometry.query_heads, 1, geometry.head_dim, geometry.page_size, geometry.dtype,
        geometry.kv_dtype,
    )  # fmt: skip
    batch = batch_of(case)
    attention = Attention(load, geometry, gpu, 1 / math.sqrt(geometry.head_dim))
    starts, lengths = np.array(case.rows).T
    made = plan(geometry, gpu, starts, lengths, item_keys=1 << 16)
    width = geometry.query_heads * geometry.head_dim
    parts = [device.array(made.packed[part]) for part in made.parts]
    attention.run(
        made, parts, device.array(batch.q.reshape(new, width)), width,
        device.array(batch.arena), LAYER, device.array(batch.tables), batch.tables.shape[1],
        device.empty(batch.q.shape, batch.q.dtype), None, None,
    )  # fmt: skip
    found: Counter[str] = Counter()
    for module in modules:
        found.update(module.executed())
    return found, made.decode_items + made.prefill_items
