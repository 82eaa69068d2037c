"""Engines of the real vLLM as processes: `peer.py`, run by the Python that ROCMFORGE_VLLM names."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.vllm.real.scripts import ROOT, command, importing_client

#: It starts in 15 s on a quiet machine of 2 cores.
START_S = ANSWER_S = 400.0


class Peer:
    """One vLLM engine. Every wait has a deadline. With ``alone``, its scheduler and its worker are in one process."""

    def __init__(
        self,
        directory: Path,
        name: str,
        daemon: str = "",
        extra: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        alone = bool(engine.pop("alone", False))
        arguments: dict[str, Any] = {
            "model": str(ROOT / "models" / "shakespeare"),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "block_size": 32,
            "distributed_executor_backend": "uni",
            **engine,
        }
        if daemon:
            arguments["kv_transfer_config"] = {
                "kv_connector": "RocmForgeConnector",
                "kv_connector_module_path": "rocmforge.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"daemon": daemon, "lookup_timeout_s": 20, **(extra or {})},
            }
        self._log = (directory / f"{name}.log").open("ab")
        self.log_path = directory / f"{name}.log"
        self.process = subprocess.Popen(
            command("peer", json.dumps(arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **importing_client(),
                "OMP_NUM_THREADS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
            },
            start_new_session=True,  # its engine core is a process of its own, and dies with it
        )
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._ready = self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._changed:
                if "ready" in answer:
                    self._ready = True
                else:
                    self._answers[answer["id"]] = answer
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def log(self) -> str:
        """What it wrote, at most the end."""
        return self.log_path.read_text(errors="replace")[-6000:]

    def wait_ready(self) -> Peer:
        """Return once it serves; fail at once when it ends instead."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ready or self._over, START_S) and self._ready, self.log()
        return self

    def ask(self, **command: Any) -> int:
        """Send a command; the number of its answer."""
        number = next(self._numbers)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, **command}) + "\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for an answer."""
        with self._changed:
            done = self._changed.wait_for(lambda: number in self._answers or self._over, ANSWER_S)
            assert done and number in self._answers, self.log()
        found = self._answers.pop(number)
        assert "error" not in found, found["error"] + self.log()
        return found

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12, **more: Any) -> list[list[int]]:
        """The greedy tokens of prompts that run side by side."""
        tokens: list[list[int]] = self.answer(self.ask(prompts=prompts, max_tokens=max_tokens, **more))["tokens"]
        return tokens

    def forget(self, *, external: bool = False) -> None:
        """Reset vLLM's own prefix cache, and the connector's if ``external``; it refuses while blocks are in use."""
        until = time.monotonic() + 30
        while not self.answer(self.ask(reset=True, external=external))["reset"]:
            assert time.monotonic() < until, self.log()

    def metric(self, name: str) -> float:
        """A counter or a gauge of vLLM, summed over its labels; 0 if it does not exist."""
        return float(self.answer(self.ask(metrics=True))["metrics"].get(name, 0.0))

    def kill(self) -> None:
        """SIGKILL to it and its engine core."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def close(self) -> None:
        """End it."""
        self.kill()
        self._log.close()


@contextlib.contextmanager
def peer(directory: Path, name: str, daemon: str = "", **more: Any) -> Iterator[Peer]:
    """An engine that serves."""
    one = Peer(directory, name, daemon, **more)
    try:
        yield one.wait_ready()
    finally:
        one.close()
