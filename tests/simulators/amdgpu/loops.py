"""Loops of machine code, and those that lanes leave one by one although a barrier is in them.

A block of one thread at the end of a loop is such a case: LLVM makes an inner loop of the other lanes' way back, which
the one lane leaves and, if only it can end the loop, the others never do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.simulators.amdgpu.code.disassembly import Instruction


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop: the numbers of its blocks, and the block that it is entered by."""

    header: int
    blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Flow:
    """Basic blocks, and the successors of each."""

    blocks: tuple[tuple[Instruction, ...], ...]
    successors: tuple[tuple[int, ...], ...]

    def instructions(self, loop: Loop) -> Iterator[Instruction]:
        """Return the instructions of a loop."""
        for block in sorted(loop.blocks):
            yield from self.blocks[block]


def target(one: Instruction) -> int:
    """Return the pc that a branch goes to."""
    jump = one.words[0] & 0xFFFF
    return one.pc + 4 + 4 * (jump - 0x10000 if jump & 0x8000 else jump)


def _branches(one: Instruction) -> bool:
    return one.mnemonic.startswith(("s_branch", "s_cbranch"))


def flow(instructions: Sequence[Instruction]) -> Flow:
    """Return the flow of one kernel's instructions."""
    starts = {instructions[0].pc}
    for one in instructions:
        if _branches(one) or one.mnemonic == "s_endpgm":
            starts.add(one.pc + one.size)
        if _branches(one):
            starts.add(target(one))
    blocks: list[list[Instruction]] = []
    for one in instructions:
        if one.pc in starts:
            blocks.append([])
        blocks[-1].append(one)
    number = {block[0].pc: at for at, block in enumerate(blocks)}
    successors = []
    for block in blocks:
        last = block[-1]
        to = [number[target(last)]] if _branches(last) else []
        if last.mnemonic not in ("s_branch", "s_endpgm", "s_code_end") and last.pc + last.size in number:
            to.append(number[last.pc + last.size])
        successors.append(tuple(to))
    return Flow(tuple(map(tuple, blocks)), tuple(successors))


def loops(of: Flow) -> list[Loop]:
    """Return the natural loops; those with one header are one."""
    reachable = {0}
    todo = [0]
    while todo:
        for after in of.successors[todo.pop()]:
            if after not in reachable:
                reachable.add(after)
                todo.append(after)
    predecessors: dict[int, set[int]] = {block: set() for block in reachable}
    for block in reachable:
        for after in of.successors[block]:
            predecessors[after].add(block)
    dominators = {block: set(reachable) for block in reachable} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in sorted(reachable - {0}):
            new = set.intersection(*(dominators[before] for before in predecessors[block])) | {block}
            if new != dominators[block]:
                dominators[block], changed = new, True
    found: dict[int, set[int]] = {}
    for latch in reachable:
        for header in of.successors[latch]:
            if header not in dominators[latch]:
                continue
            inside = found.setdefault(header, {header})
            todo = [latch]
            while todo:
                block = todo.pop()
                if block not in inside:
                    inside.add(block)
                    todo.extend(predecessors[block])
    return [Loop(header, frozenset(inside)) for header, inside in sorted(found.items())]


def left_one_by_one(of: Flow, loop: Loop) -> Instruction | None:
    """Return the branch by which lanes leave a loop one by one, that is when none is left in EXEC; or None."""
    for block in loop.blocks:
        last = of.blocks[block][-1]
        leaves = any(after not in loop.blocks for after in of.successors[block])
        if leaves and last.mnemonic.startswith("s_cbranch_exec") and any(_drops_lanes(one) for one in of.blocks[block]):
            return last
    return None


def _drops_lanes(one: Instruction) -> bool:
    """``s_andn2_b64 exec, exec, ...``: lanes that have had enough are taken out."""
    return one.mnemonic.startswith(("s_andn2_b", "s_and_not1_b")) and one.operands[0].startswith("exec")


def faults(instructions: Sequence[Instruction]) -> list[str]:
    """Say which loops with a barrier lanes leave one by one."""
    of, found = flow(instructions), []
    for loop in loops(of):
        barrier = next((one for one in of.instructions(loop) if one.mnemonic.startswith("s_barrier")), None)
        branch = left_one_by_one(of, loop)
        if barrier and branch:
            first = of.blocks[loop.header][0]
            told = f"the loop at 0x{first.pc:x} has a barrier at 0x{barrier.pc:x}"
            found.append(f"{told}, and lanes leave it one by one at 0x{branch.pc:x}")
    return found
