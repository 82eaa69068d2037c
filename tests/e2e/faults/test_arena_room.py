"""A file system with room for one arena, as the tmpfs volume of docker-compose.yml is, and a daemon that dies there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocmforge.engine.v1 import engine_pb2_grpc
from tests.e2e.conftest import MODEL
from tests.generation import collect, request
from tests.processes import Service, engine, kvcache

#: An engine asks for its lease after a third of it, and so hears that its daemon is gone.
LEASE_S = 20
FLAGS = ("--memory", "8MiB", "--session-ttl", f"{LEASE_S}")
#: Less than a lease: nobody waits for one to run out.
BACK_S = LEASE_S - 2


@pytest.fixture
def small(short_path: Path) -> Iterator[Path]:
    """Where a daemon's arena is on a file system that has room for one and a half."""
    arenas = short_path / "arena"
    arenas.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=0700", "tmpfs", str(arenas)], check=True)
    yield short_path
    subprocess.run(["umount", "--lazy", str(arenas)], check=True)


def generated(service: Service) -> list[int]:
    stub = engine_pb2_grpc.EngineServiceStub(service.channel)
    stream = stub.Generate(request("ROMEO:", 20), timeout=BACK_S)
    return collect(stream)[1]


@pytest.mark.needs("other-users")
def test_the_arena_of_a_restarted_daemon_fits_as_soon_as_engines_come_back(small: Path) -> None:
    with kvcache(small, *FLAGS) as first:
        with (
            engine(small, first.address, model=MODEL, name="one") as one,
            engine(small, first.address, model=MODEL, name="two") as two,
        ):
            before = generated(one)
            for _ in range(3):
                first.kill()
                with kvcache(small, *FLAGS) as first:
                    assert [generated(one), generated(two), generated(one)] == [before] * 3
                    first.kill()
