# mypy: disable-error-code="operator"
"""What vector instructions of lanes and scalar instructions give, by AMD's guides to the instruction sets.

`LANES`: a pattern of mnemonics without the suffix of their encoding, a form, and a function of arrays, a number a lane.
A form names the destination's type and the sources': u i f are of 32 bits, U I F of 64, k j h of 16, m is a mask of
lanes, s a small number; ``um`` is a number and a mask, + the destination as a source, # a literal, v VCC without a word
of it, ~ an approximation.

The functions are written in whole numbers and exact fractions, apart from the executor and its names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulators.amdgpu.exact import fused, lanewise

TYPES: dict[str, Any] = {
    "u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64, "F": np.float64,
    "k": np.uint16, "j": np.int16, "h": np.float16,
}  # fmt: skip

Values = NDArray[Any]


def signed(value: int, bits: int) -> int:
    """Return the lowest bits of a number as one with a sign."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def whole(function: Callable[..., int], kind: Any = np.uint32) -> Callable[..., Values]:
    """Return a function of whole numbers for arrays."""
    return lanewise(function, kind)


def most(a: Values, b: Values) -> Values:
    """Return the larger; the number of a number and none; +0 of zeros."""
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), b, a), np.fmax(a, b)).astype(a.dtype)


def least(a: Values, b: Values) -> Values:
    """Return the smaller; the number of a number and none; -0 of zeros."""
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), a, b), np.fmin(a, b)).astype(a.dtype)


def middle(a: Values, b: Values, c: Values) -> Values:
    """Return the middle of three; if one is no number, the smallest."""
    none = np.isnan(a) | np.isnan(b) | np.isnan(c)
    ordered = np.sort(np.stack([a, b, c]), axis=0)[1]
    return np.where(none, least(least(a, b), c), ordered).astype(a.dtype)


def saturated(kind: Any) -> Callable[[Values], Values]:
    """Return the conversion to whole numbers: towards 0, to the nearest that there is, 0 of what is no number."""
    info = np.iinfo(kind)

    def convert(values: Values) -> Values:
        found = []
        for value in values.tolist():
            inside = 0 if math.isnan(value) else max(info.min, min(info.max, value))
            found.append(int(inside))
        return np.array(found, kind)

    return convert


def no_denormals(values: Values) -> Values:
    """Return 0 for what is below the normal numbers, as the approximations take and give."""
    tiny = np.finfo(values.dtype).tiny
    return np.where(np.abs(values) < tiny, np.copysign(values.dtype.type(0), values), values)


def roughly(function: Callable[[Values], Values]) -> Callable[[Values], Values]:
    """Return an approximation: computed in float64 and rounded."""

    def computed(values: Values) -> Values:
        with np.errstate(all="ignore"):
            return no_denormals(function(no_denormals(values).astype(np.float64)).astype(values.dtype))

    return computed


def permuted(a: int, b: int, selector: int) -> int:
    """Return bytes of {a, b}; selectors from 8 on are signs, 0 and 255."""
    of = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    found = []
    for which in selector.to_bytes(4, "little"):
        if which < 8:
            found.append(of[which])
        elif which < 12:
            found.append(255 if of[2 * (which - 8) + 1] & 0x80 else 0)
        else:
            found.append(0 if which == 12 else 255)
    return int.from_bytes(bytes(found), "little")


def class_of(values: Values, asked: Values) -> Values:
    """Return whether a float is of one of the classes that a mask asks for."""
    info = np.finfo(values.dtype)
    quiet = values.view(np.uint32 if values.itemsize == 4 else np.uint64) >> (info.nmant - 1) & 1
    minus, finite = np.signbit(values), np.isfinite(values)
    small = (np.abs(values) < info.tiny) & (values != 0)
    bits = np.select(
        [np.isnan(values) & (quiet == 0), np.isnan(values), np.isinf(values) & minus, np.isinf(values),
         (values == 0) & minus, values == 0, small & minus, small, minus & finite],
        [0, 1, 2, 9, 5, 6, 4, 7, 3], 8,
    )  # fmt: skip
    return (asked.astype(np.int64) >> bits & 1) == 1


def _exponent(values: Values) -> Values:
    info = np.finfo(values.dtype)
    bits = values.view(np.uint32 if values.itemsize == 4 else np.uint64).astype(np.uint64)
    return (bits >> np.uint64(info.nmant)).astype(np.int64) & ((1 << (values.itemsize * 8 - 1 - info.nmant)) - 1)


