"""Instructions out of what llvm-objdump prints of a code object."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

OBJDUMP = "llvm-objdump-19"

_LINE = re.compile(r"^\t(\S+)(.*?)\s*// ([0-9A-F]{12}): ((?:[0-9A-F]{8} ?)+)")
#: Behind these are counters, hints and messages, not operands.
_WITHOUT_OPERANDS = re.compile(
    r"s_(waitcnt|wait_(?!.*barrier)|delay_alu|clause|nop|sleep|setprio|sendmsg|inst_prefetch|set_inst_prefetch|code_end"
    r"|endpgm|barrier$|icache_inv|trap)|v_nop|buffer_(gl|inv|wb)|global_(inv|wb)"
)
_HALVES = " :: "


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction as it is printed: operands and modifiers are texts. ``second`` is a dual one's other half."""

    pc: int
    size: int
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: tuple[str, ...]
    text: str
    words: tuple[int, ...] = field(default=())
    second: Instruction | None = None

    def __str__(self) -> str:
        return self.text


def disassembled(path: Path) -> list[Instruction]:
    """Return every instruction of the code object in the file at ``path``, in order of address."""
    command = [OBJDUMP, "-d", str(path)]
    return parsed(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parsed(listing: str) -> list[Instruction]:
    """Return the instructions of a listing; ValueError for a line of code that is not understood."""
    return list(_instructions(listing))


def _instructions(listing: str) -> Iterator[Instruction]:
    for line in listing.splitlines():
        if not line.startswith("\t"):
            continue
        match = _LINE.match(line)
        if not match:
            raise ValueError(f"disassembly: {line!r}")
        mnemonic, rest, pc, encoded = match.groups()
        words = tuple(int(word, 16) for word in encoded.split())
        text = f"{mnemonic}{rest}".strip()
        first, dual, other = text.partition(_HALVES)
        at = int(pc, 16)
        second = _one(at, words, other, other) if dual else None
        yield _one(at, words, first, text, second)


def _one(pc: int, words: tuple[int, ...], code: str, text: str, second: Instruction | None = None) -> Instruction:
    mnemonic, _, rest = code.partition(" ")
    operands: tuple[str, ...] = ()
    modifiers: tuple[str, ...] = ()
    if not _WITHOUT_OPERANDS.match(mnemonic) and rest.strip():
        parts = list(_split(rest.strip(), ","))
        *most, last = parts
        # Modifiers come behind the last operand; what begins without one has modifiers alone.
        words_of_last = list(_split(last, " "))
        operands = tuple(part.strip() for part in [*most, words_of_last[0]])
        modifiers = tuple(words_of_last[1:])
    return Instruction(pc, 4 * len(words), mnemonic, operands, modifiers, text, words, second)


def _split(text: str, by: str) -> Iterator[str]:
    """Parts between separators that are in no bracket, without empty ones."""
    depth, part = 0, ""
    for letter in text:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(letter, 0)
        if letter == by and depth == 0:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()
