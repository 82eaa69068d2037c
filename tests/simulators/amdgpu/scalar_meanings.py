# mypy: disable-error-code="arg-type, misc"
"""What scalar instructions give, by AMD's guides to the instruction sets: of whole numbers, floats and SCC.

A row: a pattern of mnemonics; a form as in meanings.py, where the destination may be ``-``, + is the destination as the
last source, and k a literal of 16 bits with its sign; a function of the sources and SCC, which gives the result and the
new SCC, None where SCC stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.simulators.amdgpu.exact import fused
from tests.simulators.amdgpu.meanings import roughly, saturated, signed

Form = tuple[str, str, Callable[..., tuple[Any, int | None]]]


def _nonzero(function: Callable[[int, int], int], bits: int) -> Callable[..., tuple[int, int]]:
    def of(*sources: int) -> tuple[int, int]:
        result = function(*sources[:-1]) & ((1 << bits) - 1)
        return result, int(result != 0)

    return of


def _added(a: int, b: int, scc: int) -> tuple[int, int]:
    return a + b, int(a + b >= 1 << 32)


def _overflow(value: int) -> tuple[int, int]:
    return value, int(not -(1 << 31) <= value < 1 << 31)


def _plain(function: Callable[..., Any]) -> Callable[..., tuple[Any, None]]:
    return lambda *sources: (function(*sources[:-1]), None)


def _of_bits() -> list[Form]:
    found: list[Form] = []
    for bits, letter, sign in ((32, "u", "i"), (64, "U", "I")):
        two = f"{letter} {letter}{letter}"
        for name, function in {
            "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
            "and(n2|_not1)": lambda a, b: a & ~b, "or(n2|_not1)": lambda a, b: a | ~b,
        }.items():  # fmt: skip
            found.append((f"s_{name}_b{bits}", two, _nonzero(function, bits)))
        found += [
            (f"s_mov_b{bits}", f"{letter} {letter}", _plain(lambda a: a)),
            (f"s_not_b{bits}", f"{letter} {letter}", _nonzero(lambda a: ~a, bits)),
            (f"s_brev_b{bits}", f"{letter} {letter}", _plain(lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))),
            (f"s_cselect_b{bits}", two, lambda a, b, scc: (a if scc else b, None)),
            (f"s_lshl_b{bits}", f"{letter} {letter}u", _nonzero(lambda a, b, n=bits: a << b % n, bits)),
            (f"s_lshr_b{bits}", f"{letter} {letter}u", _nonzero(lambda a, b, n=bits: a >> b % n, bits)),
            (f"s_ashr_i{bits}", f"{sign} {sign}u", _nonzero(lambda a, b, n=bits: a >> b % n, bits)),
            (f"s_bcnt1_i32_b{bits}", f"u {letter}", _nonzero(lambda a: a.bit_count(), 32)),
            (f"s_(ff1_i32_b|ctz_i32_b){bits}", f"u {letter}", _plain(lambda a: (a & -a).bit_length() - 1 if a else -1)),
            (
                f"s_(flbit_i32_b|clz_i32_u){bits}", f"u {letter}",
                _plain(lambda a, n=bits: n - a.bit_length() if a else -1),
            ),
            (f"s_bitset1_b{bits}", f"{letter} u+", _plain(lambda a, old, n=bits: old | 1 << a % n)),
            (f"s_bitcmp1_b{bits}", f"- {letter}u", lambda a, b, scc, n=bits: (None, a >> b % n & 1)),
            (f"s_bitcmp0_b{bits}", f"- {letter}u", lambda a, b, scc, n=bits: (None, 1 - (a >> b % n & 1))),
            (f"s_cmp_eq_u{bits}", f"- {letter}{letter}", lambda a, b, scc: (None, int(a == b))),
            (f"s_cmp_lg_u{bits}", f"- {letter}{letter}", lambda a, b, scc: (None, int(a != b))),
        ]  # fmt: skip
    return found


COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip


def _of_order() -> list[Form]:
    found: list[Form] = []
    for name, function in COMPARES.items():

        def told(a: Any, b: Any, scc: int, of: Callable[[Any, Any], bool] = function) -> tuple[None, int]:
            return None, int(of(a, b))

        def denied(a: Any, b: Any, scc: int, of: Callable[[Any, Any], bool] = function) -> tuple[None, int]:
            return None, int(not of(a, b))

        found += [(f"s_cmp_{name}_i32", "- ii", told), (f"s_cmp_{name}_u32", "- uu", told)]
        found += [(f"s_cmpk_{name}_i32", "- ik", told)]

        def without_sign(a: Any, b: Any, scc: int, of: Callable[[Any, Any], bool] = function) -> tuple[None, int]:
            return None, int(of(a, b & 0xFFFF))

        found += [(f"s_cmpk_{name}_u32", "- uk", without_sign)]
        if name not in ("eq", "lg"):
            found += [(f"s_cmp_{name}_f32", "- ff", told), (f"s_cmp_n{name}_f32", "- ff", denied)]
    # Less or greater: neither, where one is no number.
    found.append(("s_cmp_lg_f32", "- ff", lambda a, b, scc: (None, int(a < b or a > b))))
    found.append(("s_cmp_nlg_f32", "- ff", lambda a, b, scc: (None, int(not (a < b or a > b)))))
    return found


def _float(function: Callable[..., Any]) -> Callable[..., tuple[Any, None]]:
    def of(*sources: Any) -> tuple[Any, None]:
        with np.errstate(all="ignore"):
            return function(*(np.float32(one) for one in sources[:-1])), None

    return of


def _fused(a: Any, b: Any, c: Any) -> Any:
    return fused(np.array([a], np.float32), np.array([b], np.float32), np.array([c], np.float32))[0]


def _to_unsigned(a: Any) -> Any:
    return saturated(np.uint32)(np.array([a], np.float32))[0]


def _half(bits: int, scc: int) -> tuple[Any, None]:
    return np.float32(np.array([bits & 0xFFFF], np.uint16).view(np.float16)[0]), None


SCALARS: list[Form] = [
    *_of_bits(),
    *_of_order(),
    ("s_add(_co)?_u32", "u uu", _added),
    ("s_add(c|_co_ci)_u32", "u uu", lambda a, b, scc: _added(a, b + scc, scc)),
    ("s_sub(_co)?_u32", "u uu", lambda a, b, scc: (a - b, int(a < b))),
    ("s_sub(b|_co_ci)_u32", "u uu", lambda a, b, scc: (a - b - scc, int(a < b + scc))),
    ("s_add(_co)?_i32", "i ii", lambda a, b, scc: _overflow(a + b)),
    ("s_sub(_co)?_i32", "i ii", lambda a, b, scc: _overflow(a - b)),
    ("s_add_nc_u64", "U UU", _plain(lambda a, b: a + b)),
    ("s_sub_nc_u64", "U UU", _plain(lambda a, b: a - b)),
    ("s_mul_u64", "U UU", _plain(lambda a, b: a * b)),
    ("s_mul_i32", "i ii", _plain(lambda a, b: a * b)),
    ("s_mul_hi_u32", "u uu", _plain(lambda a, b: a * b >> 32)),
    ("s_mul_hi_i32", "i ii", _plain(lambda a, b: a * b >> 32)),
    ("s_abs_i32", "i i", _nonzero(lambda a: abs(a), 32)),
    ("s_min_i32", "i ii", lambda a, b, scc: (min(a, b), int(a < b))),
    ("s_min_u32", "u uu", lambda a, b, scc: (min(a, b), int(a < b))),
    ("s_max_i32", "i ii", lambda a, b, scc: (max(a, b), int(a > b))),
    ("s_max_u32", "u uu", lambda a, b, scc: (max(a, b), int(a > b))),
    ("s_bfe_u32", "u uu", _nonzero(lambda a, b: a >> (b & 31) & ((1 << (b >> 16 & 127)) - 1), 32)),
    ("s_movk_i32", "i k", _plain(lambda a: a)),
    ("s_addk(_co)?_i32", "i k+", lambda a, old, scc: _overflow(a + old)),
    ("s_mulk_i32", "i k+", _plain(lambda a, old: signed(a * old, 32))),
    ("s_add_f32", "f ff", _float(lambda a, b: a + b)),
    ("s_sub_f32", "f ff", _float(lambda a, b: a - b)),
    ("s_mul_f32", "f ff", _float(lambda a, b: a * b)),
    ("s_fmac_f32", "f ff+", _float(_fused)),
    ("s_fmamk_f32", "f f#f", _float(_fused)),
    ("s_cvt_f32_i32", "f i", _plain(lambda a: np.float32(a))),
    ("s_cvt_f32_u32", "f u", _plain(lambda a: np.float32(a))),
    ("s_cvt_u32_f32", "u f", _float(_to_unsigned)),
    ("s_cvt_f32_f16", "f u", _half),
    ("v_s_log_f32", "f~ f", _float(lambda a: roughly(np.log2)(np.array([a]))[0])),
    ("v_s_rsq_f32", "f~ f", _float(lambda a: roughly(lambda b: 1 / np.sqrt(b))(np.array([a]))[0])),
]  # fmt: skip
