# mypy: disable-error-code="arg-type, assignment, misc"
"""Cases of single instructions: a piece of assembly, the state before it, and the state expected after it.

Destinations are v10 on and s40 on; source i is v[20 + 4 i], s[50 + 4 i] or a constant; a mask that is a source s44.
Everything else is random, and must stay.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulators.amdgpu import meanings, scalar_meanings
from tests.simulators.amdgpu.meanings import TYPES
from tests.simulators.amdgpu.wave import EXEC, VCC, State

TO, FROM, MASK_TO, MASK_FROM, SCALAR_TO, SCALAR_FROM = 10, 20, 40, 44, 40, 50
SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp)$")
PI = 0x40490FDB


@dataclass(frozen=True)
class Case:
    """``expect`` changes a copy of the state before to what it has to be; ``floats`` are registers that hold some."""

    text: str
    before: State
    expect: Callable[[State], None]
    floats: str = ""
    loose: bool = False


def wave_of(gpu: str) -> int:
    """Return the lanes of a GPU's waves."""
    return 64 if gpu.startswith("gfx9") else 32


def lanes_are_32(gpu: str) -> bool:
    """Return whether a GPU's waves have 32 lanes."""
    return wave_of(gpu) == 32


def rng_of(text: str) -> np.random.Generator:
    """Return the same numbers for the same text."""
    return np.random.default_rng(zlib.crc32(text.encode()))


def numbers(rng: np.random.Generator, letter: str, count: int = 64) -> NDArray[Any]:
    """Return ``count`` numbers of a form's type, with those among them at which something is different."""
    kind = np.dtype(TYPES[letter])
    bits = kind.itemsize * 8
    plain = (
        rng.integers(0, 1 << bits, count, np.uint64, endpoint=False)
        if bits < 64
        else rng.integers(0, 1 << 63, count, np.uint64) * 2 + 1
    )
    plain = plain.astype(f"u{kind.itemsize}")
    if kind.kind in "ui":
        ends = [0, 1, 2, 31, 32, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1, 255, 0x7FFF, 0x8000]
        small = np.array([one & ((1 << bits) - 1) for one in ends], plain.dtype)
        values = np.where(rng.random(count) < 0.5, plain, rng.choice(small, count)).astype(plain.dtype)
        return values.view(kind)
    info = np.finfo(kind)
    tiny = float(info.tiny)
    ends_of_floats = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.5, -3.5, 1e3, 4294967296.0, -2147483904.0]
    ends_of_floats += [float(info.max), tiny, -tiny, tiny / 4, float(info.smallest_subnormal)]
    with np.errstate(all="ignore"):
        near = (rng.standard_normal(count) * rng.choice([1.0, 1.0, 100.0, 1e-3], count)).astype(kind)
        ends_ = np.array(ends_of_floats, np.float64).astype(kind)
    odds = rng.random(count)
    wild = plain.view(kind)
    wild = np.where(np.isnan(wild), kind.type(1), wild)
    return np.where(odds < 0.45, near, np.where(odds < 0.7, rng.choice(ends_, count), wild)).astype(kind)


def random_state(rng: np.random.Generator, gpu: str, shared_bytes: int = 0) -> State:
    """Return a state of random numbers; EXEC has some lanes and lacks some."""
    state = State(shared_bytes)
    state.s[:] = rng.integers(0, 1 << 32, 128, np.uint32)
    state.v[:] = rng.integers(0, 1 << 32, state.v.shape, np.uint32)
    state.scc[0] = rng.integers(0, 2)
    if shared_bytes:
        state.shared[:] = rng.integers(0, 256, shared_bytes)
    return state


def put(state: State, register: int, values: NDArray[Any]) -> None:
    """Write a number a lane, of 16, 32 or 64 bits."""
    bits = values.view(f"u{values.itemsize}")
    if values.itemsize == 8:
        state.v[register] = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        state.v[register + 1] = (bits >> np.uint64(32)).astype(np.uint32)
    elif values.itemsize == 2:
        state.v[register] = state.v[register] & 0xFFFF0000 | bits
    else:
        state.v[register] = bits


def get(state: State, register: int, letter: str) -> NDArray[Any]:
    """Return a number a lane."""
    kind = np.dtype(TYPES[letter])
    if kind.itemsize == 8:
        return (state.v[register].astype(np.uint64) | state.v[register + 1].astype(np.uint64) << np.uint64(32)).view(
            kind
        )
    if kind.itemsize == 2:
        return (state.v[register] & 0xFFFF).astype(np.uint16).view(kind)
    return state.v[register].copy().view(kind)


