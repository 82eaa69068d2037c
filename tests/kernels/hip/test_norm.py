"""norm.hip against ops_numpy.rms_norm."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import ops_numpy as ops
from tests.kernels.devices import Device
from tests.kernels.numbers import ROUNDED, TYPES, error, normal, wide

# Rows, width, threads: of whole packs and not, fewer than threads, and more than the threads can keep.
SHAPES = [
    (1, 64, 64),
    (5, 80, 64),
    (3, 2048, 128),
    (2, 4104, 64),
    (3, 100, 128),
    (2, 1027, 64),
    (2, 1, 64),
    (1, 3072, 1024),
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("residual", ["without", "apart", "in place"])
def test_rms_norm(device: Device, kind: str, residual: str) -> None:
    module = device.compile("norm", {"RF_TYPE": kind})
    for rows, width, block in SHAPES:
        x, more = normal((rows, width), TYPES[kind]), normal((rows, width), TYPES[kind], seed=1)
        weight = normal((width,), TYPES[kind], seed=2)
        rounded = (wide(x) + wide(more)).astype(TYPES[kind])
        expected, _ = ops.rms_norm(wide(x if residual == "without" else rounded), wide(weight), 1e-5)
        out, other = device.empty((rows, width), TYPES[kind]), None if residual == "without" else device.array(more)
        total = device.empty((rows, width), TYPES[kind]) if residual == "apart" else other
        arguments = [device.array(x), other, device.array(weight), out, total, np.int32(width), np.float32(1e-5)]
        module.launch("rms_norm", rows, block, arguments)
        assert error(device.get(out), expected) < ROUNDED[kind], (rows, width, block)
        if residual != "without":
            assert np.array_equal(device.get(total), rounded)
        if residual == "apart":
            assert np.array_equal(device.get(other), more)


def test_a_row_of_zeros_is_zero(device: Device) -> None:
    module = device.compile("norm", {"RF_TYPE": "BF16"})
    zeros, ones = np.zeros((1, 64), TYPES["BF16"]), np.ones(64, TYPES["BF16"])
    out = device.empty((1, 64), TYPES["BF16"])
    module.launch(
        "rms_norm", 1, 64, [device.array(zeros), None, device.array(ones), out, None, np.int32(64), np.float32(1e-6)]
    )
    assert not device.get(out).astype(np.float32).any()
