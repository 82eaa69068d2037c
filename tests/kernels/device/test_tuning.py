"""The tuning file: what is written is read, whatever is wrong is named, and kernels are launched by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.attention import plan
from kernels.attention.plan import Geometry
from kernels.device import module, tuning
from kernels.device.gpu import MATRIX_16X8X16, NO_MATRIX, Gpu
from kernels.device.tuning import Tuning, TuningError
from kernels.linear import gemv

TUNED = Tuning(
    {("BF16", "INT8", 128, 4): (True, False, 6), ("F16", "F16", 64, 1): (True, True, 0)}, {(1, 4096, 6144, 2): 8}
)
GPU = Gpu(32, 304, MATRIX_16X8X16)


def told() -> Any:
    return json.loads(TUNED.as_json("gfx942"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(TUNED.as_json("gfx942"))
    assert tuning.read(path, "gfx942") == TUNED


ATTENTION, PRODUCT = told()["attention"][0], told()["products"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format is 2; it must be 1"),
        ({"arch": "gfx90a"}, "arch is 'gfx90a'; this GPU is gfx942"),
        ({"more": 1}, "more: no such field; there are format, arch"),
        ({"attention": {}}, "attention must be a list"),
        ({"attention": [7]}, r"attention\[0\] must be an object"),
        ({"attention": [{**ATTENTION, "speed": 1}]}, r"attention\[0\].speed: no such field"),
        ({"attention": [ATTENTION, {**ATTENTION, "dtype": "INT8"}]}, r"attention\[1\].dtype is 'INT8'; it must be"),
        ({"attention": [{**ATTENTION, "decode_matrix": 1}]}, "decode_matrix is 1; it must be true or false"),
        ({"attention": [{**ATTENTION, "decode_blocks": 17}]}, "decode_blocks is 17; it must be a whole number"),
        ({"attention": [{**ATTENTION, "group": True}]}, "group is True; it must be a whole number from 1 to 1024"),
        ({"products": [{**PRODUCT, "blocks": -1}]}, r"products\[0\].blocks is -1; it must be a whole"),
        ({"products": [{"rows": 1}]}, r"products\[0\].inputs is missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({**told(), **change}))
    with pytest.raises(TuningError, match=f"tuning.json: .*{said}"):
        tuning.read(path, "gfx942")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not JSON"), ("[]", "must be an object"), (" " * (1 << 20) + "{}", "more than 1048576 bytes")],
)
def test_what_is_no_such_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tuning.json"
    with pytest.raises(TuningError, match="No such file"):
        tuning.read(path, "gfx942")
    path.write_text(text)
    with pytest.raises(TuningError, match=said):
        tuning.read(path, "gfx942")


def test_where_it_is(tmp_path: Path) -> None:
    home, cache = {"HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path / "c")}
    assert tuning.default_path("gfx942", home) == tmp_path / ".cache" / "rocmforge" / "tuning-gfx942.json"
    assert tuning.default_path("sm_90", home | cache) == tmp_path / "c" / "rocmforge" / "tuning-sm_90.json"
    assert tuning.default_path("sm_90", home | {"XDG_CACHE_HOME": "here"}).is_relative_to(tmp_path / ".cache")


def test_attention_is_planned_and_compiled_by_it() -> None:
    geometry = Geometry(32, 8, 128, 16, 2, "BF16", "INT8")
    gpu = TUNED.gpu(GPU, "BF16", "INT8", 128, 4)
    assert (gpu.decode_blocks, plan.decode_matrix(geometry, gpu)) == (6, NO_MATRIX)
    assert plan.prefill_matrix(geometry, gpu) == MATRIX_16X8X16 == plan.decode_matrix(geometry, GPU)
    scalar = Tuning({("BF16", "INT8", 128, 4): (False, True, 0)}).gpu(GPU, "BF16", "INT8", 128, 4)
    assert (plan.prefill_matrix(geometry, scalar), plan.decode_matrix(geometry, scalar)) == (NO_MATRIX, MATRIX_16X8X16)
    both = Tuning({("BF16", "INT8", 128, 4): (False, False, 0)}).gpu(GPU, "BF16", "INT8", 128, 4)
    assert both.matrix == NO_MATRIX
    assert plan.decode_cost(geometry, gpu, 4).at_once == 6
    defines = plan.Attention(module.load, geometry, gpu, 1.0).defines("attention_decode", 4)
    assert defines["RF_BLOCKS"] == 6
    # Another shape, and one whose blocks were left to the kernels.
    assert TUNED.gpu(GPU, "BF16", "INT8", 64, 4) == TUNED.gpu(GPU, "F16", "F16", 64, 1) == GPU


def test_products_are_launched_by_it() -> None:
    product = gemv.Product(1, 4096, 1 << 18, 2)
    assert gemv.launch(GPU, product, 8).blocks == 2 * gemv.launch(GPU, product).blocks == 8 * GPU.processors
