"""Attention on AMD's cards as predicted from its machine code: nothing here is measured, and no GPU is needed.

The executor of tests/simulators/amdgpu runs the code objects and counts what is executed for each key. Each class of
instructions takes its unit a number of cycles, each byte of K and V the memory; what takes longest is the bound::

    python -m benchmarks.isa                                  # every row: minutes
    python -m benchmarks.isa --cards mi300x --pages INT8 --groups 8 --json

Assumed: every SIMD has work all the time; units work side by side, so that only the longest counts (`busy` is what
vector and matrix instructions take one after another, in percent of the memory's time); scalar instructions, waits and
the issue of loads are free; clocks are at their peak, and memory at its peak rate, which no card reaches. What a launch
takes besides its keys is left out, and of a prefill its memory, since tiles share keys.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from kernels.attention.plan import BYTES, Geometry
from kernels.device.gpu import NO_MATRIX, Gpu, matrix_unit
from tests.kernels.attention.counting import Counted, counted
from tests.simulators import amdgpu
from tests.simulators.amdgpu.code import classes

HEAD_DIM, PAGE_SIZE, GROUPS = 128, 16, (1, 2, 4, 8, 16)
#: A prefill's tile is as large for any group.
PREFILL_GROUP = 4


@dataclass(frozen=True, slots=True)
class Card:
    """A card's peaks: GHz, TB/s, and of each compute unit its SIMDs, and bytes of LDS a cycle.

    ``cycles`` that an instruction of a class keeps its SIMD, or its matrix unit, for a whole wave.
    """

    name: str
    target: str
    units: int
    simds: int
    ghz: float
    tbps: float
    lds_bytes: int
    cycles: Mapping[str, float]


#: From AMD's data sheets and ISA guides. CDNA 3 runs a wave of 64 lanes on 16 in 4 cycles, functions and products of
#: whole 32-bit numbers at a quarter of that rate; 1307 TFLOP/s of dense 16-bit products on 304 units are 16 cycles for
#: 16 x 16 x 16. RDNA 3 runs a wave of 32 on 32 lanes in 1 cycle, functions in 4; 123 TFLOP/s on 96 units are 32 cycles
#: for a WMMA.
CARDS = {
    "mi300x": Card("MI300X", "gfx942", 304, 4, 2.1, 5.3, 128, {"vector": 4, "slow": 16, "matrix": 16}),
    "7900xtx": Card("RX 7900 XTX", "gfx1100", 96, 2, 2.5, 0.96, 128, {"vector": 1, "slow": 4, "matrix": 32}),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one card, for a key of one kv head, in picoseconds of the whole card.

    ``percent`` of the memory's peak that a decode can reach; ``busy``: vector and matrix time in percent of the
    memory's. ``tflops``: a prefill's ceiling; ``tflops_in_turn``: the same if no two units work side by side.
    """

    card: str
    kernel: str
    units: str
    pages: str
    group: int
    vector: float
    matrix: float
    lds: float
    memory: float
    bound: str
    percent: float | None = None
    busy: float | None = None
    tflops: float | None = None
    tflops_in_turn: float | None = None