def scaled(a: Values, b: Values, c: Values) -> tuple[Values, Values]:
    """v_div_scale: a, which is the denominator b or the numerator c, scaled for a division; and whether it was both."""
    double = a.dtype == np.float64
    far, by, tiny = (768, 128, 53) if double else (96, 64, 23)
    with np.errstate(all="ignore"):
        quotient, inverse = c / b, a.dtype.type(1) / b
    smallest = np.finfo(a.dtype).tiny

    def denormal(value: Values) -> Values:
        return (np.abs(value) < smallest) & (value != 0)

    value, flag = a.copy(), np.zeros(len(a), bool)
    with np.errstate(all="ignore"):
        up, down = np.ldexp(a, by), np.ldexp(a, -by)
    for lane in range(len(a)):
        same_b, same_c = a[lane].tobytes() == b[lane].tobytes(), a[lane].tobytes() == c[lane].tobytes()
        if b[lane] == 0 or c[lane] == 0:
            value[lane] = np.nan
        elif _exponent(c)[lane] - _exponent(b)[lane] >= far:
            flag[lane] = True
            value[lane] = up[lane] if same_b else a[lane]
        elif denormal(b)[lane]:
            value[lane] = up[lane]
        elif denormal(inverse)[lane] and denormal(quotient)[lane]:
            flag[lane] = True
            value[lane] = up[lane] if same_b else a[lane]
        elif denormal(inverse)[lane]:
            value[lane] = down[lane]
        elif denormal(quotient)[lane]:
            flag[lane] = True
            value[lane] = up[lane] if same_c else a[lane]
        elif _exponent(c)[lane] <= tiny:
            value[lane] = up[lane]
    return value, flag


def refined(a: Values, b: Values, c: Values, vcc: Values) -> Values:
    """v_div_fmas: a b + c, scaled back where VCC says."""
    double = a.dtype == np.float64
    power, bias = (128, 1023) if double else (64, 127)
    scale = np.where(vcc, np.where(_exponent(c) > bias, 2.0**power, 2.0**-power), 1.0).astype(a.dtype)
    with np.errstate(all="ignore"):
        return fused(a, b, c) * scale


def fixed(quotient: Values, b: Values, c: Values) -> Values:
    """v_div_fixup: the quotient c / b where it is not by itself clear."""
    with np.errstate(all="ignore"):
        sign = np.where(np.signbit(b) != np.signbit(c), -1.0, 1.0).astype(b.dtype)
        far = 1075 if b.dtype == np.float64 else 150
        out = np.copysign(quotient, sign)
        out = np.where(_exponent(c) - _exponent(b) < -far, sign * 0, out)
        out = np.where(np.isinf(b) | (c == 0), sign * 0, out)
        out = np.where((b == 0) | np.isinf(c), sign * np.inf, out)
        out = np.where(((b == 0) & (c == 0)) | (np.isinf(b) & np.isinf(c)) | np.isnan(b) | np.isnan(c), np.nan, out)
    return out.astype(b.dtype)


def _carry(function: Callable[..., int]) -> Callable[..., tuple[Values, Values]]:
    """Of a sum or difference without bounds: what fits into 32 bits, and whether that is not all."""

    def over(*arrays: Values) -> tuple[Values, Values]:
        found = [function(*(int(one) for one in lanes)) for lanes in zip(*arrays, strict=True)]
        return np.array([one & 0xFFFFFFFF for one in found], np.uint32), np.array(
            [not 0 <= one < 1 << 32 for one in found]
        )

    return over


def _wide_sum(low: int, high: int) -> Callable[..., tuple[Values, Values]]:
    def over(a: Values, b: Values, c: Values) -> tuple[Values, Values]:
        found = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]
        return np.array([one & (1 << 64) - 1 for one in found], np.uint64), np.array(
            [not low <= one < high for one in found]
        )

    return over


def _half_words(a: Values, b: Values) -> Values:
    return a.astype(np.uint32) | b.astype(np.uint32) << 16


def _field(value: int, at: int, width: int) -> int:
    return value >> (at % 32) & ((1 << (width % 32)) - 1)


