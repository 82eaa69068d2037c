"""Every instruction that the project's code objects contain does what AMD's guides say, and nothing besides."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from tests import tools
from tests.kernels.device import amdgcn
from tests.simulators.amdgpu.cases import TO, Case, lane_cases, scalar_cases
from tests.simulators.amdgpu.code import mnemonics
from tests.simulators.amdgpu.special_cases import special_cases
from tests.simulators.amdgpu.wave import Snippets, State

LISTED = [(name, gpu) for name, gpus in mnemonics.listed().items() for gpu in sorted(gpus)]


def cases(name: str, gpu: str) -> Iterator[Case]:
    """The cases of a mnemonic, the same ones every time: they are large, and not kept."""
    for make in (lane_cases, scalar_cases, special_cases):
        yield from make(name, gpu)


@functools.cache
def pieces_of(gpu: str) -> tuple[dict[str, int], Snippets]:
    """The pieces of assembly of all cases for a GPU, assembled at once, and the number of each mnemonic's first."""
    tools.need("g++", *amdgcn.TOOLS)
    first: dict[str, int] = {}
    texts: list[str] = []
    for name, gpus in mnemonics.listed().items():
        if gpu in gpus:
            own = [case.text for case in cases(name, gpu)]
            if own:
                first[name] = len(texts)
            texts += own
    return first, Snippets(gpu, texts)


@pytest.mark.parametrize(("name", "gpu"), LISTED, ids=lambda value: str(value))
def test_instruction(name: str, gpu: str) -> None:
    first, snippets = pieces_of(gpu)
    assert name in first, "no test: meanings.py, scalar_meanings.py and special_cases.py do not know it"
    for number, case in enumerate(cases(name, gpu), first[name]):
        mnemonic_there = {half.mnemonic for one in snippets.pieces[number] for half in (one, one.second) if half}
        assert name in mnemonic_there, f"assembled as {snippets.pieces[number]}"
        expected = case.before.copy()
        case.expect(expected)
        differs = difference(expected, snippets.run(number, case.before), case)
        assert not differs, f"{case.text}: {differs}"


def difference(expected: State, found: State, case: Case) -> str:
    """Say where two states differ; NaN is NaN, and an approximation may be a last place or two off."""
    for name in ("s", "v", "scc", "shared", "private", "memory"):
        a, b = getattr(expected, name), getattr(found, name)
        same = a == b
        if case.floats == "s" and name == "s":
            same[40] |= near(a[40:41].view(np.float32), b[40:41].view(np.float32), case.loose)[0]
        elif case.floats and name == "v":
            for at in range(TO, TO + 16):
                if case.floats == "F":
                    of = [
                        (one[at].astype(np.uint64) | one[at + 1].astype(np.uint64) << np.uint64(32)) for one in (a, b)
                    ]
                    close = near(of[0].view(np.float64), of[1].view(np.float64), case.loose)
                    same[at] |= close
                    same[at + 1] |= close
                    break
                if case.floats == "h":
                    halves = [one[at].view(np.uint16).reshape(-1, 2).view(np.float16) for one in (a, b)]
                    same[at] |= near(halves[0], halves[1], case.loose).all(axis=1)
                else:
                    same[at] |= near(a[at].view(np.float32), b[at].view(np.float32), case.loose)
        if not same.all():
            at_ = tuple(int(one) for one in np.argwhere(~np.atleast_1d(same))[0])
            return f"{name}{list(at_)} is {b[at_]:#x}, must be {a[at_]:#x} ({(~same).sum()} differ)"
    return ""


def near(a: np.ndarray, b: np.ndarray, loose: bool) -> np.ndarray:
    """Return where floats are the same, or near each other."""
    with np.errstate(all="ignore"):
        same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)
        bound = 2.0**-20 if a.dtype == np.float64 else 2.0**-22
        return same | (np.abs(a - b) <= np.abs(a) * bound) if loose else same


def test_every_listed_mnemonic_is_one_of_the_executor() -> None:
    from tests.simulators.amdgpu.code.encoding import name_of
    from tests.simulators.amdgpu.library import executor

    assert [name for name in mnemonics.listed() if not executor().executor_has(name_of(name).encode())] == []
