"""Readers of KV events with vLLM's own classes: `subscriber.py`, run by the Python that ROCMFORGE_VLLM names."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.vllm.real.scripts import command, importing_tests


class Subscriber:
    """`subscriber.py` as a process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            command("subscriber"),
            env=importing_tests(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == {"ready": True}

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # vLLM logs between its answers
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"it ended with {self.process.wait(60)}")

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
