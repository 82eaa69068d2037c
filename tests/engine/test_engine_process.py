# mypy: disable-error-code="comparison-overlap"
"""The engine as a process: start and refusal to start, SIGTERM, kill -9 of either side, the terminal's client."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.engine import __main__ as product
from services.engine.cli import COMMANDS
from services.engine.config import BUNDLED_MODEL
from tests.gated import gated, until_live
from tests.generation import collect, request
from tests.polling import until
from tests.processes import ROOT, Service, engine, kvcache

PROMPT = "KING HENRY:\nOnce more unto the breach, dear friends; or close the wall up with our English dead.\n"
TOKENS = 240
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/protos:{ROOT}/clients/python", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


def stub_of(service: Service) -> Any:
    return engine_pb2_grpc.EngineServiceStub(service.channel)


def pool_of(daemon: Service) -> Any:
    stub = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    assert not stub.Fsck(kvcache_pb2.FsckRequest()).violations
    [pool] = stub.GetStats(kvcache_pb2.GetStatsRequest()).pools
    return pool


def take(stream: Any, count: int) -> list[int]:
    """Read on until at least ``count`` tokens came."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += next(stream).token_ids
    return tokens


def sampled(**fields: Any) -> pb.GenerateRequest:
    return request(PROMPT, TOKENS, sampling={"temperature": 0.9, "seed": 11}, **fields)


