"""Roles and limits that change while a daemon runs, with engines that are other users of the machine.

Each is a real process. The daemon reads its file again at SIGHUP.
"""

from __future__ import annotations

import base64
import mmap
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.edge.unix_sockets import guest_socket
from tests.kvcache.clients.stranger import Stranger
from tests.kvcache.conftest import LAYOUT_PB
from tests.polling import until
from tests.processes import Service, kvcache

TENANT, RIVAL = 3000, 3001
LAYOUT = json_format.MessageToDict(LAYOUT_PB)
WAIT_S = 60.0

pytestmark = pytest.mark.needs("other-users")


@dataclass
class House:
    """A daemon whose settings are in a file, and the ways in."""

    daemon: Service
    settings: Path

    def address(self, uid: int) -> str:
        return f"unix:{guest_socket(Path(self.daemon.address.removeprefix('unix:')), uid)}"

    def socket(self, uid: int) -> Path:
        return Path(self.address(uid).removeprefix("unix:"))

    def allow(self, *allowed: str, more: str = "") -> None:
        """Have the daemon read the roles that there are to be, and wait until it has."""
        before = len(self.daemon.events("settings_read"))
        self.write(*allowed, more=more)
        self.daemon.process.send_signal(signal.SIGHUP)
        until(lambda: len(self.daemon.events("settings_read")) > before, self.daemon.log)

    def write(self, *allowed: str, more: str = "") -> None:
        self.settings.write_text(f"allow = {list(allowed)!r}\nmemory = '1MiB'\n{more}")

    @property
    def stub(self) -> Any:
        return kvcache_pb2_grpc.KvCacheServiceStub(self.daemon.channel)

    def stats(self) -> pb.GetStatsResponse:
        found: pb.GetStatsResponse = self.stub.GetStats(pb.GetStatsRequest(), timeout=30)
        return found


@pytest.fixture
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        os.chmod(name, 0o711)
        settings = Path(name) / "settings.toml"
        settings.write_text(f"allow = ['engine=uid:{TENANT}']\nmemory = '1MiB'\n")
        with kvcache(Path(name), "--config", str(settings)) as daemon:
            yield House(daemon, settings)
            assert not daemon.events("sweep_failed")


