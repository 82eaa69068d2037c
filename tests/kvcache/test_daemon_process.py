"""The daemon as a process: start, refusal to start, SIGTERM, kill -9 of either side."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.kvcache.api.servicer import SERVICE
from tests.kvcache.conftest import LAYOUT_PB
from tests.polling import until
from tests.processes import ROOT, Service, kvcache

CLIENT = """
import mmap, sys, grpc
from rocmforge.kvcache.v1 import kvcache_pb2 as pb, kvcache_pb2_grpc
from pathlib import Path
import os
from tests.polling import until
stub = kvcache_pb2_grpc.KvCacheServiceStub(grpc.insecure_channel(sys.argv[1]))
layout = pb.PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, data_type=pb.DATA_TYPE_F32)
start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
me = pb.ProcessIdentity(pid=os.getpid(), start_time=start, pid_namespace=os.readlink("/proc/self/ns/pid"))
o = stub.OpenSession(pb.OpenSessionRequest(pool_id="p", layout=layout, pool_pages=8, process=me))
with open(o.arena.file_path, "r+b") as f, mmap.mmap(f.fileno(), o.arena.size_bytes) as m:
    at = o.arena.canary_offset
    c = m[at : at + 32]
    m[at + 32 : at + 64] = bytes(b ^ 255 for b in c)
stub.AttachSession(pb.AttachSessionRequest(session_id=o.session_id, seen=c))
opening = pb.SequenceOpening(sequence_id="a", prompt=pb.Prompt(tokens=range(6)), total_pages=3)
stub.AllocatePages(pb.AllocatePagesRequest(session_id=o.session_id, demands=[pb.Demand(opening=opening)]))
steps = pb.SequenceSteps(sequence_ids=["a"], starts=[0], token_counts=[6], tokens=range(6))
stub.AppendTokens(pb.AppendTokensRequest(session_id=o.session_id, steps=steps))
print("holding", flush=True)
sys.stdin.read()
"""


def stats(service: Service) -> pb.GetStatsResponse:
    return kvcache_pb2_grpc.KvCacheServiceStub(service.channel).GetStats(pb.GetStatsRequest())


def test_pages_of_a_killed_engine_come_back_and_its_complete_ones_stay_warm(tmp_path: Path) -> None:
    # The lease and the drain are far longer than this test may take: only the proof of death can free the pages.
    with kvcache(tmp_path, "--session-ttl", "600", "--drain", "3600") as daemon:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, daemon.address],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/protos:{ROOT}/clients/python"},
        )
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline() == b"holding\n"
        assert stats(daemon).pools[0].held_pages == 3
        client.kill()
        client.wait(30)
        client.stdout.close()
        client.stdin.close()
        until(lambda: stats(daemon).pools[0].free_pages == 7)
        pool = stats(daemon).pools[0]
        assert (pool.cached_pages, pool.held_pages, pool.quarantined_pages) == (1, 0, 0)
        while not (lost := daemon.events("session_lost")):
            assert daemon.process.poll() is None, daemon.log()  # it is logged when the whole sweep is over
        assert [event["client"] for event in lost] == [""]


def test_sigterm_removes_what_the_daemon_made(tmp_path: Path) -> None:
    with kvcache(tmp_path) as daemon:
        opened = kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel).OpenSession(
            pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB, pool_pages=8)
        )
        arena, sock = Path(opened.arena.file_path), tmp_path / "kvcache.sock"
        assert arena.stat().st_mode & 0o777 == 0o600
        assert sock.stat().st_mode & 0o777 == 0o600
        assert arena.parent.stat().st_mode & 0o777 == 0o700
        assert arena.stat().st_blocks * 512 >= opened.arena.size_bytes, "its blocks are reserved"
        assert daemon.stop() == 0
        assert not arena.exists() and not sock.exists()
        assert daemon.events("kvcache_stopped")


def test_a_killed_daemons_arena_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path: Path) -> None:
    def arena_of(service: Service) -> Path:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(service.channel)
        request = pb.OpenSessionRequest(pool_id="p", layout=LAYOUT_PB, pool_pages=8)
        return Path(stub.OpenSession(request).arena.file_path)

    with kvcache(tmp_path, name="living") as living, kvcache(tmp_path, name="killed") as killed:
        kept, stale = arena_of(living), arena_of(killed)
        epoch = stats(killed).epoch
        killed.kill()
        assert stale.exists()
        with kvcache(tmp_path, name="killed") as again:
            assert not stale.exists() and kept.exists()
            assert [event["name"] for event in again.events("stale_arena_removed")] == [stale.name]
            assert stats(again).epoch != epoch


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "12 parsecs"], "--memory 12 parsecs: expected a size"),
        (["--session-ttl", "0"], "--session-ttl 0: expected seconds from 1 to 600"),
        (["--max-sessions", "0"], "--max-sessions 0: expected an integer from 1"),
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0: reachable from other hosts"),
        (["--listen", "nonsense"], "--listen nonsense: expected unix:/path or host:port"),
        (["--tls-cert", "x"], "--tls-cert and --tls-key must be given together"),
        (["--tls-cert", "/proc/none", "--tls-key", "/proc/none"], "--tls-cert: cannot read /proc/none"),
        (["--arena-dir", "/proc/none"], "--arena-dir /proc/none: "),
        (["--metrics", "0.0.0.0:9465"], "--metrics 0.0.0.0:9465: reachable from other hosts"),
        (["--metrics", "192.0.2.1:9465", "--insecure"], "--metrics 192.0.2.1:9465: cannot bind"),
    ],
)
def test_bad_settings_end_with_one_sentence_and_status_2(tmp_path: Path, flags: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.kvcache", "--listen", f"unix:{tmp_path}/k.sock", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"rocmforge kvcache: {words}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "kvcache_stopped" not in done.stderr


def refused(directory: Path, *flags: str) -> str:
    """What a daemon that cannot start says on stderr, the events of its log aside."""
    done = subprocess.run(
        [sys.executable, "-m", "services.kvcache", *flags, "--arena-dir", str(directory / "other")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith('{"'))


def test_a_port_or_socket_in_use_is_refused_and_its_owner_unharmed(tmp_path: Path) -> None:
    """In one line, and without those of gRPC's own log."""
    with socket.create_server(("127.0.0.1", 0)) as taken, kvcache(tmp_path) as owner:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            listen = f"{host}:{port}"
            said = refused(tmp_path, "--listen", listen, "--insecure")
            assert said == f"rocmforge kvcache: --listen {listen}: the port is in use"
        said = refused(tmp_path, "--listen", owner.address)
        assert said == f"rocmforge kvcache: --listen {owner.address}: another server is listening there"
        assert stats(owner).epoch


