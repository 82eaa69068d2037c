"""Clients and daemons of different versions: what docs/versions.md says of them, against the released protocol."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from rocmforge.kvcache.v1 import kvcache_pb2, kvcache_pb2_grpc
from services.version import VERSION
from tests.contract.released import SERVICE, message, released_daemon
from tests.e2e.conftest import MODEL
from tests.generation import collect, request
from tests.processes import Service, engine, kvcache

PROMPT = "ROMEO:\nBut soft, what light through yonder window breaks?"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:  # short: the path of a socket has a limit
        yield Path(name)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Service]:
    with kvcache(folder) as one:
        yield one


def test_an_engine_and_a_daemon_that_know_only_the_released_protocol_of_each_other(
    folder: Path, daemon: Service
) -> None:
    """Neither sees a field or a method that the release has not: the newer of the two may be either."""
    with released_daemon(daemon.address, folder / "old.sock") as passed:
        with engine(folder, f"unix:{folder}/old.sock", model=MODEL) as one:
            stub = engine_pb2_grpc.EngineServiceStub(one.channel)
            (_, cold, first), (_, warm, second) = (collect(stub.Generate(request(PROMPT, 8))) for _ in range(2))
            assert stub.GetStats(engine_pb2.GetStatsRequest()).version == VERSION
        assert cold == warm
        assert (first.usage.cached_tokens, second.usage.cached_tokens > 0) == (0, True)
    assert {"OpenSession", "AttachSession", "AllocatePages"} <= passed


def test_an_older_client_reads_a_newer_daemon_s_answer(daemon: Service) -> None:
    now = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel).GetStats(kvcache_pb2.GetStatsRequest())
    assert now.version == VERSION
    kind = message("GetStatsResponse")
    old = kind.FromString(now.SerializeToString())
    assert (old.epoch, old.budget_bytes) == (now.epoch, now.budget_bytes)
    assert "version" not in kind.DESCRIPTOR.fields_by_name
    assert len(UnknownFieldSet(old)) > 0


def test_a_newer_client_s_unknown_field_is_ignored(daemon: Service) -> None:
    call = daemon.channel.unary_unary(f"/{SERVICE}/GetStats")
    unknown = bytes([0xF8, 0x7F, 0x01])  # field 2047, a varint
    assert kvcache_pb2.GetStatsResponse.FromString(call(unknown)).version == VERSION


def test_a_newer_client_s_unknown_method_is_unimplemented(daemon: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        daemon.channel.unary_unary(f"/{SERVICE}/NotYet")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_newer_client_s_unknown_choice_is_refused_by_name(daemon: Service) -> None:
    """It cannot be ignored: the page would have another shape."""
    layout = kvcache_pb2.PageLayout(page_size=16, layers=1, kv_heads=1, head_dim=64, data_type=99)  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as caught:
        kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel).OpenSession(
            kvcache_pb2.OpenSessionRequest(pool_id="p", layout=layout)
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "data_type" in caught.value.details()
