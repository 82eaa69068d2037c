"""``make fuzz``: search, guided by coverage, for bytes that break a reader or a servicer.

Each target begins with its part of tests/fuzz/corpus, and keeps what it finds on the way in build/fuzz. An input that
breaks it is written to build/fuzz as TARGET-crash-*; replayed by ``--replay FILE``, it belongs into the corpus.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

ROOT = Path(__file__).parents[2]
CORPUS, BUILD = Path(__file__).with_name("corpus"), ROOT / "build" / "fuzz"
READERS = ("safetensors", "gguf", "config", "tokenizer")
TARGETS = ("kvcache", "engine", *READERS)
#: Of one input: more is a finding, as is an allocation of so much at once.
INPUT_S, MEMORY_MB, ALLOCATION_MB = 20, 2048, 1024
MOST_BYTES = 16384


def target_of(name: str) -> Callable[[bytes], None]:
    """The target of that name. Imports what it tests."""
    from tests.fuzz import readers, servicers

    found: Callable[[bytes], None] = getattr(readers if name in READERS else servicers, name)
    return found


def search(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["services"]):
        target = target_of(name)
    from tests.fuzz.mutation import mutated

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found = BUILD / name
    found.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_MB}"]
    options += [f"-malloc_limit_mb={ALLOCATION_MB}", f"-max_len={MOST_BYTES}", f"-artifact_prefix={BUILD}/{name}-"]
    options += ["-print_final_stats=1", str(found), str(CORPUS / name)]

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        return mutated(name, data, most, seed, atheris.Mutate)

    atheris.Setup([sys.argv[0], *options], target, custom_mutator=mutator)
    atheris.Fuzz()


def main(arguments: list[str] | None = None) -> int:
    """Fuzz each target for its time. Returns the exit status: 0 when none broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time (default 1)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input once, without atheris")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    targets = flags.targets or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if flags.replay is not None:
        if len(targets) != 1:
            parser.error("--replay needs one target")
        target_of(targets[0])(flags.replay.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is missing: pip install -c constraints.txt -e '.[fuzz]'")
    if flags.here:
        search(targets[0], flags.seconds)
    if flags.jobs < 1:
        parser.error(f"--jobs {flags.jobs}: expected 1 or more")

    def broke(name: str) -> bool:
        print(f"=== {name}, {flags.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(flags.seconds), "--here"]
        return subprocess.run(command, cwd=ROOT).returncode != 0

    with ThreadPoolExecutor(flags.jobs) as jobs:
        broken = [name for name, found in zip(targets, jobs.map(broke, targets), strict=True) if found]
    print(f"broken: {', '.join(broken)}" if broken else "none broke")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
