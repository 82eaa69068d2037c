"""Processes on the stand-in that follow a test's commands and live as long as it needs them.

Run as a program, this is such a process: it reads lines of JSON, ``["run", text]`` for statements or ``["get", text]``
for an expression, and answers each with ``["value", repr]`` or ``["error", type, status, message]``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Refused(Exception):
    """The command raised an exception; ``status`` is HIP's or hipBLAS's number, if it has one."""

    def __init__(self, kind: str, status: int | None, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.status = status


class Ended(Exception):
    """The process ended instead of answering; ``status`` as subprocess has it, ``said`` what it wrote to stderr."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"ended with {status}: {said}")
        self.status = status
        self.said = said


class Process:
    """A Python with CuPy as ``cp``, its runtime as ``rt`` and NumPy as ``np``, in a namespace that stays."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rocm.processes"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, statements: str, **names: Any) -> None:
        """Execute statements, with ``names`` given values; Refused or Ended."""
        self._ask("run", statements, names)

    def get(self, expression: str, **names: Any) -> Any:
        """The value of an expression, which is a number, a text, bytes or a container of them; Refused or Ended."""
        return ast.literal_eval(self._ask("get", expression, names))

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> int:
        """Let it end as a Python does; its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, verb: str, text: str, names: dict[str, Any]) -> str:
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise ValueError("the process has no pipes")
        given = {name: repr(value) for name, value in names.items()}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([verb, text, given]) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            said = self._process.stderr.read()
            raise Ended(self._process.wait(60), said)
        answer = json.loads(line)
        if answer[0] == "error":
            raise Refused(*answer[1:])
        return str(answer[1])


def in_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` returns on a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's, whose repr is a literal."""
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


def _serve() -> None:
    import cupy
    import numpy

    names: dict[str, Any] = {"cp": cupy, "rt": cupy.cuda.runtime, "np": numpy, "in_thread": in_thread}
    # What a kernel prints goes elsewhere than the answers.
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        verb, text, given = json.loads(line)
        names.update({name: ast.literal_eval(value) for name, value in given.items()})
        try:
            value = None
            if verb == "run":
                exec(text, names)
            else:
                value = eval(text, names)
            answer: list[object] = ["value", repr(_plain(value))]
        except Exception as error:
            answer = ["error", type(error).__name__, getattr(error, "status", None), str(error)]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
