"""The self-test of matrix units: right layouts are used, wrong ones are not, whichever kernel has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.attention import selftest
from kernels.attention.plan import Geometry
from kernels.device import source
from kernels.device.gpu import MATRIX_16X8X16, MATRIX_16X16X16, NO_MATRIX, Gpu
from tests.kernels import devices

HALF = Geometry(4, 2, 64, 16, 2, "BF16", "BF16")
INT8 = Geometry(14, 2, 96, 24, 3, "F16", "INT8")
#: A unit whose lanes hold other rows than the kernel takes them to hold, of AMD's products and of NVIDIA's.
WRONG = {
    MATRIX_16X16X16: ("int matrix_row(int i) { return i; }", "int matrix_row(int i) { return i ^ 1; }"),
    MATRIX_16X8X16: ("int g = threadIdx.x % 32 / 4, t", "int g = threadIdx.x % 32 / 4 ^ 1, t"),
}


@pytest.mark.parametrize(
    ("name", "unit", "geometry"),
    [
        ("cpu-w64", MATRIX_16X16X16, HALF),
        ("cpu-gfx11", MATRIX_16X16X16, INT8),
        ("cpu-w32", MATRIX_16X8X16, HALF),
    ],
)
def test_units_that_are_right_are_used(name: str, unit: int, geometry: Geometry) -> None:
    device = devices.get(name)
    verdict = selftest.tested(device, geometry, Gpu(device.wave, 4, unit))
    assert (verdict.state, verdict.gpu.matrix, verdict.wrong) == ("used", unit, "")
    assert "attention_prefill" in verdict.kernels
    # Decode is tried with tiles of each size that it is compiled for.
    decoding = [kernel for kernel in verdict.kernels if kernel.startswith("attention_decode")]
    tiles = (8, 16) if unit == MATRIX_16X8X16 else (16,)
    assert decoding == [f"attention_decode, tiles of {rows}" for rows in tiles]
    # A bound that a wrong layout is far from, and a right one as well.
    assert all(error < verdict.bound / 2 for error in verdict.kernels.values())


@pytest.mark.parametrize(("name", "unit"), [("cpu-w64", MATRIX_16X16X16), ("cpu-w32", MATRIX_16X8X16)])
@pytest.mark.parametrize("kernel", ["attention_decode", "attention_prefill"])
def test_a_wrong_layout_means_scalar_kernels(
    name: str, unit: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, read = devices.get(name), source.read
    gpu = Gpu(device.wave, 4, unit)
    if not any(tried.startswith(kernel) for tried, _, _ in selftest._tiles(HALF, gpu)):
        kernel = "attention_prefill"

    def wrong(asked: str) -> str:
        right, other = WRONG[unit]
        assert right in read(asked)
        return read(asked).replace(right, other) if asked == kernel else read(asked)

    monkeypatch.setattr(source, "read", wrong)
    verdict = selftest.tested(device, HALF, gpu)
    assert verdict.state == "wrong"
    assert verdict.wrong.startswith(kernel)
    assert verdict.kernels[verdict.wrong] > 10 * verdict.bound
    assert verdict.gpu == replace(gpu, matrix=NO_MATRIX)


class Silent:
    """A device that compiles nothing."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize(
    ("geometry", "gpu"),
    [
        (replace(HALF, dtype="F32", kv_dtype="F32"), Gpu(64, 4, MATRIX_16X16X16)),
        (HALF, Gpu(64, 4, NO_MATRIX)),
        # RDNA's kernel for heads of 256 spills registers.
        (replace(HALF, head_dim=256), Gpu(32, 4, MATRIX_16X16X16)),
    ],
)
def test_what_uses_no_unit_is_not_tried(geometry: Geometry, gpu: Gpu) -> None:
    verdict = selftest.tested(Silent(), geometry, gpu)  # type: ignore[arg-type]
    assert (verdict.state, verdict.kernels) == ("none", {})
    assert verdict.gpu.matrix == (NO_MATRIX if geometry.head_dim == 256 else gpu.matrix)


def test_no_number_is_no_right_one() -> None:
    class Empty:
        """Runs nothing, so that what was there is left: NaN."""

        def __init__(self) -> None:
            self._device = devices.get("cpu-w32")

        def launch(self, *_: object) -> None:
            pass

        def compile(self, *_: object) -> Empty:
            return self

        def __getattr__(self, name: str) -> object:
            return getattr(self._device, name)

    verdict = selftest.tested(Empty(), HALF, Gpu(32, 4, MATRIX_16X8X16))  # type: ignore[arg-type]
    assert verdict.state == "wrong"
