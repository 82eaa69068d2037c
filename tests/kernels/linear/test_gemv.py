"""gemv.hip against ops_numpy: products of a few rows, alone and fused with the norm before and the activation after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels import ops_numpy as ops
from kernels.device.gpu import NO_MATRIX, Gpu
from kernels.linear import gemv
from tests.kernels.devices import Device
from tests.kernels.numbers import ROUNDED, TYPES, error, normal, wide

EPS = 1e-5
#: Inputs and outputs: of one pack, of fewer packs than lanes, of rounds and a rest, of an odd number of outputs.
SHAPES = [(8, 1), (64, 7), (520, 12), (1024, 17), (4360, 3), (64, 100)]
ROWS = (1, 2, 3, 4)


def launches(device: Device, product: gemv.Product) -> Iterator[tuple[int, int]]:
    """Splits and blocks: those of some GPUs, and others that the kernel must serve."""
    yield from ((1, 1), (gemv.THREADS // device.wave, 2), (2, 3))
    for processors in (1, 132):
        made = gemv.launch(Gpu(device.wave, processors, NO_MATRIX), product)
        yield made.split, made.blocks


def sizes(product: gemv.Product, split: int) -> list[Any]:
    return [np.int32(product.rows), np.int32(product.inputs), np.int32(product.outputs), np.int32(split)]


def compiled(device: Device, kind: str, rows: int) -> Any:
    one = gemv.launch(Gpu(device.wave, 16, NO_MATRIX), gemv.Product(rows, 64, 64, TYPES[kind].itemsize))
    return device.compile("gemv", {"RF_TYPE": kind, "RF_ROWS": one.rows})


def bound(kind: str, inputs: int) -> float:
    """Of the error of a product of so many inputs."""
    return ROUNDED[kind] + 1e-7 * inputs**0.5


@pytest.mark.parametrize("kind", TYPES)
def test_products(device: Device, kind: str) -> None:
    for rows in ROWS:
        check_products(device, kind, rows)


def check_products(device: Device, kind: str, rows: int) -> None:
    module = compiled(device, kind, rows)
    for inputs, outputs in SHAPES:
        product = gemv.Product(rows, inputs, outputs, TYPES[kind].itemsize)
        x, weight = normal((rows, inputs), TYPES[kind]), normal((outputs, inputs), TYPES[kind], seed=1)
        expected = ops.linear(wide(x), wide(weight))
        for split, blocks in launches(device, product):
            found = {}
            for kernel, dtype in (("gemv", TYPES[kind]), ("gemv_wide", np.dtype(np.float32))):
                # A row more, which nothing may be written to.
                out = device.empty((rows + 1, outputs), dtype)
                arguments = [device.array(x), device.array(weight), out, *sizes(product, split)]
                module.launch(kernel, blocks, gemv.THREADS, arguments)
                values, case = device.get(out), (kernel, inputs, outputs, split, blocks)
                assert error(values[:rows], expected) < bound("F32" if dtype == np.float32 else kind, inputs), case
                assert np.isnan(wide(values[rows])).all(), case
                found[kernel] = values[:rows]
            assert np.array_equal(found["gemv"], found["gemv_wide"].astype(TYPES[kind]))


@pytest.mark.parametrize("kind", TYPES)
def test_products_of_a_norm(device: Device, kind: str) -> None:
    for rows in ROWS:
        for added in (True, False):
            check_products_of_a_norm(device, kind, rows, added)


def check_products_of_a_norm(device: Device, kind: str, rows: int, added: bool) -> None:
    module = compiled(device, kind, rows)
    dtype = TYPES[kind]
    for inputs, outputs in ((64, 7), (520, 12), (2568, 6)):
        x, more = normal((rows, inputs), dtype), normal((rows, inputs), dtype, seed=1)
        norm, weight = normal((inputs,), dtype, seed=2), normal((2 * outputs, inputs), dtype, seed=3)
        rounded = (wide(x) + wide(more)).astype(dtype) if added else x
        normed = wide(ops.rms_norm(wide(rounded), wide(norm), EPS)[0].astype(dtype))
        plain = ops.linear(normed, wide(weight))
        gated = ops.silu_mul(wide(plain.astype(dtype)))
        for kernel, expected, count in (("norm_gemv", plain, 2 * outputs), ("norm_gated_gemv", gated, outputs)):
            product = gemv.Product(rows, inputs, count, dtype.itemsize, gated=expected is gated)
            for split, blocks in launches(device, product):
                if product.rows_bytes > gemv.NORMED_BYTES:
                    continue
                out, total = device.empty((rows + 1, count), dtype), device.empty((rows, inputs), dtype)
                arguments = [
                    device.array(x), device.array(more) if added else None, device.array(norm), np.float32(EPS),
                    device.array(weight), out, total if added else None, *sizes(product, split),
                ]  # fmt: skip
                module.launch(kernel, blocks, gemv.THREADS, arguments, product.rows_bytes)
                values, case = device.get(out), (kernel, inputs, count, split, blocks)
                # What is multiplied is rounded: a sum of squares in another order may round some of it the other way.
                assert error(values[:rows], expected) < 2 * ROUNDED[kind] + bound(kind, inputs), case
                assert np.isnan(wide(values[rows])).all(), case
                if added:
                    assert np.array_equal(device.get(total), rounded), case


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_is_the_same_whatever_is_beside_it(device: Device, kind: str) -> None:
    inputs, outputs, gpu = 1096, 9, Gpu(device.wave, 16, NO_MATRIX)
    x, weight = normal((4, inputs), TYPES[kind]), normal((outputs, inputs), TYPES[kind], seed=1)
    found = {}
    for rows in ROWS:
        product = gemv.Product(rows, inputs, outputs, TYPES[kind].itemsize)
        launch = gemv.launch(gpu, product)
        out = device.empty((rows, outputs), np.float32)
        arguments = [device.array(x[:rows]), device.array(weight), out, *sizes(product, launch.split)]
        compiled(device, kind, rows).launch("gemv_wide", launch.blocks, gemv.THREADS, arguments)
        found[rows] = device.get(out)
    for rows, values in found.items():
        assert np.array_equal(values, found[4][:rows])


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize(("normed", "gated"), [(False, False), (True, False), (True, True)])
def test_launches(wave: int, normed: bool, gated: bool) -> None:
    waves = gemv.THREADS // wave
    for processors in (1, 40, 132, 304):
        gpu = Gpu(wave, processors, NO_MATRIX)
        for inputs in (8, 1024, 3072, 14336):
            for outputs in (1, 1024, 4096, 128256):
                splits = set()
                for rows, compiled_for, room in ((1, 1, 4), (2, 2, 3), (3, 4, 3)):
                    one = gemv.launch(gpu, gemv.Product(rows, inputs, outputs, 2, normed, gated))
                    assert one.rows == compiled_for and one.split in (1, 2, 4, 8) and one.split <= waves
                    assert one.split == 1 or one.split * wave * 8 <= inputs, "a wave with nothing to do"
                    wanted = -(-(outputs if gated else -(-outputs // 2)) // (waves // one.split))
                    assert one.blocks == min(wanted, room * processors)
                    splits.add(one.split)
                assert len(splits) == 1, "a row's sums depend on the rows beside it"


def test_which_products_are_for_it() -> None:
    def fits(rows: int, inputs: int, outputs: int = 64, itemsize: int = 2, **kind: bool) -> bool:
        return gemv.fits(gemv.Product(rows, inputs, outputs, itemsize, **kind))

    assert fits(4, 1024) and not fits(5, 1024) and not fits(0, 1024)
    assert fits(1, 4, itemsize=4) and not fits(1, 4) and not fits(1, 1028)
    assert fits(4, 4096, normed=True) and not fits(4, 4104, normed=True) and fits(4, 4104)
    assert fits(1, 4096, 128256) and fits(2, 4096, 4096) and not fits(3, 4096, 4096)
    assert fits(2, 4096, 4096, normed=True) and not fits(2, 4096, 4096, normed=True, gated=True)
