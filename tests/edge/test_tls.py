"""TLS between the services and their clients, and certificates that change while they run."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from rocmforge.client import cache
from rocmforge.client.transport.tls import ClientTls
from services.common.edge.tls import Tls
from services.common.errors import InvalidConfiguration, KvCacheDown
from services.engine import cli
from services.engine.config import Config
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import PageLayout
from tests.edge.certificates import Pair, issued
from tests.engine.running import RunningEngine
from tests.kvcache.conftest import Running
from tests.processes import kvcache

GEOMETRY = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="f32")


@contextlib.contextmanager
def daemon(folder: Path, *flags: str) -> Iterator[str]:
    """A daemon in this process, with a port for TLS; its TCP address."""
    one = Running(folder, "--listen", "127.0.0.1:0", *flags)
    try:
        yield one.daemon.bound[1]
    finally:
        one.close()


def greets(address: str, ca: Path, own: Pair | None = None) -> bool:
    """Whether a new client that trusts ``ca``, with a certificate of its own, is answered."""
    tls = ClientTls(ca, own.cert, own.key) if own else ClientTls(ca)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(address, tls.credentials(), options=options) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
    return True


# --- a listener's certificates ----------------------------------------------------------------------------------------


def test_a_renewed_certificate_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    own, other = issued(tmp_path, "own"), issued(tmp_path, "other")
    before = tmp_path / "before.ca"
    before.write_bytes(own.ca.read_bytes())
    with daemon(tmp_path, *own.serving()) as address:
        with grpc.secure_channel(address, ClientTls(own.ca).credentials()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            own.become(other)
            assert greets(address, other.ca)
            assert not greets(address, before)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=30)  # who is connected stays so


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_a_broken_file_keeps_the_certificates_and_is_logged_once(tmp_path: Path, broken: str) -> None:
    authority = trustme.CA()
    own, client = issued(tmp_path, "own", authority=authority), issued(tmp_path, "client", authority=authority)
    trust = tmp_path / "trust.ca"
    trust.write_bytes(own.ca.read_bytes())
    with daemon(tmp_path, *own.serving(own.ca)) as address, capture_logs() as logs:
        # Between the two writes of a renewal the certificate and the key do not match.
        text = issued(tmp_path, "other").key.read_text() if broken == "key" else "no certificate"
        getattr(own, broken).write_text(text)
        assert greets(address, trust, client) and greets(address, trust, client)
    [told] = [one for one in logs if one["event"] == "certificates_kept"]
    assert str(getattr(own, broken)) in told["detail"] and told["log_level"] == "error"


def test_another_ca_of_clients_counts_too(tmp_path: Path) -> None:
    own, old, new = (issued(tmp_path, name) for name in ("own", "old", "new"))
    clients = tmp_path / "clients.ca"
    clients.write_bytes(old.ca.read_bytes())
    with daemon(tmp_path, *own.serving(clients)) as address:
        assert greets(address, own.ca, old) and not greets(address, own.ca, new) and not greets(address, own.ca)
        clients.write_bytes(new.ca.read_bytes())
        assert greets(address, own.ca, new) and not greets(address, own.ca, old)


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_a_service_does_not_start_with_files_that_it_cannot_use(tmp_path: Path, broken: str) -> None:
    own = issued(tmp_path, "own")
    getattr(own, broken).write_text("no certificate")
    flag = "--tls-client-ca" if broken == "ca" else "--tls-cert"
    with pytest.raises(InvalidConfiguration, match=f"^{flag}: .*{getattr(own, broken)}"):
        Tls(own.cert, own.key, own.ca).credentials()


def test_services_speak_tls_1_3_and_nothing_older(tmp_path: Path) -> None:
    own = issued(tmp_path, "own")
    with kvcache(tmp_path, "--listen", "127.0.0.1:0", *own.serving()) as service:
        host, _, port = service.tcp().rpartition(":")

        def spoken(version: ssl.TLSVersion) -> str | None:
            context = ssl.create_default_context(cafile=own.ca)
            context.maximum_version = version
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection((host, int(port)), timeout=60) as plain,
                context.wrap_socket(plain, server_hostname=host) as wrapped,
            ):
                return wrapped.version()

        assert spoken(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises(OSError, match=r"EOF|alert|reset|closed"):
            spoken(ssl.TLSVersion.TLSv1_2)


# --- the engine and its daemon ----------------------------------------------------------------------------------------


def opens(address: str, tls: ClientTls | None) -> None:
    """Open a session as the engine does."""
    source = GrpcPageSource(address, "pool", GEOMETRY, pool_pages=4, tls=tls)
    try:
        source.reopen()
        assert source.total_pages == 4
    finally:
        source.close()


def test_an_engine_speaks_mutual_tls_to_its_daemon(tmp_path: Path) -> None:
    own, client = issued(tmp_path, "own"), issued(tmp_path, "client", common="engine")
    stranger = issued(tmp_path, "stranger", common="engine")
    with daemon(tmp_path, *own.serving(client.ca), *allowed("cn:engine")) as address:
        opens(address, ClientTls(own.ca, client.cert, client.key))
        for wrong in (
            ClientTls(own.ca),
            ClientTls(own.ca, stranger.cert, stranger.key),
            ClientTls(stranger.ca, client.cert, client.key),
            None,
        ):
            with pytest.raises(KvCacheDown):
                opens(address, wrong)


def test_the_daemons_host_name_is_checked(tmp_path: Path) -> None:
    own = issued(tmp_path, "own", "kvcache.internal")
    client = issued(tmp_path, "client", common="engine")
    with daemon(tmp_path, *own.serving(client.ca), *allowed("cn:engine")) as address:
        with pytest.raises(KvCacheDown, match=r"(?i)hostname|peer name"):
            opens(address, ClientTls(own.ca, client.cert, client.key))
        opens(address, ClientTls(own.ca, client.cert, client.key, name="kvcache.internal"))


def test_an_engine_takes_up_files_that_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_CALL_S", 60.0)  # a busy machine may take longer than an engine waits
    own, client = issued(tmp_path, "own"), issued(tmp_path, "client", common="engine")
    wrong = issued(tmp_path, "wrong")
    with daemon(tmp_path, *own.serving(client.ca), *allowed("cn:engine")) as address:
        tls = ClientTls(wrong.ca, wrong.cert, wrong.key)
        source = GrpcPageSource(address, "pool", GEOMETRY, pool_pages=4, tls=tls)
        with pytest.raises(KvCacheDown):
            source.reopen()
        wrong.key.write_text("no key")  # not whole yet: the old channel stays
        with pytest.raises(KvCacheDown):
            source.reopen()
        wrong.cert.write_bytes(client.cert.read_bytes())
        wrong.key.write_bytes(client.key.read_bytes())
        wrong.ca.write_bytes(own.ca.read_bytes())
        for _ in range(2):  # the first call finds the old channel out
            with contextlib.suppress(KvCacheDown):
                source.reopen()
        assert source.total_pages == 4
        source.close()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--kvcache-cert", "CERT"], "--kvcache-cert and --kvcache-key must be given together"),
        (["--kvcache-cert", "CERT", "--kvcache-key", "KEY"], "--kvcache-cert needs --kvcache-ca"),
        (
            ["--kvcache-ca", "CA", "--kvcache", "unix:/run/k.sock"],
            "--kvcache-ca: --kvcache unix:/run/k.sock is",
        ),
        (["--kvcache-ca", "CA", "--kvcache", "local"], "--kvcache-ca: --kvcache local is not a TCP"),
        (["--kvcache-ca", "/proc/none"], "--kvcache-ca: cannot read /proc/none"),
        (["--kvcache-ca", "KEY"], "--kvcache-ca: KEY has no PEM certificate"),
        (
            ["--kvcache-ca", "CA", "--kvcache-cert", "KEY", "--kvcache-key", "CERT"],
            "--kvcache-cert: KEY and CERT are",
        ),
        (["--kvcache-name", "kvcache.internal"], "--kvcache-name needs --kvcache-ca"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, flags: list[str], problem: str) -> None:
    own = issued(tmp_path, "own")
    files = {"CERT": str(own.cert), "KEY": str(own.key), "CA": str(own.ca)}
    with pytest.raises(InvalidConfiguration) as caught:
        Config.read(["--kvcache", "127.0.0.1:1", *(files.get(flag, flag) for flag in flags)], {})
    for name, path in files.items():
        problem = problem.replace(f" {name} ", f" {path} ")
    assert problem.replace(": KEY", f": {own.key}") in caught.value.message


# --- commands ---------------------------------------------------------------------------------------------------------


def test_commands_speak_mutual_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, client = issued(tmp_path, "own"), issued(tmp_path, "client", common="someone")
    engine = RunningEngine(tmp_path, "--listen", "127.0.0.1:0", *own.serving(client.ca)).start()
    target = ["--target", engine.engine.bound[1]]
    shown = ["--ca", str(own.ca), "--cert", str(client.cert), "--key", str(client.key)]
    try:
        for words in (["status"], ["generate", "ROMEO:", "--max-tokens", "2"], ["models"], ["status", "--wait", "30"]):
            assert cli.run(words[0], [*words[1:], *target, *shown]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert cli.run("status", [*target, *shown[:2]]) == 1
        assert cli.run("status", target) == 1
        assert cli.run("status", [*target, *shown, "--name", "elsewhere"]) == 1
        assert cli.run("status", [*target, *shown[2:]]) == 1
        assert "--cert needs --ca" in capsys.readouterr().err
        assert cli.run("status", ["--target", engine.address, *shown]) == 1
        assert "is not a TCP address" in capsys.readouterr().err
        bench = ["--requests", "2"]
        assert cli.run("bench", [*bench, *target, *shown]) == 0, capsys.readouterr().err
    finally:
        engine.close()


def allowed(*identities: Any) -> list[str]:
    """The flags with which a daemon lets these open sessions."""
    return [flag for one in identities for flag in ("--allow", f"engine={one}")]
