"""activation.hip against ops_numpy.silu_mul."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import ops_numpy as ops
from tests.kernels.devices import Device
from tests.kernels.numbers import ROUNDED, TYPES, error, normal, wide


@pytest.mark.parametrize("kind", TYPES)
def test_silu_mul(device: Device, kind: str) -> None:
    module = device.compile("activation", {"RF_TYPE": kind})
    count = 16 // TYPES[kind].itemsize
    for rows, width, block in [(1, 8, 64), (5, 1024, 64), (3, 1000, 64), (2, 333, 64), (4, 1, 64), (2, 4000, 256)]:
        gate_up = normal((rows, 2 * width), TYPES[kind]) * TYPES[kind].type(4)
        out = device.empty((rows, width), TYPES[kind])
        grid = (rows, -(-width // (block * count)))
        module.launch("silu_mul", grid, block, [device.array(gate_up), out, np.int32(width)])
        assert error(device.get(out), ops.silu_mul(wide(gate_up))) < ROUNDED[kind], (rows, width)


@pytest.mark.parametrize("kind", TYPES)
def test_silu_mul_at_the_ends_of_the_range(device: Device, kind: str) -> None:
    module = device.compile("activation", {"RF_TYPE": kind})
    gate = np.array([[-3e4, -100, -20, -0.0, 0, 20, 100, 3e4]], TYPES[kind])
    gate_up = np.concatenate([gate, np.ones_like(gate)], axis=1)
    out = device.empty(gate.shape, TYPES[kind])
    module.launch("silu_mul", (1, 1), 64, [device.array(gate_up), out, np.int32(8)])
    expected = ops.silu_mul(wide(gate_up))
    np.testing.assert_allclose(wide(device.get(out)), expected, rtol=2 * ROUNDED[kind], atol=1e-7)
