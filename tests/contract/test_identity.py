"""Who calls, as a servicer sees it: what the transport shows, and nothing that a request says."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health

from services.common.access.identity import ANYONE, CALLER, Identity
from services.common.call_stats import CallStats
from services.common.edge.listener import Listener
from services.common.edge.tls import Tls
from services.common.edge.unix_sockets import guest_socket
from services.common.errors import InvalidConfiguration
from services.common.serving import Serving

WHO = "test.Who"


def register(server: Any) -> None:
    """A service whose answer is the identity seen, after other calls had their turn; and the same as a stream."""

    async def who(request: bytes, context: Any) -> bytes:
        seen = str(CALLER.get()).encode()
        await asyncio.sleep(0)
        return seen if seen == str(CALLER.get()).encode() else b"changed"

    async def watch(request: bytes, context: Any) -> Any:
        yield str(CALLER.get()).encode()

    handlers = {
        "Who": grpc.unary_unary_rpc_method_handler(who, bytes, bytes),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, bytes, bytes),
    }
    server.add_registered_method_handlers(WHO, handlers)


async def seen_by(serving: Serving, *channels: Any) -> list[set[str]]:
    """Which identity the service sees on each channel, in eight calls at a time and in a stream."""
    serving.add(register, CallStats())
    await serving.start()
    try:
        opened = [make(serving.bound[at]) for at, make in enumerate(channels)]
        calls = [channel.unary_unary(f"/{WHO}/Who") for channel in opened for _ in range(8)]
        answers = await asyncio.gather(*(call(b"") for call in calls))
        streamed = [[one async for one in channel.unary_stream(f"/{WHO}/Watch")(b"")] for channel in opened]
        for channel in opened:
            await channel.close()
    finally:
        await serving.drain(0)
    return [
        {answer.decode() for answer in [*answers[8 * at : 8 * at + 8], *streamed[at]]} for at in range(len(channels))
    ]


def test_the_socket_shows_the_uid_and_plain_tcp_shows_nothing(tmp_path: Path) -> None:
    serving = Serving(health.SERVICE_NAME, [Listener(path=tmp_path / "k.sock"), Listener(host="127.0.0.1")])
    found = asyncio.run(seen_by(serving, grpc.aio.insecure_channel, grpc.aio.insecure_channel))
    assert found == [{f"uid:{os.geteuid()}"}, {"anyone"}]


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users may pass through."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.mark.needs("other-users")
def test_guests_are_admitted_all_or_none(reachable: Path) -> None:
    listener = reachable / "k.sock"
    first, taken = guest_socket(listener, 2998), guest_socket(listener, 2999)

    async def admitted() -> None:
        serving = Serving(health.SERVICE_NAME, [Listener(path=listener)])
        serving.add(register, CallStats())
        await serving.start()
        try:
            taken.mkdir()
            with pytest.raises(InvalidConfiguration, match="exists and is not a socket"):
                serving.admit([2998, 2999])
            assert not first.exists() and serving.guests == []
            assert serving.bound == [f"unix:{listener}"]
            taken.rmdir()
            serving.admit([2998, 2999])
            assert first.exists() and taken.exists()
        finally:
            await serving.drain(0)

    asyncio.run(admitted())


def certificate(ca: trustme.CA, folder: Path, name: str, common_name: str | None) -> Tls:
    """A certificate of the CA in files."""
    made = ca.issue_cert(name, common_name=common_name)
    made.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
    made.private_key_pem.write_to_path(folder / f"{name}.key")
    ca.cert_pem.write_to_path(folder / "ca.crt")
    return Tls(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")


@pytest.mark.parametrize(
    ("name", "common_name", "mutual", "seen"),
    [
        ("alice.example", "engine-1", True, "cn:engine-1"),
        ("alice.example", None, True, "cn:alice.example"),
        ("alice.example", "a,b", True, "anyone"),  # no policy can name it
        ("alice.example", "uid:0", True, "cn:uid:0"),
        ("alice.example", "engine-1", False, "anyone"),
    ],
)
def test_mutual_tls_shows_the_certificates_name(
    tmp_path: Path, name: str, common_name: str | None, mutual: bool, seen: str
) -> None:
    ca = trustme.CA()
    server, client = certificate(ca, tmp_path, "127.0.0.1", None), certificate(ca, tmp_path, name, common_name)
    assert server.client_ca and client.client_ca
    credentials = grpc.ssl_channel_credentials(
        client.client_ca.read_bytes(), client.key.read_bytes(), client.cert.read_bytes()
    )
    tls = server if mutual else Tls(server.cert, server.key)
    serving = Serving(health.SERVICE_NAME, [Listener(host="127.0.0.1")], tls=tls)
    [found] = asyncio.run(seen_by(serving, lambda address: grpc.aio.secure_channel(address, credentials)))
    assert found == {seen}


@pytest.mark.parametrize("text", ["uid:0", "uid:4294967294", "cn:engine 1", "cn:a:b", "token:gateway", "anyone"])
def test_an_identity_is_written_one_way(text: str) -> None:
    assert str(Identity.parse(text)) == text


def test_an_identity_that_nobody_can_have_is_refused() -> None:
    for text in ("", "uid:", "uid:-1", "uid:4294967295", "uid:x", "root", "cn:", "cn:a,b", "cn:a\nb", "Anyone"):
        with pytest.raises(ValueError, match="expected uid:NUMBER"):
            Identity.parse(text)
    assert Identity.parse("uid:007") == Identity.of_uid(7)
    assert Identity.of_uid(7).uid == 7
    assert ANYONE.uid is Identity.of_token("t").uid is None
