"""The whole of it: a daemon and an engine on the GPU generate the tokens that they generate on the CPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from services import launch
from services.doctor.firstlight import step
from services.healthcheck import wait_serving

PROMPT = "ROMEO:\nBut soft, what light through yonder window breaks?"
#: Seconds until a service serves: an engine compiles its kernels first.
START_S = 200.0


def body(report: step.Report, asked: step.Asked) -> None:
    """Generate."""
    tokens = asked.of(128, 64, 4)
    texts: dict[str, str] = {}
    gpu = ("--device", "gpu", "--gpu", str(asked.gpu), "--dtype", "f32")
    runs = [("the CPU", ()), ("the GPU", gpu), ("the GPU without replay", (*gpu, "--replay", "off"))]
    for name, flags in runs:
        report.begin(f"generating on {name}")
        try:
            texts[name] = generated(flags, tokens)
        except (ChildProcessError, TimeoutError, subprocess.SubprocessError) as error:
            report.failed(f"generating on {name}: {error}")
            return
    for name, text in texts.items():
        if name != "the CPU":
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, texts["the CPU"], strict=False)))
            report.check(
                text == texts["the CPU"] and bool(text),
                f"{tokens} greedy tokens of the bundled model on {name} are those of the CPU",
                f"greedy tokens of the bundled model on {name} differ from the CPU's after {same} characters",
            )


def generated(flags: tuple[str, ...], tokens: int) -> str:
    """What an engine with these flags on a daemon of its own says. Raises ChildProcessError and TimeoutError."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rf-"))
        device = flags[:2]
        daemon, engine = (f"unix:{folder}/{name}.sock" for name in ("k", "e"))
        words = ["--listen", daemon, "--arena-dir", f"{folder}/arena", "--memory", "32MiB", *device]
        stack.enter_context(_service("services.kvcache", daemon, words, Path(folder, "k.log")))
        words = ["--listen", engine, "--kvcache", daemon, "--tuning", "off", *flags]
        stack.enter_context(_service("services.engine", engine, words, Path(folder, "e.log")))
        asked = ["generate", "--target", engine, "--temperature", "0", "--max-tokens", str(tokens), PROMPT]
        done = subprocess.run(launch.python("services.engine", *asked), capture_output=True, text=True, timeout=START_S)
        if done.returncode:
            raise ChildProcessError((done.stderr.strip().splitlines() or ["the engine said nothing"])[-1])
        return done.stdout


@contextlib.contextmanager
def _service(module: str, address: str, words: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as said:
        process = subprocess.Popen(launch.python(module, *words), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        try:
            wait_serving(address, alive=lambda: process.poll() is None, timeout_s=START_S)
        except ChildProcessError as error:
            last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise ChildProcessError(f"{module} ended: {last[:300]}") from error
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(step.run(body))