M24 = 0xFFFFFF
Form = tuple[str, str, Callable[..., Any]]
LANES: list[Form] = [
    ("v_(dual_)?mov_b32|v_accvgpr_(read|write|mov)_b32", "u u", lambda a: a),
    ("v_mov_b64", "U U", lambda a: a),
    ("v_not_b32", "u u", lambda a: ~a),
    ("v_bfrev_b32", "u u", whole(lambda a: int(f"{a:032b}"[::-1], 2))),
    ("v_(dual_)?add(_nc)?_u32", "u uu", lambda a, b: a + b),
    ("v_sub(_nc)?_u32", "u uu", lambda a, b: a - b),
    ("v_subrev(_nc)?_u32", "u uu", lambda a, b: b - a),
    ("v_add(_nc)?_u16", "k kk", lambda a, b: a + b),
    ("v_sub(_nc)?_u16", "k kk", lambda a, b: a - b),
    ("v_mul_lo_u16", "k kk", lambda a, b: a * b),
    ("v_lshlrev_b16", "k kk", whole(lambda a, b: b << a % 16, np.uint16)),
    ("v_ashrrev_i16", "j kj", lanewise(lambda a, b: b >> a % 16, np.int16)),
    ("v_lshrrev_b16", "k kk", whole(lambda a, b: b >> a % 16, np.uint16)),
    ("v_(dual_)?and_b32", "u uu", lambda a, b: a & b),
    ("v_or_b32", "u uu", lambda a, b: a | b),
    ("v_xor_b32", "u uu", lambda a, b: a ^ b),
    ("v_(dual_)?lshlrev_b32", "u uu", whole(lambda a, b: b << a % 32)),
    ("v_lshrrev_b32", "u uu", whole(lambda a, b: b >> a % 32)),
    ("v_ashrrev_i32", "i ui", lanewise(lambda a, b: b >> a % 32, np.int32)),
    ("v_lshlrev_b64", "U uU", whole(lambda a, b: b << a % 64, np.uint64)),
    ("v_lshrrev_b64", "U uU", whole(lambda a, b: b >> a % 64, np.uint64)),
    ("v_ashrrev_i64", "I uI", lanewise(lambda a, b: b >> a % 64, np.int64)),
    ("v_lshl_add_u64", "U UsU", whole(lambda a, b, c: (a << b) + c, np.uint64)),
    ("v_max_i32", "i ii", np.maximum),
    ("v_min_i32", "i ii", np.minimum),
    ("v_max_u32", "u uu", np.maximum),
    ("v_min_u32", "u uu", np.minimum),
    ("v_min3_i32", "i iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    ("v_mul_lo_u32", "u uu", whole(lambda a, b: a * b)),
    ("v_mul_hi_u32", "u uu", whole(lambda a, b: a * b >> 32)),
    ("v_mul_hi_i32", "i ii", lanewise(lambda a, b: a * b >> 32, np.int32)),
    ("v_mul_u32_u24", "u uu", whole(lambda a, b: (a & M24) * (b & M24))),
    ("v_mul_i32_i24", "u uu", whole(lambda a, b: signed(a, 24) * signed(b, 24))),
    ("v_mad_u32_u24", "u uuu", whole(lambda a, b, c: (a & M24) * (b & M24) + c)),
    ("v_mad_i32_i24", "u uuu", whole(lambda a, b, c: signed(a, 24) * signed(b, 24) + c)),
    ("v_mad_(co_)?u64_u32", "Um uuU", _wide_sum(0, 1 << 64)),
    ("v_mad_(co_)?i64_i32", "Um iiI", _wide_sum(-(1 << 63), 1 << 63)),
    ("v_add3_u32", "u uuu", lambda a, b, c: a + b + c),
    ("v_add_lshl_u32", "u uuu", whole(lambda a, b, c: (a + b & 0xFFFFFFFF) << c % 32)),
    ("v_lshl_add_u32", "u uuu", whole(lambda a, b, c: (a << b % 32) + c)),
    ("v_lshl_or_b32", "u uuu", whole(lambda a, b, c: a << b % 32 | c)),
    ("v_and_or_b32", "u uuu", lambda a, b, c: a & b | c),
    ("v_or3_b32", "u uuu", lambda a, b, c: a | b | c),
    ("v_xad_u32", "u uuu", lambda a, b, c: (a ^ b) + c),
    ("v_bfe_u32", "u uuu", whole(_field)),
    ("v_bfe_i32", "u uuu", whole(lambda a, b, c: signed(_field(a, b, c), c % 32) if c % 32 else 0)),
    ("v_bfi_b32", "u uuu", lambda a, b, c: a & b | ~a & c),
    ("v_alignbit_b32", "u uuu", whole(lambda a, b, c: (a << 32 | b) >> c % 32)),
    ("v_perm_b32", "u uuu", whole(permuted)),
    ("v_(dual_)?cndmask_b32", "u uum", lambda a, b, c: np.where(c, b, a)),
    ("v_add_co_u32", "um uu", _carry(lambda a, b: a + b)),
    ("v_sub_co_u32", "um uu", _carry(lambda a, b: a - b)),
    ("v_subrev_co_u32", "um uu", _carry(lambda a, b: b - a)),
    ("v_add(c_co|_co_ci)_u32", "um uum", _carry(lambda a, b, c: a + b + c)),
    ("v_sub(b_co|_co_ci)_u32", "um uum", _carry(lambda a, b, c: a - b - c)),
    ("v_subrev_co_ci_u32|v_subbrev_co_u32", "um uum", _carry(lambda a, b, c: b - a - c)),
    ("v_(dual_)?add_f32", "f ff", lambda a, b: a + b),
    ("v_(dual_)?sub_f32", "f ff", lambda a, b: a - b),
    ("v_(dual_)?subrev_f32", "f ff", lambda a, b: b - a),
    ("v_(dual_)?mul_f32", "f ff", lambda a, b: a * b),
    ("v_(dual_)?max(_num)?_f32", "f ff", most),
    ("v_(dual_)?min(_num)?_f32", "f ff", least),
    ("v_max3(_num)?_f32", "f fff", lambda a, b, c: most(most(a, b), c)),
    ("v_med3(_num)?_f32", "f fff", middle),
    ("v_(dual_)?fmac_f32", "f ff+", fused),
    ("v_fmac_f64", "F FF+", fused),
    ("v_fma_f32", "f fff", fused),
    ("v_fma_f64", "F FFF", fused),
    ("v_(dual_)?fmamk_f32", "f f#f", lambda a, k, b: fused(a, k, b)),
    ("v_add_f64", "F FF", lambda a, b: a + b),
    ("v_mul_f64", "F FF", lambda a, b: a * b),
    ("v_add_f16", "h hh", lambda a, b: a + b),
    ("v_rndne_f32", "f f", np.rint),
    ("v_exp_f32", "f~ f", roughly(np.exp2)),
    ("v_log_f32", "f~ f", roughly(np.log2)),
    ("v_rcp(_iflag)?_f32", "f~ f", roughly(lambda a: 1 / a)),
    ("v_rsq_f32", "f~ f", roughly(lambda a: 1 / np.sqrt(a))),
    ("v_rcp_f64", "F~ F", lambda a: 1 / no_denormals(a)),
    ("v_ldexp_f32", "f fi", lambda a, b: np.ldexp(a.astype(np.float64), np.clip(b, -400, 400)).astype(np.float32)),
    ("v_div_scale_f32", "fm fff", scaled),
    ("v_div_scale_f64", "Fm FFF", scaled),
    ("v_div_fmas_f32", "f fffv", refined),
    ("v_div_fmas_f64", "F FFFv", refined),
    ("v_div_fixup_f32", "f fff", fixed),
    ("v_div_fixup_f64", "F FFF", fixed),
    ("v_cvt_f32_i32", "f i", lambda a: a.astype(np.float32)),
    ("v_cvt_f32_u32", "f u", lambda a: a.astype(np.float32)),
    *((f"v_cvt_f32_ubyte{n}", "f u", lambda a, n=n: (a >> 8 * n & 255).astype(np.float32)) for n in range(4)),
    ("v_cvt_i32_f32", "i f", saturated(np.int32)),
    ("v_cvt_u32_f32", "u f", saturated(np.uint32)),
    ("v_cvt_f32_f16", "f h", lambda a: a.astype(np.float32)),
    ("v_cvt_f16_f32", "h f", lambda a: a.astype(np.float16)),
    ("v_cvt_f64_f32", "F f", lambda a: a.astype(np.float64)),
    ("v_cvt_f32_f64", "f F", lambda a: a.astype(np.float32)),
    ("v_cvt_f64_i32", "F i", lambda a: a.astype(np.float64)),
    ("v_cvt_f64_u32", "F u", lambda a: a.astype(np.float64)),
    ("v_pack_b32_f16", "u kk", _half_words),
]  # fmt: skip


def _float_compares() -> list[Form]:
    ordered: dict[str, Callable[[Values, Values], Values]] = {
        "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "lg": lambda a, b: (a < b) | (a > b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    }  # fmt: skip
    found: list[Form] = []
    for name, function in ordered.items():
        for bits, letter in ((16, "h"), (32, "f"), (64, "F")):
            negated = "u" if name == "o" else "neq" if name == "eq" else f"n{name}"
            found.append((f"v_cmpx?_{name}_f{bits}", f"m {letter}{letter}", function))
            found.append((f"v_cmpx?_{negated}_f{bits}", f"m {letter}{letter}", lambda a, b, of=function: ~of(a, b)))
    return found


LANES += _float_compares()
LANES += [
    (f"v_cmpx?_{name}_{letter if letter in 'ui' else 'i'}{bits}", f"m {code}{code}", function)
    for name, function in {
        "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "ne": np.not_equal,
    }.items()
    for letter, bits, code in zip("uiuiui", (16, 16, 32, 32, 64, 64), "kjuiUI", strict=True)
]  # fmt: skip
LANES.append(("v_cmpx?_class_f32", "m fu", class_of))


def found(mnemonic: str, table: list[Form]) -> Form | None:
    """Return the row of a table that a mnemonic without its encoding's suffix is of."""
    return next((row for row in table if re.fullmatch(row[0], mnemonic)), None)
