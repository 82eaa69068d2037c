"""A byte of an arena in GPU memory changes: the daemon's kernel finds it, and the tokens stay right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rocmforge.engine.v1 import engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from tests.generation import collect, request
from tests.gpu.conftest import World
from tests.gpus import ROOT
from tests.processes import Service

PROMPT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 2
TOKENS = 8

pytestmark = pytest.mark.timeout(600)

#: Another process: opens a handle and flips a bit of each byte of a piece of what is there.
FLIP = """
import sys
from rocmforge.client.arena.gpu_ipc import Runtime
gpu = Runtime.load().gpu(0)
pointer = gpu.open(bytes.fromhex(sys.argv[1]))
at, size = pointer + int(sys.argv[2]), int(sys.argv[3])
gpu.write(at, bytes(byte ^ 0x40 for byte in gpu.read(at, size)))
gpu.close(pointer)
"""


def flip(one: World, daemon: Service, page: int) -> None:
    """A page, by a process that maps the pool as any engine may."""
    cache = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    [pool] = cache.GetStats(kvcache_pb2.GetStatsRequest()).pools
    opened = cache.OpenSession(
        kvcache_pb2.OpenSessionRequest(pool_id=pool.pool_id.rpartition("/")[0], layout=pool.layout, device_ordinal=0)
    )
    words = [opened.arena.device_ipc_handle.hex(), str(page * pool.page_bytes), str(pool.page_bytes)]
    done = subprocess.run(
        [sys.executable, "-c", FLIP, *words],
        cwd=ROOT,
        env=one.host.environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    cache.CloseSession(kvcache_pb2.CloseSessionRequest(session_id=opened.session_id))


def test_a_corrupted_page_is_found_by_the_next_hit_and_computed_anew(one: World) -> None:
    daemon = one.daemon("--verify-share", "1")
    engine = one.serving(daemon, "first", "--dtype", "f32", "--max-step-tokens", "64")
    stub = engine_pb2_grpc.EngineServiceStub(engine.channel)
    cache = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel)
    _, right, _ = collect(stub.Generate(request(PROMPT, TOKENS)))
    answer = cache.Fsck(kvcache_pb2.FsckRequest(deep=True))
    assert answer.verified_pages >= 4 and not answer.violations
    _, again, finish = collect(stub.Generate(request(PROMPT, TOKENS)))
    assert again == right and finish.usage.cached_tokens >= 64
    flip(one, daemon, 0)
    _, tokens, finish = collect(stub.Generate(request(PROMPT, TOKENS)))
    assert tokens == right and finish.usage.cached_tokens == 0
    [event] = daemon.events("page_corrupted")
    assert (event["page"], event["found_by"]) == (0, "hit")
    assert not cache.Fsck(kvcache_pb2.FsckRequest(deep=True)).violations
    [pool] = cache.GetStats(kvcache_pb2.GetStatsRequest()).pools
    assert pool.corrupted_pages == 1 and pool.withdrawn_pages >= 4
