"""Instructions as the executor takes them: one name for what several GPUs call differently, operands, modifiers.

The executor's names are RDNA's where a name says bits (``ds_load_b32``), else CDNA's (``v_add_u32``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from tests.simulators.amdgpu.code.disassembly import Instruction

#: Whose compares and sources print VCC that a comparison of RDNA 3 and a dual instruction leave out.
_TAKES_VCC = re.compile(r"v_div_fmas_|v_dual_cndmask_b32")

_SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp|e32_dpp)$")
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in [
        (r"^v_dual_", "v_"),
        (r"^v_(add|sub|subrev)_nc_(\w+)", r"v_\1_\2"),
        (r"^v_(add|sub|subrev)_co_ci_u32", r"v_\1c_co_u32"),
        (r"^v_subc_co_u32", "v_subb_co_u32"),
        (r"^v_subrevc_co_u32", "v_subbrev_co_u32"),
        (r"^(\w_(?:max3|min3|med3|max|min))_num_(f\d\d)", r"\1_\2"),
        (r"^v_mad_co_(u64_u32|i64_i32)", r"v_mad_\1"),
        (r"^v_pk_(max|min)_num_f16", r"v_pk_\1_f16"),
        (r"^v_cvt_pk_rtz_f16_f32", "v_cvt_pkrtz_f16_f32"),
        (r"^v_mfma_(\w+x\d+)(f16|bf16|f32|i8)(_1k)?$", r"v_mfma_\1_\2"),
        (r"^s_(and|or)_not1_", r"s_\1n2_"),
        (r"^s_(and|or)_not0_", r"s_\1n1_"),
        (r"^s_(add|sub)_co_ci_u32", r"s_\1c_u32"),
        (r"^s_subc_u32", "s_subb_u32"),
        (r"^s_(add|sub)_co_([iu]32)", r"s_\1_\2"),
        (r"^s_(add|sub)_nc_u64", r"s_\1_u64"),
        (r"^s_addk_co_i32", "s_addk_i32"),
        (r"^s_(max|min)_num_f32", r"s_\1_f32"),
        (r"^s_clz_i32_u32", "s_flbit_i32_b32"),
        (r"^s_clz_i32_u64", "s_flbit_i32_b64"),
        (r"^s_ctz_i32_", "s_ff1_i32_"),
        (r"^s_load_dword$", "s_load_b32"),
        (r"^ds_read2(st64)?_", r"ds_load_2addr\1_"),
        (r"^ds_write2(st64)?_", r"ds_store_2addr\1_"),
        (r"^ds_(load|store)_2addrst64_", r"ds_\1_2addr_stride64_"),
        (r"^ds_read_(\w+)", r"ds_load_\1"),
        (r"^ds_write_(\w+)", r"ds_store_\1"),
        (r"^ds_load_([ui]\d+)_d16(_hi)?$", r"ds_load_d16\2_\1"),
        (r"^ds_load_([ui]8)_d16(_hi)?$", r"ds_load_d16\2_\1"),
        (r"^(global|flat|scratch)_load_ubyte", r"\1_load_u8"),
        (r"^(global|flat|scratch)_load_sbyte", r"\1_load_i8"),
        (r"^(global|flat|scratch)_load_ushort", r"\1_load_u16"),
        (r"^(global|flat|scratch)_load_sshort", r"\1_load_i16"),
        (r"^(global|flat|scratch)_load_short_d16", r"\1_load_d16_b16"),
        (r"^(global|flat|scratch)_load_d16_b16_hi", r"\1_load_d16_hi_b16"),
        (r"^(global|flat|scratch)_load_(u|i)8_d16(_hi)?", r"\1_load_d16\3_\g<2>8"),
        (r"^(global|flat|scratch)_store_byte$", r"\1_store_b8"),
        (r"^(global|flat|scratch)_store_short$", r"\1_store_b16"),
        (r"^(global|flat|scratch)_store_(byte|short)_d16_hi", r"\1_store_d16_hi_\2"),
        (r"^(\w+_store_d16_hi)_byte", r"\1_b8"),
        (r"^(\w+_store_d16_hi)_short", r"\1_b16"),
        (r"^(ds_load_d16(?:_hi)?)_u16", r"\1_b16"),
        (r"^(\w+_(?:load|store))_dword$", r"\1_b32"),
        (r"^(\w+_(?:load|store))_dwordx(\d+)$", r"\1_x\2"),
        (r"^global_atomic_add$", "global_atomic_add_u32"),
        (r"^global_atomic_add_x2$", "global_atomic_add_u64"),
        (r"^global_atomic_umax$", "global_atomic_max_u32"),
        (r"^global_atomic_or$", "global_atomic_or_b32"),
        (r"^global_atomic_swap$", "global_atomic_swap_b32"),
    ]
]

#: Registers that are scalars of a number: the first of them, and how many.
_NAMED = {
    "vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1),
    "m0": (124, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1), "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2), "xnack_mask_lo": (104, 1), "xnack_mask_hi": (105, 1),
}  # fmt: skip
_SPECIAL = {
    "null": "n", "off": "o", "scc": "c", "src_scc": "c", "vccz": "z", "src_vccz": "z", "execz": "e", "src_execz": "e",
    "src_shared_base": "h", "src_private_base": "p",
}  # fmt: skip
_REGISTER = re.compile(r"^(v|a|s|ttmp)(?:(\d+)|\[(\d+):(\d+)\])$")
_FIRST = {"v": 0, "a": 256, "s": 0, "ttmp": 108}

_SELECTS = {"DWORD": 0, "BYTE_0": 1, "BYTE_1": 2, "BYTE_2": 3, "BYTE_3": 4, "WORD_0": 5, "WORD_1": 6}
_UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
_LANES = {
    "quad_perm": 1, "row_shl": 2, "row_shr": 3, "row_ror": 4, "wave_shl": 5, "wave_shr": 6, "wave_rol": 7,
    "wave_ror": 8, "row_mirror": 9, "row_half_mirror": 10, "row_bcast": 11, "row_share": 13, "row_newbcast": 13,
    "row_xmask": 14, "dpp8": 15,
}  # fmt: skip
#: Hints to caches; what an atomic returns is told by its operands.
_IGNORED = re.compile(r"^(glc|slc|dlc|nt|sc0|sc1|lds|th:\w+|scope:\w+|gds|cbsz:0|abid:0|blgp:0|row_en|nv|offen)$")
#: Of which a bit list's default is all ones.
_PACKED = re.compile(r"^v_pk_(?!mov)")

#: Immediates of 16 bits with a sign.
_SIGNED_16 = re.compile(r"^s_cmpk_\w+_i32$")


class EncodingError(Exception):
    """An operand or a modifier that is not understood."""


@functools.cache
def name_of(mnemonic: str) -> str:
    """Return the executor's name of what an instruction does, however it is encoded."""
    name = _SUFFIX.sub("", mnemonic)
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    match = re.match(r"(.*_)(?:dword)?x(\d+)$", name)
    if match and re.match(r"(s|global|flat|scratch|buffer)_", name):
        name = f"{match[1]}b{32 * int(match[2])}"
    return name


