"""Cases of products of matrices and of moves between the lanes of a wave: MFMA, WMMA, permlane, DPP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulators.amdgpu.cases import FROM, SCALAR_FROM, TO, Case, blend, random_state, register, rng_of, wave_of
from tests.simulators.amdgpu.wave import State

A, B, C = 32, 48, 64


def matrix_cases(mnemonic: str, gpu: str) -> Iterator[Case]:
    """Cases of an instruction, or none."""
    match = re.fullmatch(r"v_(mfma|wmma)_f32_(\d+)x(\d+)x(\d+)_?(bf16|f16)(_1k)?", mnemonic)
    if match:
        yield from _products(mnemonic, gpu, match)
    elif mnemonic in ("v_permlanex16_b32", "v_permlane16_b32"):
        yield from _permuted_rows(mnemonic, gpu)
    elif mnemonic.endswith("_dpp"):
        yield from _moved_lanes(mnemonic, gpu)


def _stored(values: NDArray[np.float32], kind: str) -> NDArray[np.uint32]:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return (values.view(np.uint32) >> 16).astype(np.uint32)


def _wide(bits: NDArray[np.uint32], kind: str) -> NDArray[np.float32]:
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return (bits << 16).astype(np.uint32).view(np.float32)


def _products(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    """Whole matrices, laid out by the guides' tables; small numbers, whose sums are exact in any order."""
    rows, depth, kind = int(match[2]), int(match[4]), match[5]
    lanes = wave_of(gpu)
    for number in range(3):
        rng = rng_of(f"{mnemonic}{number}")
        state = random_state(rng, gpu)
        matrices = [
            rng.integers(-8, 9, shape).astype(np.float32) for shape in ((rows, depth), (depth, rows), (rows, rows))
        ]
        a, b, c = matrices
        # RDNA 3: every lane has a whole row or column. Else groups of lanes share it, each with its part of the depth.
        whole = gpu == "gfx1100"
        each = depth if whole else depth * rows // lanes
        for lane in range(lanes):
            first = 0 if whole else lane // rows * each
            for place, values in ((A, a[lane % rows, first : first + each]), (B, b[first : first + each, lane % rows])):
                bits = _stored(np.ascontiguousarray(values), kind)
                for i in range(0, each, 2):
                    state.v[place + i // 2, lane] = bits[i] | bits[i + 1] << 16
        places = {(i, lane): _row_of(i, lane, rows, gpu) for i in range(rows * rows // lanes) for lane in range(lanes)}
        for (i, lane), row in places.items():
            state.v[C + i, lane] = c[row, lane % rows].view(np.uint32)
        words, registers = each // 2, rows * rows // lanes
        zero = number == 2
        sum_of = "0" if zero else register("v", C, registers)
        text = (
            f"{mnemonic} {register('v', TO, registers)}, {register('v', A, words)}, {register('v', B, words)}, {sum_of}"
        )

        def expect(after: State, product: Any = a @ b + (0 if zero else c), places: Any = places) -> None:
            for (i, lane), row in places.items():
                after.v[TO + i, lane] = np.float32(product[row, lane % rows]).view(np.uint32)

        yield Case(text, state, expect)


def _row_of(i: int, lane: int, rows: int, gpu: str) -> int:
    if gpu == "gfx1100":
        return 2 * i + lane // 16
    if gpu == "gfx1201":
        return i + 8 * (lane // 16)
    group = lane // rows
    return i % 4 + 4 * group + i // 4 * (4 * (64 // rows))


def _permuted_rows(mnemonic: str, gpu: str) -> Iterator[Case]:
    lanes = wave_of(gpu)
    for number in range(4):
        rng = rng_of(f"{mnemonic}{number}")
        state = random_state(rng, gpu)
        fetches, zero = number & 1, number >> 1
        text = f"{mnemonic} v{TO}, v{FROM}, s{SCALAR_FROM}, s{SCALAR_FROM + 4} op_sel:[{fetches},{zero}]"

        def expect(after: State, fetches: int = fetches, zero: int = zero) -> None:
            before, active = after.copy(), after.active(lanes)
            for lane in np.flatnonzero(active):
                selector = int(before.s[SCALAR_FROM + (4 if lane % 16 >= 8 else 0)])
                row = lane // 16 ^ (1 if "x16" in mnemonic else 0)
                source = 16 * row + (selector >> 4 * (lane % 8) & 15)
                if fetches or active[source]:
                    after.v[TO, lane] = before.v[FROM, source]
                elif zero:
                    after.v[TO, lane] = 0

        yield Case(text, state, expect)


CONTROLS = ["quad_perm:[1,0,3,2]", "quad_perm:[3,3,0,1]", "row_shl:3", "row_shr:1", "row_shr:15", "row_ror:5",
            "row_mirror", "row_half_mirror"]  # fmt: skip
OF_CDNA = ["row_bcast:15", "row_bcast:31", "wave_shr:1", "wave_shl:1", "wave_rol:1", "wave_ror:1", "row_newbcast:6"]
OF_RDNA = ["row_share:6", "row_xmask:9"]


def _moved_lanes(mnemonic: str, gpu: str) -> Iterator[Case]:
    """The first source of an addition from another lane, by every control; then rows, banks and bounds."""
    lanes = wave_of(gpu)
    controls = CONTROLS + (OF_CDNA if lanes == 64 else OF_RDNA)
    rests = ["row_mask:0xf bank_mask:0xf", "row_mask:0xa bank_mask:0x5", "row_mask:0xf bank_mask:0xf bound_ctrl:1"]
    for number, (control, rest) in enumerate((one, other) for one in controls for other in rests):
        state = random_state(rng_of(f"{mnemonic}{number}"), gpu)
        sources = f"v{FROM}" if "mov" in mnemonic else f"v{FROM}, v{FROM + 4}"

        def expect(after: State, control: str = control, rest: str = rest) -> None:
            before, active = after.copy(), after.active(lanes)
            rows, banks = (0xA, 0x5) if "0xa" in rest else (15, 15)
            result, written = before.v[TO].copy(), active.copy()
            for lane in range(lanes):
                source = _lane_of(control, lane, lanes)
                there = source is not None and active[source]
                first = before.v[FROM, source] if there else np.uint32(0)
                written[lane] &= bool(
                    rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1 and (there or "bound" in rest)
                )
                result[lane] = first if "mov" in mnemonic else (int(first) + int(before.v[FROM + 4, lane])) & 0xFFFFFFFF
            blend(after, TO, result, written, gpu)

        yield Case(f"{mnemonic} v{TO}, {sources} {control} {rest}", state, expect)


def _lane_of(control: str, lane: int, lanes: int) -> int | None:
    name, _, value = control.partition(":")
    row, at = lane // 16 * 16, lane % 16
    if name == "quad_perm":
        return lane // 4 * 4 + [int(one) for one in value.strip("[]").split(",")][lane % 4]
    by = int(value or 0)
    found = {
        "row_shl": row + at + by if at + by < 16 else None, "row_shr": row + at - by if at >= by else None,
        "row_ror": row + (at - by) % 16, "row_mirror": row + 15 - at, "row_half_mirror": lane // 8 * 8 + 7 - lane % 8,
        "row_bcast": (row - 1 if row else None) if by == 15 else (31 if lane >= 32 else None),
        "wave_shr": lane - 1 if lane else None, "wave_shl": lane + 1 if lane + 1 < lanes else None,
        "wave_rol": (lane + 1) % lanes, "wave_ror": (lane - 1) % lanes, "row_newbcast": row + by, "row_share": row + by,
        "row_xmask": row + (at ^ by),
    }  # fmt: skip
    return found[name]
