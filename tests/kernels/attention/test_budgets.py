"""What attention executes for a key on AMD's GPUs: budgets of vector instructions, and the estimates made of them."""

from __future__ import annotations

import json

import pytest

from benchmarks import isa
from kernels.attention.plan import Geometry
from kernels.device.gpu import NO_MATRIX, Gpu, matrix_unit
from tests.kernels import devices
from tests.kernels.attention.counting import Counted, counted
from tests.simulators import amdgpu
from tests.simulators.amdgpu.code import classes

#: Vector instructions of all waves for a key of one kv head: kernel, pages, group, and the most on each of the GPUs.
#: What was counted and 3 %: who makes a kernel better lowers them.
BUDGETS: dict[tuple[str, str, str, int], dict[str, float]] = {
    ("decode", "matrix", "BF16", 8): {"gfx942": 6.7, "gfx90a": 7.7, "gfx1100": 36.2, "gfx1201": 12.4},
    ("decode", "matrix", "INT8", 8): {"gfx942": 13.8, "gfx90a": 14.9, "gfx1100": 43.1, "gfx1201": 26.0},
    ("prefill", "matrix", "BF16", 4): {"gfx942": 35.4, "gfx90a": 36.6, "gfx1100": 219.2, "gfx1201": 64.7},
}
CASES = [
    pytest.param(device, *key, most, id="-".join(map(str, (device, *key))))
    for key, budget in BUDGETS.items()
    for device, most in budget.items()
]


@pytest.mark.parametrize(("device", "kernel", "units", "pages", "group", "most"), CASES)
def test_vector_instructions_a_key(device: str, kernel: str, units: str, pages: str, group: int, most: float) -> None:
    on = devices.get(device)
    assert isinstance(on, amdgpu.Amd)
    gpu = Gpu(on.wave, 1, matrix_unit(device) if units == "matrix" else NO_MATRIX)
    found = counted(on, Geometry(group, 1, 128, 16, 2, "BF16", pages), gpu, kernel == "prefill")
    summed = classes.summed(found.each)
    vector = summed["vector"] + summed["slow"]
    # A budget that is far from what is executed keeps nothing.
    assert 0.8 * most <= vector <= most, f"{vector:.2f} vector instructions a key"
    assert bool(summed["matrix"]) == (units == "matrix")


def test_times() -> None:
    """Of a card with round numbers: 10 units of 4 SIMDs at 1 GHz are 40 cycles a nanosecond."""
    card = isa.Card("round", "gfx942", 10, 4, 1.0, 2.0, 128, {"vector": 4, "slow": 16, "matrix": 32})
    each = {
        "v_add_f32_e32": 8.0, "v_exp_f32_e32": 2.0, "v_mfma_f32_16x16x16_bf16": 1.0, "ds_read_b128": 1.0,
        "ds_bpermute_b32": 2.0, "s_nop": 100.0, "global_load_dwordx4": 3.0,
    }  # fmt: skip
    took = isa.times(card, each, 64, 512)
    # LDS: (16 + 2 * 4) bytes of 64 lanes at 1280 bytes a nanosecond.
    assert took == pytest.approx({"vector": 64 / 40 * 1e3, "matrix": 32 / 40 * 1e3, "lds": 1200, "memory": 256})
    decode = isa.row(card, Geometry(8, 1, 128, 16, 2, "BF16", "BF16"), "matrix", 64, Counted(each, 8, 1), False)
    assert (decode.bound, decode.percent, decode.busy) == ("vector", 16.0, 937.5)
    twice = isa.row(card, Geometry(8, 1, 128, 16, 2, "BF16", "BF16"), "matrix", 64, Counted({"s_nop": 1}, 8, 2), False)
    assert (twice.bound, twice.memory, twice.percent) == ("memory", 512, 50.0)
    prefill = isa.row(card, Geometry(8, 1, 128, 16, 2, "BF16", "BF16"), "matrix", 64, Counted(each, 128, 1), True)
    assert (prefill.tflops, prefill.tflops_in_turn) == (round(65536 / 1600), round(65536 / 3600))


@pytest.mark.parametrize(
    ("mnemonic", "bytes_a_lane"),
    [("ds_read2st64_b64", 16), ("ds_load_2addr_b32", 8), ("ds_store_b16", 4), ("ds_add_rtn_u32", 4)],
)
def test_bytes_through_lds(mnemonic: str, bytes_a_lane: int) -> None:
    assert isa.lds_bytes(mnemonic, 32) == 32 * bytes_a_lane


def test_every_listed_instruction_has_a_class() -> None:
    from tests.simulators.amdgpu.code.mnemonics import listed

    assert {classes.of(name) for name in listed()} == {"matrix", "slow", "vector", "lds", "memory", "scalar"}
    with pytest.raises(ValueError, match="no unit executes it"):
        classes.of("x_add")


@pytest.mark.parametrize("device", ["gfx942"])
def test_the_benchmark(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert devices.get(device)
    only = ["--cards", "mi300x", "--kernels", "decode", "--pages", "INT8", "--groups", "8", "--units", "matrix"]
    assert isa.main([*only, "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["card"], row["group"], row["bound"], row["tflops"]) == ("MI300X", 8, "memory", None)
    assert 0 < row["vector"] + row["matrix"] < row["memory"] * 0.8
    assert row["busy"] == pytest.approx(100 * (row["vector"] + row["matrix"]) / row["memory"], abs=0.2)