def opened(user: Stranger, ttl_s: int = 600) -> dict[str, Any]:
    """A session of another user's, attached by root's hands in its name. Nobody renews it but by its calls."""
    process = {"pid": user.pid, "startTime": user.start_time, "pidNamespace": os.readlink("/proc/self/ns/pid")}
    session = user.ask("OpenSession", poolId="pool", layout=LAYOUT, poolPages=16, process=process, ttl=f"{ttl_s}s")
    with open(session["arena"]["filePath"], "r+b") as file:
        size = int(session["arena"]["sizeBytes"])
        with mmap.mmap(file.fileno(), size) as arena:
            at = int(session["arena"]["canaryOffset"])
            canary = arena[at : at + 32]
            arena[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
    answer = user.ask("AttachSession", sessionId=session["sessionId"], seen=base64.b64encode(canary).decode())
    assert "code" not in answer, answer
    return session


def allocated(user: Stranger, session: str, pages: int, name: str = "a") -> dict[str, Any]:
    opening = {"sequenceId": name, "prompt": {"tokens": [1, 2, 3]}, "totalPages": pages}
    return user.ask("AllocatePages", sessionId=session, demands=[{"opening": opening}])


def test_a_user_with_a_new_role_comes_in_and_one_without_is_shut_out(house: House) -> None:
    assert not house.socket(RIVAL).exists()
    house.allow(f"engine=uid:{TENANT}", f"viewer=uid:{RIVAL}")
    with Stranger(RIVAL, house.address(RIVAL)) as rival:
        assert "code" not in rival.ask("GetStats")
        assert rival.ask("OpenSession", poolId="pool", layout=LAYOUT)["reason"] == "ROLE_MISSING"
        house.allow(f"engine=uid:{TENANT}", f"engine=uid:{RIVAL}")
        assert rival.ask("GetStats")["reason"] == "ROLE_MISSING", "a role that it has lost"
        assert "code" not in opened(rival), "and one that it has got"
        house.allow(f"engine=uid:{TENANT}")
        assert rival.ask("OpenSession", poolId="pool", layout=LAYOUT)["reason"] == "ROLE_MISSING"
    # It ended without a word, and its sessions with it: nothing keeps the socket.
    until(lambda: not house.socket(RIVAL).exists(), "the socket stays")
    with Stranger(RIVAL, house.address(RIVAL)) as rival:
        assert rival.ask("GetStats")["code"] == "UNAVAILABLE"
    with Stranger(TENANT, house.address(TENANT)) as tenant:
        assert "code" not in opened(tenant), "nothing has ended for the others"


def test_the_sessions_of_who_has_lost_its_role_end_as_of_an_engine_that_is_silent(house: House) -> None:
    """With their leases, and into quarantine: it may be in a step. Its word frees its pages, without a role too."""
    with Stranger(TENANT, house.address(TENANT)) as tenant:
        session = opened(tenant, ttl_s=5)
        path = Path(session["arena"]["filePath"])
        assert "error" not in str(allocated(tenant, session["sessionId"], 5))
        house.allow(f"engine=uid:{RIVAL}")
        for method, body in (("RenewSession", {}), ("RemoveSequences", {"sequenceIds": ["a"]})):
            refused = tenant.ask(method, sessionId=session["sessionId"], **body)
            assert (refused["code"], refused["reason"]) == ("PERMISSION_DENIED", "ROLE_MISSING"), method
        [told] = house.daemon.events("session_without_role")
        assert (told["owner"], told["session"]) == (f"uid:{TENANT}", session["sessionHandle"])
        until(lambda: house.stats().lost_sessions, "its lease goes on")
        [pool] = house.stats().pools
        assert (pool.quarantined_pages, pool.held_pages, pool.sessions) == (5, 0, 0)
        assert not tenant.may_open(path), "who has it mapped keeps it, and nobody maps it anew"
        assert house.socket(TENANT).exists(), "it has something to close"
        unknown = tenant.ask("CloseSession", sessionId=session["sessionId"][:17] + 32 * "0")
        assert unknown["reason"] == "ROLE_MISSING"
        assert tenant.ask("CloseSession", sessionId=session["sessionId"])["closed"]
        [pool] = house.stats().pools
        assert (pool.quarantined_pages, pool.free_pages) == (0, 16)
    until(lambda: not house.socket(TENANT).exists(), "the socket stays")
    assert not list(house.stub.Fsck(pb.FsckRequest()).violations)


def test_a_stream_ends_with_the_role_to_read_it(house: House) -> None:
    house.allow(f"engine=uid:{TENANT}", f"viewer=uid:{RIVAL}")
    with grpc.insecure_channel(house.address(RIVAL)) as channel:  # as root, who may connect anywhere
        stream = kvcache_pb2_grpc.KvCacheServiceStub(channel).WatchEvents(pb.WatchEventsRequest(), timeout=WAIT_S)
        assert next(stream).HasField("reset")
        house.allow(f"engine=uid:{TENANT}", f"engine=uid:{RIVAL}")
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
    assert rpc.error_from(ended.value).metadata == {"identity": f"uid:{RIVAL}", "role": "viewer"}


def test_roles_that_cannot_be_given_change_nothing(house: House) -> None:
    """The first one could be: all or none."""
    taken = house.socket(RIVAL)
    taken.mkdir()
    house.write(f"viewer=uid:{TENANT}", "viewer=uid:2999", f"viewer=uid:{RIVAL}", more="drain = 7\n")
    house.daemon.process.send_signal(signal.SIGHUP)
    [kept] = until(lambda: house.daemon.events("settings_kept"), house.daemon.log)
    assert f"{taken}: exists and is not a socket" in kept["detail"]
    assert not house.daemon.events("settings_read") and not house.socket(2999).exists()
    with Stranger(TENANT, house.address(TENANT)) as tenant:
        assert tenant.ask("GetStats")["role"] == "viewer"
        assert "code" not in opened(tenant)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("host-memory = 1", "--host-memory is 1 bytes"),
        ("memory = '100000TiB'", "--memory"),
        ("identity-share = 2", "identity-share"),
        ("allow = ['king=uid:0']", "allow"),
    ],
)
def test_a_bad_value_keeps_all_the_others_as_they_were(house: House, line: str, detail: str) -> None:
    house.settings.write_text(f"identity-unattached = 1\n{line}\n")
    house.daemon.process.send_signal(signal.SIGHUP)
    [kept] = until(lambda: house.daemon.events("settings_kept"), house.daemon.log)
    assert detail in kept["detail"]
    with Stranger(TENANT, house.address(TENANT)) as tenant:
        for _ in range(2):
            assert "code" not in tenant.ask("OpenSession", poolId="pool", layout=LAYOUT, poolPages=16)


def test_limits_of_identities_count_from_the_next_call_on(house: House) -> None:
    allowed = f"engine=uid:{TENANT}"
    with Stranger(TENANT, house.address(TENANT)) as tenant:
        first = opened(tenant)
        house.allow(allowed, more="identity-sessions = 1\n")
        refused = tenant.ask("OpenSession", poolId="pool", layout=LAYOUT, poolPages=16)
        assert (refused["reason"], refused["limit"]) == ("TOO_MANY_SESSIONS", "1")
        assert "code" not in tenant.ask("RenewSession", sessionId=first["sessionId"]), "what there is stays"
        house.allow(allowed, more="identity-pools = 1\n")
        assert tenant.ask("OpenSession", poolId="two", layout=LAYOUT, poolPages=16)["reason"] == "TOO_MANY_POOLS"
        house.allow(allowed, more="identity-share = 0.1\n")
        assert tenant.ask("OpenSession", poolId="two", layout=LAYOUT, poolPages=2000)["reason"] == "EXCEEDS_SHARE"
        house.allow(allowed, more="max-sequences = 1\n")
        assert "error" not in str(allocated(tenant, first["sessionId"], 1, "a"))
        assert "TOO_MANY_SEQUENCES" in str(allocated(tenant, first["sessionId"], 1, "b"))
        floor = 65536 * 256 + 256 * 1280
        house.allow(allowed, more=f"host-memory = {floor + 8192}\n")
        assert "HOST_MEMORY_EXCEEDED" in str(allocated(tenant, first["sessionId"], 16, "a"))
        house.allow(allowed)
        assert "error" not in str(allocated(tenant, first["sessionId"], 16, "a"))
        assert not list(house.stub.Fsck(pb.FsckRequest()).violations)
