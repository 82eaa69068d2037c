"""What a step's process says to the one that started it: a line of JSON for each thing that it began or found.

A step is a module of this folder with ``main``, run as ``python -m services.doctor.firstlight.NAME SIZE GPU``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ServiceError

#: Which fault a test injects, at the seams that ask for it.
INJECT = "ROCMFORGE_FIRST_LIGHT_INJECT"
FAULTS = ("wrong-bytes", "hang", "refused-handle", "wrong-ordinal", "slow-memory")
#: The JSON file of chosen kernels, which the tuning step writes and later ones read; empty: where engines look for it.
TUNING = "ROCMFORGE_FIRST_LIGHT_TUNING"
SIZES = ("full", "quick", "tiny")
#: A fault of this process's own, as opposed to one that it found.
CRASHED = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """``size``: one of `SIZES`. ``gpu``: its ordinal."""

    size: str
    gpu: int

    def of(self, full: int, quick: int, tiny: int) -> int:
        """The number for this size."""
        return dict(zip(SIZES, (full, quick, tiny), strict=True))[self.size]

    @property
    def timed(self) -> bool:
        """Whether times mean anything: not of shapes that a CPU can run."""
        return self.size != "tiny"


class Report:
    """Says what a step finds, as it finds it."""

    def __init__(self, write: Callable[[str], Any] = lambda line: print(line, flush=True)) -> None:
        self._write = write

    def _say(self, **fields: Any) -> None:
        self._write(json.dumps(fields))

    def facts(self, **fields: Any) -> None:
        """What the machine is."""
        self._say(kind="facts", facts=fields)

    def begin(self, what: str) -> None:
        """What comes now: if nothing follows, this is what hung."""
        self._say(kind="begin", what=what)

    def passed(self, found: str) -> None:
        """Something is as it should be."""
        self._say(kind="passed", found=found)

    def failed(self, found: str) -> None:
        """Something is not."""
        self._say(kind="failed", found=found)

    def skipped(self, found: str) -> None:
        """Something was not tried, and why."""
        self._say(kind="skipped", found=found)

    def check(self, right: bool, found: str, wrong: str) -> bool:
        """Say ``found`` or ``wrong``; returns ``right``."""
        (self.passed if right else self.failed)(found if right else wrong)
        return right

    def number(self, key: str, name: str, value: float, unit: str) -> None:
        """Something was measured; ``key`` names what it is compared with (`figures`)."""
        self._say(kind="number", key=key, name=name, value=value, unit=unit)


def tuning_path(arch: str) -> Path:
    """The tuning file of this run."""
    # Not at the top: the process that runs the steps must not depend on what they try.
    from kernels.device import tuning

    named = os.environ.get(TUNING, "")
    return Path(named) if named else tuning.default_path(arch)


def injected(fault: str) -> bool:
    """Whether a test asks for this fault here."""
    return os.environ.get(INJECT) == fault


def hang() -> None:
    """Wait forever, like a kernel that never ends."""
    threading.Event().wait()


def run(body: Callable[[Report, Asked], None]) -> int:
    """The main function of a step's module. Returns the exit status."""
    report, asked = Report(), Asked(sys.argv[1], int(sys.argv[2]))
    try:
        body(report, asked)
    except ServiceError as error:
        report.failed(error.message)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        report.failed(f"{type(error).__name__}: {lines[0]}")
        return CRASHED
    return 0