def test_a_killed_and_restarted_daemon_changes_no_token(directory: Path) -> None:
    with kvcache(directory) as first, gated(directory, first.address, model=BUNDLED_MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        expected = collect(stub.Generate(sampled(cache_salt="alone")))[1]
        steps.hold()
        streams = [stub.Generate(sampled()), stub.Generate(request(PROMPT[:30], max_tokens=200))]
        until_live(one, 2)
        steps.let(40)
        begun = [take(stream, 20) for stream in streams]
        steps.let(100)  # it is killed while they are computed, or behind them
        first.kill()
        steps.close()
        with kvcache(directory) as second:
            rest = [collect(stream) for stream in streams]
            assert begun[0] + rest[0][1] == expected
            assert len(begun[1] + rest[1][1]) == 200
            stats = stub.GetStats(pb.GetStatsRequest())
            assert stats.recoveries == 1 and stats.failed_requests == 0
            pool = pool_of(second)
            assert (pool.active_sequences, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)
            assert one.stop() == 0
            assert pool_of(second).sessions == 0


def test_what_a_request_asks_to_be_kept_outlasts_what_came_after_it(directory: Path) -> None:
    """In a pool too small for both, whose pages others then use up; it is another engine that finds it."""
    with kvcache(directory) as daemon:
        with engine(directory, daemon.address, "--pool-pages", "40", model=BUNDLED_MODEL) as one:
            stub, usage = stub_of(one), {}
            kept = {"ttl": {"seconds": 600}, "priority": 80}
            collect(stub.Generate(request(PROMPT, 1, cache_salt="plain")))
            collect(stub.Generate(request(PROMPT, 1, cache_salt="kept", cache_retention=kept)))
            retained = pool_of(daemon).retained_pages
            assert retained >= 2
            for salt in "abcde":
                collect(stub.Generate(request(PROMPT * 6, 1, cache_salt=salt)))
            assert pool_of(daemon).retained_pages == retained and pool_of(daemon).evicted_pages > 20
        with engine(directory, daemon.address, "--pool-pages", "40", model=BUNDLED_MODEL) as other:
            for salt in ("plain", "kept"):
                usage[salt] = collect(stub_of(other).Generate(request(PROMPT, 1, cache_salt=salt)))[2].usage
        assert usage["plain"].cached_tokens == 0
        assert usage["kept"].cached_tokens == retained * 16


def test_a_submitted_generation_survives_the_daemon(directory: Path) -> None:
    with kvcache(directory) as first, gated(directory, first.address, model=BUNDLED_MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        text, expected, _ = collect(stub.Generate(sampled(cache_salt="alone")))
        steps.hold()
        asked = pb.SubmitGenerationRequest(request=sampled(request_id="survivor"))
        stub.SubmitGeneration(asked)
        watch = stub.WatchGeneration(pb.WatchGenerationRequest(request_id="survivor"))
        steps.let(20)
        begun = list(next(watch).response.token_ids)
        steps.let(100)  # it is killed while they are computed, or behind them
        first.kill()
        assert stub.SubmitGeneration(asked).generation.state == pb.GENERATION_STATE_RUNNING
        steps.close()
        with kvcache(directory) as second:
            assert begun + [token for one in watch for token in one.response.token_ids] == expected
            over = stub.GetGeneration(pb.GetGenerationRequest(request_id="survivor")).generation
            assert (over.state, over.text, list(over.token_ids)) == (pb.GENERATION_STATE_DONE, text, expected)
            stats = stub.GetStats(pb.GetStatsRequest())
            assert (stats.recoveries, stats.failed_requests, stats.retained_generations) == (1, 0, 1)
            pool = pool_of(second)
            assert (pool.active_sequences, pool.held_pages, pool.quarantined_pages) == (0, 0, 0)


def test_a_daemon_that_stands_still_for_a_moment(directory: Path) -> None:
    lease = ["--session-ttl", "600"]
    with kvcache(directory, *lease) as daemon, gated(directory, daemon.address, model=BUNDLED_MODEL) as (one, steps):
        stub = stub_of(one)
        steps.let()
        _, expected, finish = collect(stub.Generate(sampled(cache_salt="alone")))
        steps.hold()
        stream = stub.Generate(sampled())
        count = 20 - (finish.usage.prompt_tokens + 20) % 16 + 16 + 5  # a few into a page
        steps.let(count)
        tokens = take(stream, count)
        daemon.process.send_signal(signal.SIGSTOP)
        steps.let(3)
        tokens += take(stream, 3)  # from the page it has
        daemon.process.send_signal(signal.SIGCONT)
        steps.close()
        assert tokens + collect(stream)[1] == expected
        assert stub.GetStats(pb.GetStatsRequest()).recoveries == 0


def test_the_cache_outlives_a_killed_engine(directory: Path) -> None:
    with kvcache(directory) as daemon:
        with engine(directory, daemon.address, model=BUNDLED_MODEL) as one:
            expected = collect(stub_of(one).Generate(sampled()))
            assert expected[2].usage.cached_tokens == 0
            stream = stub_of(one).Generate(sampled(cache_salt="dies with it"))
            take(stream, 5)
            one.kill()
        with engine(directory, daemon.address, model=BUNDLED_MODEL, name="next") as other:
            text, tokens, finish = collect(stub_of(other).Generate(sampled()))
            assert (text, tokens) == expected[:2]
            assert finish.usage.cached_tokens == (finish.usage.prompt_tokens - 1) // 16 * 16 > 0
            until(lambda: not pool_of(daemon).quarantined_pages)  # the daemon saw that the process is gone
            assert pool_of(daemon).held_pages == 0


def test_sigterm_lets_a_stream_end_and_gives_the_session_back(directory: Path) -> None:
    grace = ["--grace", "100"]
    with kvcache(directory) as daemon, engine(directory, daemon.address, *grace, model=BUNDLED_MODEL) as one:
        stream = stub_of(one).Generate(sampled())
        tokens = take(stream, 5)
        one.process.send_signal(signal.SIGTERM)
        tokens += collect(stream)[1]
        assert len(tokens) == TOKENS
        assert one.process.wait(60) == 0
        assert pool_of(daemon).sessions == 0
        assert [event["event"] for event in one.events("engine_stopped")] == ["engine_stopped"]


def test_it_waits_for_a_daemon_that_comes_later(directory: Path) -> None:
    with engine(directory, f"unix:{directory}/kvcache.sock", model=BUNDLED_MODEL, wait=False) as one:
        until(lambda: one.events("kvcache_not_ready"), one.log)
        with kvcache(directory):
            one.wait_serving("rocmforge.engine.v1.EngineService")
            assert len(collect(stub_of(one).Generate(request(max_tokens=4)))[1]) == 4
            assert one.stop() == 0


def test_sigterm_while_it_still_waits_for_its_daemon(directory: Path) -> None:
    with engine(directory, f"unix:{directory}/none.sock", model=BUNDLED_MODEL, wait=False) as one:
        until(lambda: one.events("kvcache_not_ready"), one.log)
        assert one.stop() == 0
        assert "Traceback" not in one.log() and one.events("engine_stopped")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.engine", *arguments],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-batch", "0"], "--max-batch 0: expected an integer from 1 to 1024"),
        (
            ["--model", "/proc/none", "--kvcache", "local", "--listen", "127.0.0.1:0"],
            "--model /proc/none: there is no",
        ),
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (
            ["--listen", "127.0.0.1:0", "--metrics", "192.0.2.1:9464", "--insecure"],
            "--metrics 192.0.2.1:9464: cannot bind",
        ),
        (["--max-batch", "512"], "--max-step-tokens 512: must be more than --max-batch, 512"),
        (
            ["--listen", "127.0.0.1:0", "--kvcache", "unix:/proc/none.sock", "--kvcache-patience", "0"],
            "start it with",
        ),
        (
            ["--listen", "127.0.0.1:0", "--kvcache", "local", "--page-size", "4096", "--local-pages", "16777216"],
            "not enough memory",
        ),
    ],
    ids=["flag", "model", "exposure", "metrics", "budget", "daemon", "memory"],
)
def test_it_says_in_one_line_why_it_cannot_start(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("rocmforge engine: ") and says in last
    assert "Traceback" not in done.stderr and "engine_stopped" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-bath", "8"], "python -m services.engine [serve]: unrecognized arguments: --max-bath 8; see --help\n"),
        (
            ["serve", "--model"],
            "python -m services.engine [serve]: argument --model: expected one argument; see --help\n",
        ),
        (
            ["generate", "x", "--colour"],
            "python -m services.engine generate: unrecognized arguments: --colour; see --help\n",
        ),
        (
            ["sing"],
            f"rocmforge engine: sing: no such command; expected one of serve, doctor, token, {', '.join(COMMANDS)}\n",
        ),
    ],
)
def test_a_command_line_that_cannot_be_is_told_in_a_line(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_a_pool_of_another_layout_and_what_to_change(directory: Path) -> None:
    with kvcache(directory) as daemon:
        with engine(directory, daemon.address, "--pool-id", "one", model=BUNDLED_MODEL):
            second = run(
                "--listen", "127.0.0.1:0", "--kvcache", daemon.address, "--pool-id", "one", "--page-size", "32"
            )
    last = second.stderr.splitlines()[-1]
    assert second.returncode == 2 and last.startswith("rocmforge engine: layout: pool 'one' has page_size=16 ")
    assert last.endswith("give this engine the pool's --page-size, --kv-dtype and --pool-pages, or another --pool-id")


def test_a_misspelt_variable_is_an_error() -> None:
    done = run(ROCMFORGE_ENGINE_MAX_BATHC="8")
    assert done.returncode == 2 and "ROCMFORGE_ENGINE_MAX_BATHC" in done.stderr


def test_help_tells_every_flag() -> None:
    done = run("--help")
    assert done.returncode == 0
    flags = ["--model", "--kvcache", "--listen", "--max-batch", "--kvcache-patience", "--pool-id", "--tls-cert"]
    flags += ["--metrics", "--max-step-tokens", "--priority-step"]
    flags += ["--max-queue", "--max-queue-tokens", "--generation-ttl", "--generation-count", "--generation-memory"]
    flags += ["--messages-per-s"]
    for word in (*flags, "--grace", *COMMANDS):
        assert word in done.stdout


def test_an_address_in_use_and_the_client(directory: Path) -> None:
    with engine(directory, "local", model=BUNDLED_MODEL) as one:
        second = run("--listen", one.address, "--kvcache", "local")
        assert second.returncode == 2 and "another server is listening there" in second.stderr
        base = ["generate", "--target", one.address]
        done = run(*base, "ROMEO:", "--max-tokens", "12", "--temperature", "0", "--show-usage")
        assert done.returncode == 0, done.stderr
        expected = collect(stub_of(one).Generate(request("ROMEO:", max_tokens=12)))[0]
        assert done.stdout.rstrip("\n") == expected.rstrip("\n") and done.stdout.endswith("\n")
        assert "completion 12 tokens" in done.stderr and "seed" in done.stderr
        assert run(*base, "ROMEO:", "--max-tokens", "12", "--temperature", "0").stdout == done.stdout
        bad = run(*base, "x", "--top-p", "7")
        assert bad.returncode == 1 and bad.stderr.startswith("rocmforge generate: FIELD_INVALID: top_p")
        reader = subprocess.Popen(
            [sys.executable, "-m", "services.engine", *base, "x", "--max-tokens", "900"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert reader.stdout is not None
        reader.stdout.close()  # as with `generate x | head`
        reader.stdout = None
        assert reader.communicate(timeout=60) == (None, b"") and reader.returncode == 1
        strange = run(*base, "x", "--temperature", "100", "--seed", "1", PYTHONIOENCODING="ascii")
        assert strange.returncode == 0 and strange.stderr == "" and "?" in strange.stdout
    gone = run(*base, "x")
    assert gone.returncode == 1 and len(gone.stderr.splitlines()) == 1
    assert gone.stderr.startswith(f"rocmforge generate: UNAVAILABLE: no engine at {one.address}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x", "--max-tokens", "-1"], "--max-tokens -1: out of range"),
        (["x", "--top-k", "4294967296"], "--top-k 4294967296: out of range"),
        (["x", "--timeout", "inf"], "--timeout inf: expected more than 0 seconds"),
        (["\udcff"], "PROMPT must be UTF-8"),
        (["x", "--stop", "\udcff"], "--stop must be UTF-8"),
    ],
)
def test_the_client_names_the_flag_at_fault(arguments: list[str], says: str) -> None:
    done = run("generate", *arguments)
    assert (done.returncode, done.stderr) == (2, f"rocmforge generate: {says}\n")


def test_what_the_start_allocated_is_left_out_of_later_collections() -> None:
    class Started:
        """An engine that has started, and is asked to stop."""

        bound: ClassVar[list[str]] = []
        metrics_bound, pool_id = None, ""
        config = SimpleNamespace(echo={}, grace_s=0.0)

        async def start(self) -> None: ...

        async def stop(self, grace_s: float) -> None: ...

    async def served() -> None:
        stop = asyncio.Event()
        stop.set()
        await product._serve(Started(), stop)  # type: ignore[arg-type]

    try:
        asyncio.run(served())
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