def blend(state: State, register: int, values: NDArray[Any], active: NDArray[np.bool_], gpu: str) -> None:
    """Write the active lanes; of 16 bits the other half is cleared by GCN and left by RDNA."""
    values = np.resize(values, 64) if len(values) < 64 else values
    for part in range(2 if values.itemsize == 8 else 1):
        if values.itemsize == 8:
            words = (values.view(np.uint64) >> np.uint64(32 * part)).astype(np.uint32)
        elif values.itemsize == 2:
            upper = 0 if gpu.startswith("gfx9") else state.v[register] & 0xFFFF0000
            words = values.view(np.uint16).astype(np.uint32) | upper
        else:
            words = values.view(np.uint32)
        state.v[register + part] = np.where(active, words, state.v[register + part])


def set_mask(state: State, register: int, bits: NDArray[np.bool_], lanes: int) -> None:
    """Write a mask of lanes, as wide as the wave."""
    mask = sum(1 << lane for lane in range(lanes) if bits[lane])
    state.s[register] = mask & 0xFFFFFFFF
    if lanes == 64:
        state.s[register + 1] = mask >> 32


def mask_of(state: State, register: int, lanes: int) -> NDArray[np.bool_]:
    """Return a mask of lanes."""
    bits = state.scalar64(register)
    return np.array([bits >> lane & 1 if lane < lanes else 0 for lane in range(64)], bool)


def register(kind: str, number: int, words: int) -> str:
    """Return a register's text."""
    return f"{kind}{number}" if words == 1 else f"{kind}[{number}:{number + words - 1}]"


def words_of(letter: str, lanes: int = 32) -> int:
    """Return the registers that a form's type takes; of a mask, the scalars."""
    if letter in "mv":
        return lanes // 32
    return 2 if letter in "UIF" else 1


def lane_cases(mnemonic: str, gpu: str) -> Iterator[Case]:
    """Cases of an instruction of `meanings.LANES`."""
    base = SUFFIX.sub("", mnemonic)
    row = meanings.found(base, meanings.LANES)
    if row is None:
        return
    _, form, function = row
    to, from_ = form.split()
    loose = "~" in to
    to = to.strip("~")
    short = base.startswith(("v_dual", "v_fmamk"))
    encoding = mnemonic[len(base) + 1 :] or ("e32" if short else "e64")
    if encoding in ("sdwa", "dpp"):
        if encoding == "sdwa":
            yield from _sdwa_cases(mnemonic, gpu, to, from_, function)
        return
    letters = from_.strip("+")
    sources = len([one for one in letters if one not in "mv#s"])
    variants = [("v",) * len(letters)]
    # CDNA reads one scalar at most, and a mask is one.
    scalars = lanes_are_32(gpu) or not set(letters) & set("mv#")
    if encoding == "e32":
        variants += [("s", *("v",) * (len(letters) - 1))] if scalars else []
        variants += [("c", *("v",) * (len(letters) - 1))]
    elif encoding == "e64" and "accvgpr" not in base and "div_scale" not in base:
        variants += [(*("v",) * (sources - 1), "s", *("v",) * (len(letters) - sources))] if scalars else []
        if set(letters) & set("fFh"):
            variants += [("N",) * len(letters), ("A",) * len(letters)]
    for number, kinds in enumerate(variants):
        yield _lane_case(mnemonic, gpu, to, from_, function, kinds, loose, number)
    if encoding == "e64" and re.fullmatch(r"v_sub(_nc)?_u32", base):
        kinds = ("v", "v")
        yield _lane_case(mnemonic, gpu, to, from_, _not_below_0, kinds, loose, len(variants), " clamp")


