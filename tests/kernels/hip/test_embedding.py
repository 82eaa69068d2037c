# mypy: disable-error-code="arg-type"
"""embedding.hip against ops_numpy.take."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import ops_numpy as ops
from tests.kernels.devices import Device
from tests.kernels.numbers import TYPES, normal


@pytest.mark.parametrize("kind", TYPES)
def test_gather_rows(device: Device, kind: str) -> None:
    module = device.compile("embedding")
    generator = np.random.default_rng(0)
    for rows, width, blocks in [(1, 64, 1), (37, 256, 1), (9, 4096, 3), (5, 30, 1), (6, 33, 2), (4, 1, 1)]:
        table = normal((50, width), TYPES[kind])
        numbers = generator.integers(0, len(table), rows).astype(np.int32)
        out = device.empty((rows, width), TYPES[kind])
        arguments = [
            device.array(table),
            device.array(numbers),
            out,
            np.int64(width * table.itemsize),
            np.int32(blocks),
        ]
        module.launch("gather_rows", rows * blocks, 64, arguments)
        assert device.get(out).tobytes() == ops.take(table, numbers).tobytes(), (rows, width)
