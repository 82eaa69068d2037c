# mypy: disable-error-code="arg-type"
"""Cases of the instructions that are no function of a lane's numbers: memory, LDS, lanes, packed numbers, control."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulators.amdgpu.cases import (
    FROM,
    MASK_TO,
    SCALAR_FROM,
    TO,
    Case,
    blend,
    numbers,
    random_state,
    register,
    rng_of,
    wave_of,
)
from tests.simulators.amdgpu.exact import fused
from tests.simulators.amdgpu.matrix_cases import matrix_cases
from tests.simulators.amdgpu.wave import ADDRESS, EXEC, VCC, State

SHARED = 0x00010000 << 32
BYTES = {
    "u8": 1, "ubyte": 1, "b8": 1, "byte": 1, "u16": 2, "ushort": 2, "b16": 2, "short": 2, "d16_b16": 2, "b32": 4,
    "dword": 4, "b64": 8, "dwordx2": 8, "b96": 12, "dwordx3": 12, "b128": 16, "dwordx4": 16, "b256": 32,
    "dwordx8": 32, "b512": 64, "dwordx16": 64, "d16_hi_u8": 1, "ubyte_d16_hi": 1, "short_d16": 2,
    "d16_hi_b16": 2, "short_d16_hi": 2,
}  # fmt: skip
HALF = 1024
PRIVATE_BUFFER = [0, 0x00020000, 0xFFFFFFFF, 0x00E00000]  # as a kernel finds it in scalars


def special_cases(mnemonic: str, gpu: str) -> Iterator[Case]:
    """Cases of an instruction, or none."""
    for pattern, make in _MAKERS:
        match = re.fullmatch(pattern, mnemonic)
        if match:
            yield from make(mnemonic, gpu, match)
            return
    yield from matrix_cases(mnemonic, gpu)


def _start(mnemonic: str, gpu: str, number: int = 0, shared_bytes: int = 0) -> tuple[np.random.Generator, State]:
    rng = rng_of(f"{mnemonic}{number}")
    state = random_state(rng, gpu, shared_bytes)
    state.memory[:] = rng.integers(0, 256, len(state.memory))
    return rng, state


def _put_address(state: State, at: int, addresses: NDArray[np.uint64]) -> None:
    state.v[at] = (addresses & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    state.v[at + 1] = (addresses >> np.uint64(32)).astype(np.uint32)


def _loaded(state: State, to: int, lane: int, data: NDArray[np.uint8], half: str = "") -> None:
    """Put bytes into a lane's registers: fewer than 4 are a number without a sign, or the ``low`` or ``high`` half."""
    if len(data) >= 4:
        for i, word in enumerate(data.view(np.uint32)):
            state.v[to + i, lane] = word
        return
    value, before = int.from_bytes(data.tobytes(), "little"), int(state.v[to, lane])
    state.v[to, lane] = {"": value, "low": before & 0xFFFF0000 | value, "high": before & 0xFFFF | value << 16}[half]