def encoded(instructions: Iterable[Instruction], gpu: str) -> str:
    """Return a program's text, a line an instruction; raises EncodingError."""
    lines = []
    for one in instructions:
        lines.append(_line(one, gpu))
        if one.second:
            lines.append("+" + _line(one.second, gpu))
    return "\n".join(lines) + "\n"


def _line(one: Instruction, gpu: str) -> str:
    name = name_of(one.mnemonic)
    try:
        operands = [_operand(text) for text in one.operands]
        modifiers = _modifiers(one, name, gpu)
        if _TAKES_VCC.match(one.mnemonic) and not any(text.startswith("vcc") for text in one.operands):
            operands.append("s106:2")
        if _SIGNED_16.match(name):
            operands[1] = _signed(operands[1])
    except EncodingError as error:
        raise EncodingError(f"0x{one.pc:x}: {one.text}: {error}") from None
    if name == "v_sub_u32" and modifiers.pop("clamp", 0):
        name = "v_sub_clamped_u32"
    target = "-"
    if name.startswith(("s_branch", "s_cbranch")):
        jump = one.words[0] & 0xFFFF
        target = f"{one.pc + 4 + 4 * (jump - 0x10000 if jump & 0x8000 else jump):x}"
    pairs = " ".join(f"{key}={value}" for key, value in modifiers.items())
    return "\t".join([f"{one.pc:x}", f"{one.pc + one.size:x}", target, name, pairs, " ".join(operands), one.text])


