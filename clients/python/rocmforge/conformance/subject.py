"""The client under test: a process that takes commands, one JSON object per line, and answers each with another."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

ANSWER_S = 30.0


class Failed(Exception):
    """The client did not do what it was asked to, or did something else; the message says what."""


class Refused(Failed):
    """The client answered with an error; ``reason`` is its name."""

    def __init__(self, did: str, reason: str, message: str) -> None:
        super().__init__(f"{did}: {reason}: {message}")
        self.reason = reason


class Subject:
    """A process of ``command``. Its standard error is the suite's."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise Failed(f"{command[0]} cannot be started: {error.strerror or error}") from error
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._answers.put(line)
        self._answers.put("")

    def do(self, command: str, **values: Any) -> dict[str, Any]:
        """Have it do something; returns its answer. Raises Refused for an error, Failed when there is no answer."""
        if self._process.stdin is None:
            raise Failed(f"{command}: the client takes no commands")
        try:
            print(json.dumps({"do": command, **values}), file=self._process.stdin, flush=True)
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise Failed(f"{command}: no answer for {ANSWER_S:g} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(f"{command}: the client ended, with status {self._process.wait(ANSWER_S)}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Failed(f"{command}: the answer is not a JSON object: {line.rstrip()[:200]}")
        if "error" in answer:
            raise Refused(command, str(answer["error"]), str(answer.get("message", "")))
        return answer

    def end(self) -> None:
        """End it, whether or not it wants to."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
