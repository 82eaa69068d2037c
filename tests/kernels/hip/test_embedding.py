# mypy: disable-error-code="arg-type"
"""embedding.hip against ops_numpy.take and ops_numpy.fill_drawn."""

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


def test_fill_drawn(device: Device) -> None:
    module = device.compile("embedding")
    generator = np.random.default_rng(1)
    for count, drawn_rows, threads in [(1, 1, 64), (64, 64, 64), (200, 7, 64), (300, 256, 256)]:
        drawn = generator.integers(0, 1000, 2 * drawn_rows).astype(np.int32)  # errors lie behind the tokens
        known = generator.integers(0, 1000, count).astype(np.int32)
        tokens = np.where(generator.random(count) < 0.6, -1 - generator.integers(0, drawn_rows, count), known)
        given = device.array(tokens.astype(np.int32))
        module.launch("fill_drawn", -(-count // threads), threads, [given, device.array(drawn), np.int32(count)])
        expected = ops.fill_drawn(tokens.astype(np.int64), drawn)
        assert (device.get(given) == expected).all() and (expected >= 0).all(), count
        assert (expected[tokens >= 0] == tokens[tokens >= 0]).all()