@functools.cache
def _operand(text: str) -> str:
    flags = ""
    while True:
        if text.startswith("neg(") and text.endswith(")"):
            flags, text = flags + "N", text[4:-1]
        elif text.startswith("sext(") and text.endswith(")"):
            flags, text = flags + "X", text[5:-1]
        elif text.startswith("|") and text.endswith("|"):
            flags, text = flags + "A", text[1:-1]
        elif text.startswith("-") and not text[1:2].isdigit():
            flags, text = flags + "N", text[1:]
        else:
            return flags + _plain(text)


def _plain(text: str) -> str:
    match = _REGISTER.match(text)
    if match:
        kind, number, low, high = match.groups()
        first, last = (int(number), int(number)) if number else (int(low), int(high))
        return f"{'v' if kind in 'va' else 's'}{first + _FIRST[kind]}:{last - first + 1}"
    if text in _NAMED:
        first, count = _NAMED[text]
        return f"s{first}:{count}"
    if text in _SPECIAL:
        return _SPECIAL[text]
    if re.fullmatch(r"-?\d+", text):
        return f"i{text}"
    if re.fullmatch(r"0x[0-9a-f]+", text):
        return f"l{text[2:]}"
    if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", text):
        return f"f{text}"
    raise EncodingError(f"operand {text!r}")


def _signed(token: str) -> str:
    value = int(token[1:], 16 if token[0] == "l" else 10) & 0xFFFF
    return f"i{value - 0x10000 if value & 0x8000 else value}"


def _bits(text: str) -> list[int]:
    return [int(bit) for bit in text.strip("[]").split(",")]


def _mask(bits: list[int]) -> int:
    return sum(bit << number for number, bit in enumerate(bits))


def _modifiers(one: Instruction, name: str, gpu: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    if gpu.startswith("gfx9"):
        found["gfx9"] = 1
    if gpu == "gfx90a" and name.startswith("v_mfma"):
        found["flushes"] = 1
    if _PACKED.match(name):
        found["op_sel_hi"] = 7
    for text in one.modifiers:
        key, _, value = text.partition(":")
        if _IGNORED.match(text):
            continue
        if key == "offset" and name == "ds_swizzle_b32":
            found["offset"] = one.words[0] & 0xFFFF
        elif key in ("offset", "offset0", "offset1"):
            found[key] = int(value, 0)
        elif key == "op_sel":
            bits = _bits(value)
            # The bit behind those of the sources is the destination's, which has its place whatever they are.
            sources = len(one.operands) - 1
            packed = name.startswith(("v_pk_", "v_fma_mix", "v_permlane"))
            found[key] = _mask(bits) if packed or len(bits) <= sources else _mask(bits[:-1]) | bits[-1] << 3
        elif key in ("op_sel_hi", "neg_lo", "neg_hi"):
            found[key] = _mask(_bits(value))
        elif text == "clamp":
            found["clamp"] = 1
        elif key in ("mul", "div"):
            found["factor"] = float(value) if key == "mul" else 1 / float(value)
        elif key == "dst_sel":
            found["sdwa"], found["destination"] = 1, _SELECTS[value]
        elif key == "dst_unused":
            found["unused"] = _UNUSED[value]
        elif key in ("src0_sel", "src1_sel"):
            found["sdwa"], found[f"select{key[3]}"] = 1, _SELECTS[value]
        elif key in _LANES:
            found.update(_dpp(key, value))
        elif key in ("row_mask", "bank_mask"):
            found["rows" if key == "row_mask" else "banks"] = int(value, 0)
        elif key == "bound_ctrl":
            found["zero_bound"] = 1
        elif key == "fi":
            found["fetch_inactive"] = int(value)
        else:
            raise EncodingError(f"modifier {text!r}")
    return found


def _dpp(key: str, value: str) -> dict[str, int | float]:
    lanes = _LANES[key]
    if key == "quad_perm":
        by = sum(lane << (2 * number) for number, lane in enumerate(_bits(value)))
    elif key == "dpp8":
        by = sum(lane << (3 * number) for number, lane in enumerate(_bits(value)))
    else:
        by = int(value) if value else 0
    if key == "row_bcast" and by == 31:
        lanes += 1
    return {"lanes": lanes, "lanes_by": by}


@functools.cache
def registers(operand: str) -> tuple[tuple[str, int], ...]:
    """Return the kind (v, a or s) of the registers that an operand names, and the last one's number; or nothing."""
    match = _REGISTER.match(operand.strip("-|").removeprefix("sext(").removeprefix("neg(").rstrip(")").strip("|"))
    if not match or match[1] == "ttmp":
        return ()
    return ((match[1], int(match[2] or match[4])),)
