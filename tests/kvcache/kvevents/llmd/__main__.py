"""``python -m tests.kvcache.kvevents.llmd CHECKOUT [SEED ...]``: llm-d's own subscriber and index on our KV events.

CHECKOUT is one of llm-d's router; its Go module is built with `main.go` beside this file laid over it, and not changed.
The daemon's cache changes at random, engines come and go and the router restarts; what its index says of prompts is
compared with the daemon's.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.kvcache.conftest import Running
from tests.kvcache.kvevents.test_publisher import FLAGS, Blocks, publish, publisher, truth

TURNS = 150


def main() -> None:
    """Build, and run once for each seed."""
    checkout, *seeds = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        program = build(Path(checkout).resolve(), Path(name))
        for seed in map(int, seeds or ["1", "2"]):
            for replay in (False, True):
                with contextlib.closing(Router(program, seed, replay=replay)) as router:
                    print(f"seed {seed}, {router.about}: {router.run()} lookups right", flush=True)


def build(checkout: Path, directory: Path) -> Path:
    """The program, made of the checkout's packages."""
    overlay = directory / "overlay.json"
    ours = Path(__file__).with_name("main.go")
    overlay.write_text(json.dumps({"Replace": {str(checkout / "cmd" / "reads-ours" / "main.go"): str(ours)}}))
    program = directory / "reads"
    command = ["go", "build", "-mod=mod", "-overlay", str(overlay), "-o", str(program), "./cmd/reads-ours"]
    subprocess.run(command, cwd=checkout, check=True)
    return program


class Router:
    """A daemon whose cache changes, and the program that follows it."""

    def __init__(self, program: Path, seed: int, *, replay: bool) -> None:
        self._chance = random.Random(seed)
        form = self._chance.choice(["map", "array"])
        self.about = f"{form}, {'with' if replay else 'without'} replay"
        self._directory = tempfile.TemporaryDirectory(prefix="rf-")
        self._running = Running(Path(self._directory.name), *FLAGS, "--kv-events-format", form)
        said = publisher(self._running)
        self._command = [str(program), said.bound, *([said.replay_bound] if replay else [])]
        self._process = self._start()
        self._sessions: dict[str, str] = {}
        self._prompts: list[list[int]] = []

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def close(self) -> None:
        """End both."""
        self._process.kill()
        self._process.wait()
        self._running.close()
        self._directory.cleanup()

    def run(self) -> int:
        """Change the cache and compare; how many lookups were compared."""
        compared = 0
        for turn in range(TURNS):
            self._change(turn)
            if turn % 10 == 9:
                compared += self._compare()
        return compared

    def _change(self, turn: int) -> None:
        chance, running, sessions = self._chance, self._running, self._sessions
        drawn = chance.random()
        if drawn < 0.12 or not sessions:
            name = f"e{chance.randrange(3)}"
            if name not in sessions:
                sessions[name] = running.session(engine_name=name, model="pool")
        elif drawn < 0.17:
            ended = sessions.pop(chance.choice(sorted(sessions)))
            running.stub.CloseSession(pb.CloseSessionRequest(session_id=ended))
        elif drawn < 0.19:
            running.now += 20
            running.sweep()
            sessions.clear()
        elif drawn < 0.28:
            running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", max_pages=chance.randrange(1, 5)))
        elif drawn < 0.3:
            self._process.kill()
            self._process.wait()
            self._process = self._start()
        else:
            prompt = [token for _ in range(chance.randrange(1, 4)) for token in [chance.randrange(3)] * 4]
            session = sessions[chance.choice(sorted(sessions))]
            publish(running, session, f"q{turn}", prompt, chance.choice(["", "", "x"]))
            self._prompts.append(prompt)

    def _compare(self) -> int:
        prompts, deadline = self._prompts[-20:], time.monotonic() + 30
        while True:
            blocks, _ = truth(self._running)
            wrong = [prompt for prompt in prompts if self._known(prompt) != right(blocks, prompt)]
            if not wrong:
                return len(prompts)
            if time.monotonic() > deadline:
                raise AssertionError(f"{wrong[0]}: {self._known(wrong[0])}, not {right(blocks, wrong[0])}")

    def _known(self, prompt: list[int]) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("no pipes")
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def right(blocks: Blocks, prompt: list[int]) -> dict[str, int]:
    """Blocks of the prompt's prefix that each engine has, as the daemon's index has them."""
    found = {}
    for topic, known in blocks.items():
        by_content = {content: block for block, content in known.items()}
        parent, count = None, 0
        for at in range(0, len(prompt), 4):
            block = by_content.get((parent, tuple(prompt[at : at + 4]), ""))
            if block is None:
                break
            parent, count = block, count + 1
        if count:
            found[topic.split("@")[1]] = count
    return found


if __name__ == "__main__":
    main()