def _not_below_0(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    return np.where(a > b, a - b, np.uint32(0))


def _lane_case(
    mnemonic: str,
    gpu: str,
    to: str,
    from_: str,
    function: Callable[..., Any],
    kinds: tuple[str, ...],
    loose: bool,
    number: int,
    modifier: str = "",
) -> Case:
    rng, lanes = rng_of(f"{mnemonic}{number}"), wave_of(gpu)
    state = random_state(rng, gpu)
    base = SUFFIX.sub("", mnemonic)
    short = mnemonic.endswith("_e32") or base.startswith("v_dual")
    masks = "vcc" if lanes == 64 else "vcc_lo"
    texts: list[str] = []
    read: list[Callable[[State], NDArray[Any]]] = []
    letters = from_.strip("+")
    for i, (letter, kind) in enumerate(zip(letters, kinds, strict=True)):
        if letter in "mv":
            place = VCC if short or letter == "v" else MASK_FROM
            if letter == "m" and not base.startswith("v_dual"):
                texts.append(masks if short else register("s", MASK_FROM, lanes // 32))
            read.append(lambda before, at=place: mask_of(before, at, lanes))
            continue
        if letter == "#":
            texts.append(hex(PI))
            read.append(lambda before: np.full(64, PI, np.uint32).view(np.float32))
            continue
        if letter == "s":
            texts.append("3")
            read.append(lambda before: np.full(64, 3, np.uint32))
            continue
        at = FROM + 4 * i
        if base.startswith("v_div_scale") and i == 0:
            at = FROM + 4 * (1 + number % 2)
        if base in ("v_accvgpr_read_b32", "v_accvgpr_mov_b32"):
            at += 256
        put(state, at, numbers(rng, letter))
        words = words_of(letter)
        if kind == "s":
            place = SCALAR_FROM + 4 * i
            _put_scalar(state, place, numbers(rng, letter, 1))
            texts.append(register("s", place, words))
            read.append(lambda before, place=place, letter=letter: np.resize(_get_scalar(before, place, letter), 64))
        elif kind == "c":
            value = "-4.0" if letter in "fFh" else "17"
            texts.append(value)
            read.append(lambda before, value=value, letter=letter: np.full(64, float(value)).astype(TYPES[letter]))
        else:
            plain = register("a" if at >= 256 else "v", at - (256 if at >= 256 else 0), words)
            altered = kind in "NA" and letter in "fFh"
            texts.append(plain if not altered else f"-{plain}" if kind == "N" else f"-|{plain}|")

            def values(
                before: State, at: int = at, letter: str = letter, how: str = kind if altered else ""
            ) -> NDArray[Any]:
                found = get(before, at, letter)
                return -np.abs(found) if how == "A" else -found if how == "N" else found

            read.append(values)
    if "+" in from_:
        put(state, TO, numbers(rng, to[0]))
        read.append(lambda before: get(before, TO, to[0]))
    many = 2 if base.startswith("v_div_scale") else 1
    if many == 2:  # the first source is one of the others
        read[0] = read[1 + number % 2]
    compare_exec = base.startswith("v_cmpx")
    silent = compare_exec and lanes == 32
    dual = "v_dual_mov_b32 v9, v41 :: " if base.startswith("v_dual") else ""
    at_to = TO + 256 if base in ("v_accvgpr_write_b32", "v_accvgpr_mov_b32") else TO
    destinations = []
    if to[0] != "m":
        destinations.append(register("a" if at_to >= 256 else "v", TO, words_of(to[0])))
    if "m" in to and not silent:
        destinations.append(masks if short else register("s", MASK_TO, lanes // 32))
    text = f"{dual}{mnemonic} {', '.join([*destinations, *texts])}{modifier}"

    def expect(after: State) -> None:
        before = after.copy()
        active = before.active(lanes)
        with np.errstate(all="ignore"):
            result = function(*(one(before) for one in read))
        value, bits = result if to in ("um", "Um", "fm", "Fm") else (None, result) if to == "m" else (result, None)
        if dual:
            blend(after, 9, before.v[41], active, gpu)
        if value is not None:
            blend(after, at_to, np.asarray(value).astype(TYPES[to[0]]), active, gpu)
        if bits is not None:
            found = np.asarray(bits) & active
            if not silent:
                set_mask(after, VCC if short else MASK_TO, found, lanes)
            if compare_exec:
                set_mask(after, EXEC, found, lanes)

    return Case(text, state, expect, to[0] if to[0] in "fFh" else "", loose)


def _put_scalar(state: State, at: int, value: NDArray[Any]) -> None:
    bits = int(value.view(f"u{value.itemsize}")[0])
    state.s[at] = bits & 0xFFFFFFFF
    if value.itemsize == 8:
        state.s[at + 1] = bits >> 32


def _get_scalar(state: State, at: int, letter: str) -> NDArray[Any]:
    kind = np.dtype(TYPES[letter])
    words = state.s[at : at + max(1, kind.itemsize // 4)].copy()
    return words.view(kind)[:1]


def _part(words: NDArray[np.uint32], select: str, extended: bool) -> NDArray[np.uint32]:
    if select == "DWORD":
        return words
    bits = 16 if select.startswith("WORD") else 8
    part = words >> np.uint32(int(select[-1]) * bits) & np.uint32((1 << bits) - 1)
    if extended:
        part = np.where(part >> (bits - 1), part | np.uint32((1 << 32) - (1 << bits)), part)
    return part.astype(np.uint32)


def _sdwa_cases(mnemonic: str, gpu: str, to: str, from_: str, function: Callable[..., Any]) -> Iterator[Case]:
    """With every part of a register as a source and as the destination, and all that becomes of the rest of it."""
    choices = ["DWORD", "WORD_0", "WORD_1", "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3"]
    for number in range(14):
        state = random_state(rng_of(f"{mnemonic}{number}"), gpu)
        into, unused = choices[number % 7], ["UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"][number % 3]
        selects = [choices[(number + 3 * i + 1) % 7] for i in range(len(from_))]
        extended = [letter == "i" and number % 2 == 1 for letter in from_]
        registers = [FROM + 4 * i for i in range(len(from_))]
        texts = [f"sext(v{at})" if sign else f"v{at}" for at, sign in zip(registers, extended, strict=True)]
        text = f"{mnemonic} v{TO}, {', '.join(texts)} dst_sel:{into} dst_unused:{unused}"
        if to == "m":
            text = f"{mnemonic} {register('s', MASK_TO, wave_of(gpu) // 32)}, {', '.join(texts)}"
        text += "".join(f" src{i}_sel:{select}" for i, select in enumerate(selects))

        def expect(
            after: State,
            into: str = into,
            unused: str = unused,
            selects: list[str] = selects,
            extended: list[bool] = extended,
        ) -> None:
            before = after.copy()
            sources = []
            for i, letter in enumerate(from_):
                words = _part(before.v[FROM + 4 * i], selects[i], extended[i])
                kind = np.dtype(TYPES[letter])
                sources.append(words.view(kind) if kind.itemsize == 4 else words.astype(np.uint16).view(kind))
            with np.errstate(all="ignore"):
                result = np.asarray(function(*sources))
            if to == "m":
                set_mask(after, MASK_TO, result & before.active(wave_of(gpu)), wave_of(gpu))
                return
            result = result.astype(TYPES[to])
            bits = result.view(f"u{result.itemsize}").astype(np.uint32)
            active, old = before.active(wave_of(gpu)), before.v[TO]
            if into != "DWORD":
                width = 16 if into.startswith("WORD") else 8
                shift = int(into[-1]) * width
                field = ((1 << width) - 1) << shift
                part = (bits << np.uint32(shift)) & np.uint32(field)
                above = np.uint32((1 << 32) - (1 << (shift + width)) if shift + width < 32 else 0)
                negative = (part >> np.uint32(shift + width - 1) & 1).astype(bool)
                rest = {
                    "UNUSED_PAD": np.zeros(64, np.uint32),
                    "UNUSED_PRESERVE": old & np.uint32(~field & 0xFFFFFFFF),
                    "UNUSED_SEXT": np.where(negative, above, np.uint32(0)),
                }[unused]
                bits = part | rest.astype(np.uint32)
            after.v[TO] = np.where(active, bits, old)

        yield Case(text, state, expect, to if to in "fFh" and into == "DWORD" else "")


def scalar_cases(mnemonic: str, gpu: str) -> Iterator[Case]:
    """Cases of an instruction of `scalar_meanings.SCALARS`: registers, then a constant in each place."""
    row = meanings.found(mnemonic, scalar_meanings.SCALARS)
    if row is None:
        return
    _, form, function = row
    to, from_ = form.split()
    loose, to = "~" in to, to.strip("~")
    letters = from_.strip("+")
    for number in range(24):
        rng = rng_of(f"{mnemonic}{number}")
        state = random_state(rng, gpu)
        texts, values = [], []
        for i, letter in enumerate(letters):
            if letter == "k":
                value = int(rng.integers(-(1 << 15), 1 << 15))
                texts.append(hex(value & 0xFFFF))
                values.append(value)
            elif letter == "#":
                texts.append(hex(PI))
                values.append(np.uint32(PI).view(np.float32))
            elif number % 8 == i + 1 and "+" not in from_ and "k" not in letters:
                constant = -4.0 if letter == "f" else 17
                texts.append(str(constant))
                values.append(constant)
            else:
                one = numbers(rng, letter, 1)
                if "log" in mnemonic or "rsq" in mnemonic:
                    one = np.abs(one)
                _put_scalar(state, SCALAR_FROM + 4 * i, one)
                texts.append(register("s", SCALAR_FROM + 4 * i, words_of(letter)))
                values.append(one[0] if letter == "f" else int(one[0]))
        if "+" in from_:
            one = numbers(rng, to, 1)
            _put_scalar(state, SCALAR_TO, one)
            values.append(one[0] if to == "f" else int(one[0]))
        destination = [] if to == "-" else [register("s", SCALAR_TO, words_of(to))]
        if letters == "ik":
            texts[0] = register("s", SCALAR_FROM, 1)

        def expect(after: State, values: list[Any] = values) -> None:
            result, scc = function(*values, int(after.scc[0]))
            if scc is not None:
                after.scc[0] = scc
            if to == "-":
                return
            if to == "f":
                after.s[SCALAR_TO] = np.float32(result).view(np.uint32)
            else:
                bits = int(result) & ((1 << 32 * words_of(to)) - 1)
                after.s[SCALAR_TO] = bits & 0xFFFFFFFF
                if words_of(to) == 2:
                    after.s[SCALAR_TO + 1] = bits >> 32

        yield Case(f"{mnemonic} {', '.join([*destination, *texts])}", state, expect, "s" if to == "f" else "", loose)