def test_a_port_that_others_share_is_in_use(tmp_path: Path) -> None:
    """With SO_REUSEPORT, which would give us every other of the owner's connections, or the owner ours."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refused(tmp_path, "--listen", listen) == f"rocmforge kvcache: --listen {listen}: the port is in use"


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("192.0.2.1:50055", "cannot bind: Cannot assign requested address"),
        ("no-such-host.invalid:50055", "no-such-host.invalid: "),
    ],
)
def test_an_address_of_another_host_is_refused(tmp_path: Path, listen: str, why: str) -> None:
    [said] = refused(tmp_path, "--insecure", "--listen", listen).splitlines()
    assert said.startswith(f"rocmforge kvcache: --listen {listen}: {why}")


def test_settings_come_from_the_environment_too_and_unknown_ones_are_told(tmp_path: Path) -> None:
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "services.kvcache"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
        )

    assert "ROCMFORGE_KVCACHE_MEMORY much: expected a size" in run(ROCMFORGE_KVCACHE_MEMORY="much").stderr
    assert "ROCMFORGE_KVCACHE_MEMROY: no such setting" in run(ROCMFORGE_KVCACHE_MEMROY="1GiB").stderr


def test_health_and_reflection(tmp_path: Path) -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    from services.common.edge.reflection import MAX_REQUESTS, V1, V1ALPHA

    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with kvcache(tmp_path) as daemon:
        daemon.wait_serving(SERVICE)
        for version in (V1, V1ALPHA):
            ask = daemon.channel.stream_stream(
                f"/{version}/ServerReflectionInfo",
                request_serializer=lambda message: message.SerializeToString() if message else b"\xff",
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            [unreadable, answer] = ask(iter([None, request]), timeout=60)
            assert unreadable.error_response.error_code == 3
            names = {service.name for service in answer.list_services_response.service}
            assert names == {SERVICE, "grpc.health.v1.Health", V1, V1ALPHA}
            answers, answered = ask(iter([request] * (MAX_REQUESTS + 1)), timeout=60), 0
            with pytest.raises(grpc.RpcError) as ended:
                for _ in answers:
                    answered += 1
            assert (ended.value.code(), answered) == (grpc.StatusCode.RESOURCE_EXHAUSTED, MAX_REQUESTS)
    assert "Traceback" not in daemon.log()


def test_beyond_this_host_only_with_mutual_tls(tmp_path: Path) -> None:
    import trustme

    authority, stranger = trustme.CA(), trustme.CA()
    cert = authority.issue_cert("localhost", "127.0.0.1")
    files = {"ca": authority.cert_pem, "cert": cert.cert_chain_pems[0], "key": cert.private_key_pem}
    for name, pem in files.items():
        pem.write_to_path(str(tmp_path / name))
    flags = ["--tls-cert", "cert", "--tls-key", "key", "--tls-client-ca", "ca"]
    flags = [flag if flag.startswith("--") else str(tmp_path / flag) for flag in flags]
    allowed = ["--allow", "viewer=cn:client@example.org"]
    with kvcache(tmp_path, "--listen", "0.0.0.0:0", *flags, *allowed) as daemon:
        port = daemon.tcp().rpartition(":")[2]

        def ask(issuer: trustme.CA | None) -> int:
            client = issuer.issue_cert("client@example.org") if issuer else None
            credentials = grpc.ssl_channel_credentials(
                authority.cert_pem.bytes(),
                client.private_key_pem.bytes() if client else None,
                client.cert_chain_pems[0].bytes() if client else None,
            )
            with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
                stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
                return int(stub.GetStats(pb.GetStatsRequest(), timeout=60).budget_bytes)

        assert ask(authority) == 256 * 2**20
        for other in (None, stranger):
            with pytest.raises(grpc.RpcError):
                ask(other)
        with grpc.insecure_channel(f"localhost:{port}") as channel, pytest.raises(grpc.RpcError):
            kvcache_pb2_grpc.KvCacheServiceStub(channel).GetStats(pb.GetStatsRequest(), timeout=60)