def _stored(state: State, from_: int, lane: int, count: int, half: str = "") -> NDArray[np.uint8]:
    words = np.array([state.v[from_ + i, lane] for i in range(max(1, count // 4))], np.uint32)
    first = 2 if half == "high" else 0
    return words.view(np.uint8)[first : first + count]


def _global(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    space, how, kind = match[1], match[2], match[3]
    count, half = BYTES[kind], "high" if "d16_hi" in kind else "low" if "d16" in kind else ""
    words = max(1, count // 4)
    forms = ("pair",) if space == "flat" else ("pair", "base")
    for number, form in enumerate(forms):
        rng, state = _start(mnemonic, gpu, number, 4 * HALF)
        # Every lane its own place, in any order, of 16 bytes; some of LDS by a flat instruction.
        places = rng.permutation(64).astype(np.uint64) * np.uint64(16) + np.uint64(32)
        offset = 0 if space == "flat" else 24 if form == "pair" else -16
        start = np.where(np.arange(64) % 3 == 0, SHARED, ADDRESS) if space == "flat" else np.full(64, ADDRESS)
        if form == "pair":
            _put_address(state, FROM, start.astype(np.uint64) + places)
            address, base = f"v[{FROM}:{FROM + 1}]", "off"
        else:
            state.v[FROM] = places.astype(np.uint32)
            state.set_scalar64(SCALAR_FROM, ADDRESS)
            address, base = f"v{FROM}", f"s[{SCALAR_FROM}:{SCALAR_FROM + 1}]"
        data = register("v", TO, words) if how == "load" else register("v", FROM + 4, words)
        parts = [data, address] if how == "load" else [address, data]
        text = f"{mnemonic} {', '.join([*parts, *([] if space == 'flat' else [base])])}"
        text += f" offset:{offset}" if offset else ""

        def expect(after: State, places: NDArray[Any] = places, offset: int = offset) -> None:
            active = after.active(lanes)
            for lane in range(64):
                if not active[lane]:
                    continue
                of = after.shared if space == "flat" and lane % 3 == 0 else after.memory
                at = int(places[lane]) + offset
                if how == "load":
                    _loaded(after, TO, lane, of[at : at + count].copy(), half)
                else:
                    of[at : at + count] = _stored(after, FROM + 4, lane, count, half)

        yield Case(text, state, expect)


def _buffer(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    """Private memory by its buffer: at a lane's own offset, or at one that all have."""
    lanes, loads, count = wave_of(gpu), match[1] == "load", BYTES[match[2]]
    words = max(1, count // 4)
    for number in range(2):
        rng, state = _start(mnemonic, gpu, number)
        state.private = rng.integers(0, 256, (lanes, 256)).astype(np.uint8)
        state.s[SCALAR_FROM + 2 : SCALAR_FROM + 6] = PRIVATE_BUFFER
        state.v[FROM] = places = rng.permutation(64) % 12 * 16
        data = register("v", TO if loads else FROM + 4, words)
        by, how = ("off", "offset:24") if number else (f"v{FROM}", "offen offset:8")
        text = f"{mnemonic} {data}, {by}, s[{SCALAR_FROM + 2}:{SCALAR_FROM + 5}], 0 {how}"

        def expect(after: State, places: NDArray[Any] = places, number: int = number) -> None:
            for lane in np.flatnonzero(after.active(lanes)):
                at = 24 if number else int(places[lane]) + 8
                if loads:
                    _loaded(after, TO, lane, after.private[lane, at : at + count].copy())
                else:
                    after.private[lane, at : at + count] = _stored(after, FROM + 4, lane, count)

        yield Case(text, state, expect)


def _scalar_load(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    count = BYTES[match[1]]
    to = 64
    for number, offset in enumerate(["0x40", "s54", "null" if gpu.startswith("gfx1") else "0x0"]):
        _, state = _start(mnemonic, gpu, number)
        state.set_scalar64(SCALAR_FROM, ADDRESS + 128)
        state.s[54] = 32
        by = {"0x40": 64, "s54": 32}.get(offset, 0)
        if offset == "s54" and gpu == "gfx1201":
            offset = "s54 offset:0x0"

        def expect(after: State, by: int = by) -> None:
            after.s[to : to + count // 4] = after.memory[128 + by : 128 + by + count].view(np.uint32)

        yield Case(
            f"{mnemonic} {register('s', to, count // 4)}, s[{SCALAR_FROM}:{SCALAR_FROM + 1}], {offset}", state, expect
        )


def _lds(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    loads, count = match[1] in ("read", "load"), BYTES[match[2]]
    words = max(1, count // 4)
    for number, offset in enumerate((0, 40)):
        rng, state = _start(mnemonic, gpu, number, 2048)
        places = rng.permutation(64) * 16
        state.v[FROM] = places
        data = register("v", TO if loads else FROM + 4, words)
        text = f"{mnemonic} {f'{data}, v{FROM}' if loads else f'v{FROM}, {data}'}" + (
            f" offset:{offset}" if offset else ""
        )

        def expect(after: State, places: NDArray[Any] = places, offset: int = offset) -> None:
            for lane in np.flatnonzero(after.active(lanes)):
                at = places[lane] + offset
                if loads:
                    _loaded(after, TO, lane, after.shared[at : at + count].copy())
                else:
                    after.shared[at : at + count] = _stored(after, FROM + 4, lane, count)

        yield Case(text, state, expect)


def _lds_two(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    loads, count = match[1] in ("read2", "load_2addr"), 4 if match[3] == "32" else 8
    step = count * (64 if match[2] else 1)
    words = count // 4
    for number, (first, second) in enumerate(((0, 1), (3, 2))):
        rng, state = _start(mnemonic, gpu, number, 8192)
        places = rng.permutation(64) * 48
        state.v[FROM] = places
        if loads:
            operands = f"{register('v', TO, 2 * words)}, v{FROM}"
        else:
            operands = f"v{FROM}, {register('v', FROM + 4, words)}, {register('v', FROM + 8, words)}"
        text = f"{mnemonic} {operands} offset0:{first} offset1:{second}"

        def expect(after: State, places: NDArray[Any] = places, offsets: tuple[int, int] = (first, second)) -> None:
            for lane in np.flatnonzero(after.active(lanes)):
                for part, offset in enumerate(offsets):
                    at = places[lane] + offset * step
                    if loads:
                        _loaded(after, TO + part * words, lane, after.shared[at : at + count].copy())
                    else:
                        after.shared[at : at + count] = _stored(after, FROM + 4 + 4 * part, lane, count)

        yield Case(text, state, expect)


def _lds_add(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    rng, state = _start(mnemonic, gpu, 0, 512)
    places = np.arange(64) // 2 * 4 if not match[1] else rng.permutation(64) * 4
    state.v[FROM] = places
    to = f"v{TO}, " if match[1] else ""

    def expect(after: State) -> None:
        words = after.shared.view(np.uint32)
        for lane in np.flatnonzero(after.active(lanes)):
            at, data = places[lane] // 4 + 4, int(after.v[FROM + 4, lane])
            old = int(words[at])
            words[at] = old + data & 0xFFFFFFFF
            if match[1]:
                after.v[TO, lane] = old

    yield Case(f"{mnemonic} {to}v{FROM}, v{FROM + 4} offset:16", state, expect)


def _bpermute(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    for number, offset in enumerate((0, 8)):
        rng, state = _start(mnemonic, gpu, number)
        state.v[FROM] = rng.integers(0, 4 * lanes * 3, 64)

        def expect(after: State, offset: int = offset) -> None:
            active, before = after.active(lanes), after.v[FROM + 4].copy()
            for lane in np.flatnonzero(active):
                source = (int(after.v[FROM, lane]) + offset) // 4 % lanes
                after.v[TO, lane] = before[source] if active[source] else 0

        yield Case(f"{mnemonic} v{TO}, v{FROM}, v{FROM + 4}" + (f" offset:{offset}" if offset else ""), state, expect)


def _saveexec(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    bits = int(match[2])
    function: Callable[[int, int], int] = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "andn2": lambda a, b: a & ~b,
        "and_not1": lambda a, b: a & ~b,
    }[match[1]]  # fmt: skip
    for number in range(4):
        _, state = _start(mnemonic, gpu, number)
        if number == 3:
            state.set_scalar64(SCALAR_FROM, 0)
            state.set_scalar64(EXEC, 0 if bits == 64 else state.scalar64(EXEC) >> 32 << 32)
        if number == 2:
            state.set_scalar64(SCALAR_FROM, state.scalar64(EXEC))

        def expect(after: State) -> None:
            ones = (1 << bits) - 1
            old, source = after.scalar64(EXEC) & ones, after.scalar64(SCALAR_FROM) & ones
            new = function(source, old) & ones
            after.scc[0] = new != 0
            for at, value in ((MASK_TO, old), (EXEC, new)):
                after.s[at] = value & 0xFFFFFFFF
                if bits == 64:
                    after.s[at + 1] = value >> 32

        words = bits // 32
        yield Case(f"{mnemonic} {register('s', MASK_TO, words)}, {register('s', SCALAR_FROM, words)}", state, expect)


def _branch(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    """Over an instruction if it is taken; and backwards, out of a loop."""
    lanes = wave_of(gpu)
    for number in range(6):
        _, state = _start(mnemonic, gpu, number)
        if number % 2:
            state.set_scalar64(VCC, 0 if lanes == 64 else state.scalar64(VCC) >> 32 << 32)
            state.set_scalar64(EXEC, 0 if lanes == 64 else state.scalar64(EXEC) >> 32 << 32)
        if number >= 4:  # the half that a wave of 32 lanes has not
            state.set_scalar64(VCC, 1 << 40)
            state.set_scalar64(EXEC, 1 << 40)
        ones = (1 << lanes) - 1
        taken = {
            "s_branch": True, "s_cbranch_scc0": not state.scc[0], "s_cbranch_scc1": bool(state.scc[0]),
            "s_cbranch_vccz": not state.scalar64(VCC) & ones, "s_cbranch_vccnz": bool(state.scalar64(VCC) & ones),
            "s_cbranch_execz": not state.scalar64(EXEC) & ones, "s_cbranch_execnz": bool(state.scalar64(EXEC) & ones),
        }[mnemonic]  # fmt: skip

        def expect(after: State, taken: bool = taken) -> None:
            if not taken:
                after.s[MASK_TO] = 5
            after.s[MASK_TO + 1] = 7

        yield Case(f"{mnemonic} 1\ns_mov_b32 s{MASK_TO}, 5\ns_mov_b32 s{MASK_TO + 1}, 7", state, expect)
    if mnemonic == "s_branch":
        _, state = _start(mnemonic, gpu, 9)

        def back(after: State) -> None:
            after.s[MASK_TO] = 3

        yield Case(f"s_branch 1\ns_branch 1\ns_branch -2\ns_mov_b32 s{MASK_TO}, 3", state, back)


def _alone(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    """What changes nothing in a wave that is the only one of its block."""
    _, state = _start(mnemonic, gpu)
    operands = {
        "s_waitcnt": "vmcnt(0) lgkmcnt(0)", "s_waitcnt_depctr": "0xfffe", "s_waitcnt_vscnt": "null, 0x0", "s_nop": "1",
        "s_clause": "0x1", "s_delay_alu": "instid0(VALU_DEP_1)", "s_sendmsg": "sendmsg(MSG_DEALLOC_VGPRS)",
        "s_set_inst_prefetch_distance": "0x1", "s_inst_prefetch": "0x1", "s_barrier": "", "s_endpgm": "",
        "s_barrier_signal": "-1", "s_barrier_wait": "-1",
    }.get(mnemonic, "0x0")  # fmt: skip
    before = "s_barrier_signal -1\n" if mnemonic == "s_barrier_wait" else ""
    after_ = "\ns_barrier_wait -1" if mnemonic == "s_barrier_signal" else ""
    # The end stands behind every piece.
    text = "s_nop 0" if mnemonic == "s_endpgm" else f"{before}{mnemonic} {operands}{after_}"
    yield Case(text, state, lambda after: None)


def _unreachable(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    _, state = _start(mnemonic, gpu)
    yield Case(f"s_branch 1\n{mnemonic}", state, lambda after: None)


def _mbcnt(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    _, state = _start(mnemonic, gpu)
    first = 0 if match[1] == "lo" else 32

    def expect(after: State) -> None:
        counts = []
        for lane in range(64):
            below = [bit for bit in range(32) if first + bit < lane]
            counts.append(sum(int(after.v[FROM, lane]) >> bit & 1 for bit in below) + int(after.v[FROM + 4, lane]))
        blend(after, TO, np.array([count & 0xFFFFFFFF for count in counts], np.uint32), after.active(lanes), gpu)

    yield Case(f"{mnemonic} v{TO}, v{FROM}, v{FROM + 4}", state, expect)


def _readlane(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    first = mnemonic.startswith("v_readfirst")
    lanes = wave_of(gpu)
    for number in range(3):
        _, state = _start(mnemonic, gpu, number)
        if number == 2:
            state.set_scalar64(EXEC, 0)

        def expect(after: State) -> None:
            exec_ = after.scalar64(EXEC) & ((1 << lanes) - 1)
            lane = (exec_ & -exec_).bit_length() - 1 if exec_ else 0
            if not first:
                lane = int(after.s[SCALAR_FROM]) % lanes
            after.s[MASK_TO] = after.v[FROM, lane]

        yield Case(f"{mnemonic} s{MASK_TO}, v{FROM}" + ("" if first else f", s{SCALAR_FROM}"), state, expect)


def _packed_floats(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    """Pairs of f32, and of f16: any half of a source for either result, and negative."""
    lanes = wave_of(gpu)
    arithmetic: dict[str, Callable[..., Any]] = {"add": np.add, "mul": np.multiply, "fma": fused}
    wide = match[2] == "f32"
    count = 3 if match[1] == "fma" else 2
    for number in range(8):
        rng, state = _start(mnemonic, gpu, number)
        for i in range(count):
            for half in range(2):
                if wide:
                    state.v[FROM + 4 * i + half] = numbers(rng, "f").view(np.uint32)
                else:
                    bits = numbers(rng, "h").view(np.uint16).astype(np.uint32)
                    at = FROM + 4 * i
                    state.v[at] = state.v[at] & (0xFFFF0000 if not half else 0xFFFF) | bits << (16 * half)
        low = [number >> i & 1 for i in range(count)]
        high = [1 - (number >> (i + 1) & 1) for i in range(count)]
        negative = [[(number + i + half) % 4 == 0 and number > 3 for i in range(count)] for half in range(2)]
        sources = [register("v", FROM + 4 * i, 2 if wide else 1) for i in range(count)]
        text = f"{mnemonic} {', '.join([register('v', TO, 2 if wide else 1), *sources])}"
        text += f" op_sel:{_list(low)} op_sel_hi:{_list(high)}"
        if number > 3:
            text += f" neg_lo:{_list(negative[0])} neg_hi:{_list(negative[1])}"

        halves = [low, high]

        def expect(
            after: State,
            selected: list[list[int]] = halves,
            negative: list[list[bool]] = negative,
        ) -> None:
            results = []
            for half in range(2):
                of = []
                for i in range(count):
                    at = FROM + 4 * i
                    if wide:
                        value = after.v[at + selected[half][i]].view(np.float32)
                    else:
                        value = (after.v[at] >> (16 * selected[half][i]) & 0xFFFF).astype(np.uint16).view(np.float16)
                    of.append(-value if negative[half][i] else value)
                with np.errstate(all="ignore"):
                    results.append(arithmetic[match[1]](*of))
            active = after.active(lanes)
            if wide:
                blend(after, TO, results[0], active, gpu)
                blend(after, TO + 1, results[1], active, gpu)
            else:
                bits = [one.view(np.uint16).astype(np.uint32) for one in results]
                blend(after, TO, bits[0] | bits[1] << 16, active, gpu)

        yield Case(text, state, expect, "f" if wide else "h")


def _list(bits: list[Any]) -> str:
    return f"[{','.join(str(int(bit)) for bit in bits)}]"


def _packed_move(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    lanes = wave_of(gpu)
    for number in range(6):
        _, state = _start(mnemonic, gpu, number)
        selected = [number & 1, number >> 1 & 1]
        kinds = ["s", "s"] if number == 5 else ["v", "v"]
        places = [SCALAR_FROM if kind == "s" else FROM + 4 * i for i, kind in enumerate(kinds)]
        sources = ", ".join(register(kind, at, 2) for kind, at in zip(kinds, places, strict=True))

        def expect(
            after: State, selected: list[int] = selected, kinds: list[str] = kinds, places: list[int] = places
        ) -> None:
            before, active = after.copy(), after.active(lanes)
            for part in range(2):
                at = places[part] + selected[part]
                words = before.v[at] if kinds[part] == "v" else np.full(64, before.s[at], np.uint32)
                blend(after, TO + part, words, active, gpu)

        yield Case(f"{mnemonic} v[{TO}:{TO + 1}], {sources} op_sel:{_list(selected)}", state, expect)


def _mixed(mnemonic: str, gpu: str, match: re.Match[str]) -> Iterator[Case]:
    """Each source f32, or a half of a register as f16, negative or without its sign."""
    lanes = wave_of(gpu)
    for number in range(12):
        rng, state = _start(mnemonic, gpu, number)
        as_half = [(number + i) % 3 != 0 for i in range(3)]
        high = [half and (number >> i & 1) == 1 for i, half in enumerate(as_half)]
        signs = ["-" if (number + i) % 5 == 0 else "" for i in range(3)]
        for i in range(3):
            state.v[FROM + 4 * i] = numbers(rng, "f").view(np.uint32)
            if as_half[i]:
                two = [numbers(rng, "h").view(np.uint16).astype(np.uint32) for _ in range(2)]
                state.v[FROM + 4 * i] = two[0] | two[1] << 16
        sources = ", ".join(f"{sign}v{FROM + 4 * i}" for i, sign in enumerate(signs))
        text = f"{mnemonic} v{TO}, {sources} op_sel:{_list(high)} op_sel_hi:{_list(as_half)}"

        def expect(
            after: State, as_half: list[bool] = as_half, high: list[bool] = high, signs: list[str] = signs
        ) -> None:
            of = []
            for i in range(3):
                words = after.v[FROM + 4 * i]
                value = words.view(np.float32)
                if as_half[i]:
                    value = (
                        (words >> (16 if high[i] else 0) & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
                    )
                of.append(-value if signs[i] else value)
            with np.errstate(all="ignore"):
                result = fused(*of)
                half = result.astype(np.float16).view(np.uint16).astype(np.uint32)
            old = after.v[TO]
            words = {
                "mix": result.view(np.uint32),
                "mixlo": old & 0xFFFF0000 | half,
                "mixhi": old & 0xFFFF | half << 16,
            }[match[1]]
            blend(after, TO, words.astype(np.uint32), after.active(lanes), gpu)

        yield Case(text, state, expect, "f" if match[1] == "mix" else "h")


_MAKERS: list[tuple[str, Callable[[str, str, re.Match[str]], Iterator[Case]]]] = [
    (r"(global|flat)_(load|store)_(\w+)", _global),
    (r"buffer_(load|store)_(\w+)", _buffer),
    (r"s_load_(\w+)", _scalar_load),
    (r"ds_(read2|load_2addr|write2|store_2addr)(st64|_stride64)?_b(32|64)", _lds_two),
    (r"ds_(read|load|write|store)_(u8|b8|u16|b16|b32|b64|b96|b128)", _lds),
    (r"ds_add_(rtn_)?u32", _lds_add),
    (r"ds_bpermute_b32", _bpermute),
    (r"s_(and|or|andn2|and_not1)_saveexec_b(32|64)", _saveexec),
    (r"s_c?branch\w*", _branch),
    (r"s_code_end", _unreachable),
    (r"s_(wait\w*|nop|clause|delay_alu|sendmsg|(set_)?inst_prefetch\w*|barrier\w*|endpgm)", _alone),
    (r"v_mbcnt_(lo|hi)_u32_b32", _mbcnt),
    (r"v_read(first)?lane_b32", _readlane),
    (r"v_pk_(add|mul|fma)_(f32|f16)", _packed_floats),
    (r"v_pk_mov_b32", _packed_move),
    (r"v_fma_(mix|mixlo|mixhi)_f(?:16|32)", _mixed),
]