def lds_bytes(mnemonic: str, lanes: int) -> int:
    """Return the bytes that an instruction of a wave moves through LDS; an exchange between lanes moves words."""
    bits = int((re.findall(r"_[bu](\d+)", mnemonic) or ["32"])[-1])
    twice = 2 if re.search(r"read2|write2|2addr", mnemonic) else 1
    return max(4, bits // 8) * twice * lanes


def times(card: Card, each: Mapping[str, float], lanes: int, key_bytes: float) -> dict[str, float]:
    """Return picoseconds of the whole card for what is executed, by unit, and for ``key_bytes`` of memory."""
    summed = classes.summed(each)
    of_simd = 1e3 / (card.units * card.simds * card.ghz)
    moved = sum(count * lds_bytes(name, lanes) for name, count in each.items() if classes.of(name) == "lds")
    return {
        "vector": (summed["vector"] * card.cycles["vector"] + summed["slow"] * card.cycles["slow"]) * of_simd,
        "matrix": summed["matrix"] * card.cycles["matrix"] * of_simd,
        "lds": moved / card.lds_bytes * 1e3 / (card.units * card.ghz),
        "memory": key_bytes / card.tbps,
    }


def row(card: Card, geometry: Geometry, units: str, lanes: int, found: Counted, prefill: bool) -> Row:
    """Return the row of what was counted."""
    scales = 4 / geometry.page_size if geometry.kv_dtype == "INT8" else 0
    key_bytes = 2 * (geometry.head_dim * BYTES[geometry.kv_dtype] + scales)
    took = times(card, found.each, lanes, key_bytes * found.reads)
    # A prefill's tiles share their keys, by the caches: each loads them, and memory only once for all.
    bound = max(took.keys() - ({"memory"} if prefill else set()), key=lambda unit: took[unit])
    named = Row(
        card.name, "prefill" if prefill else "decode", units, geometry.kv_dtype, geometry.group,
        **{unit: round(value, 2) for unit, value in took.items()}, bound=bound,
    )  # fmt: skip
    if prefill:
        operations = 4 * geometry.head_dim * found.queries
        in_turn = took["vector"] + took["matrix"] + took["lds"]
        return replace(named, tflops=round(operations / took[bound]), tflops_in_turn=round(operations / in_turn))
    return replace(
        named,
        percent=round(100 * took["memory"] / found.reads / took[bound], 1),
        busy=round(100 * (took["vector"] + took["matrix"]) / took["memory"], 1),
    )


def rows(cards: list[str], kernels: list[str], pages: list[str], groups: list[int], units: list[str]) -> Iterator[Row]:
    """Count and predict, one row after another."""
    for card in (CARDS[name] for name in cards):
        device = amdgpu.Amd(card.target)
        for kernel in kernels:
            for kv_dtype in pages:
                for group in groups if kernel == "decode" else [PREFILL_GROUP]:
                    for unit in units:
                        geometry = Geometry(group, 1, HEAD_DIM, PAGE_SIZE, 2, "BF16", kv_dtype)
                        gpu = Gpu(device.wave, 1, matrix_unit(card.target) if unit == "matrix" else NO_MATRIX)
                        found = counted(device, geometry, gpu, kernel == "prefill")
                        yield row(card, geometry, unit, device.wave, found, kernel == "prefill")


HEAD = (
    f"{'card':12} {'kernel':8} {'units':7} {'pages':6} {'group':>5} {'vector':>7} {'matrix':>7} {'lds':>7} "
    f"{'memory':>7}  {'bound':7} {'percent':>7} {'busy':>6} {'TFLOP/s':>8} {'in turn':>8}"
)


def line(one: Row) -> str:
    """Return a row of the table: picoseconds a key, percent, TFLOP/s."""
    text = f"{one.card:12} {one.kernel:8} {one.units:7} {one.pages:6} {one.group:5}"
    text += "".join(f" {value:7.1f}" for value in (one.vector, one.matrix, one.lds, one.memory)) + f"  {one.bound:7}"
    if one.percent is not None:
        return text + f" {one.percent:7.1f} {one.busy:6.1f}"
    return text + f" {'':7} {'':6} {one.tflops:8} {one.tflops_in_turn:8}"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isa", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--kernels", nargs="+", choices=("decode", "prefill"), default=["decode", "prefill"])
    parser.add_argument("--pages", nargs="+", choices=("BF16", "INT8"), default=["BF16", "INT8"])
    parser.add_argument("--groups", nargs="+", type=int, choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--units", nargs="+", choices=("scalar", "matrix"), default=["scalar", "matrix"])
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each kernel as soon as it is counted."""
    asked = parsed(arguments)
    if not asked.json:
        print(HEAD)
    for one in rows(asked.cards, asked.kernels, asked.pages, asked.groups, asked.units):
        print(json.dumps(asdict(one)) if asked.json else line(one), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
