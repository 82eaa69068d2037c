"""Roles of callers, in this process: root may connect to any user's socket and counts as that user there."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.access.identity import CALLER, Identity
from services.common.access.policy import Policy
from services.common.edge.unix_sockets import guest_socket
from services.common.errors import RoleMissing, ServiceError
from services.kvcache.api.roles import ENGINE, INCLUDES, NEEDED, OPERATOR, VIEWER, role_allowance
from tests.kvcache.conftest import LAYOUT_PB, Running

SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"]
USERS = {3000: ENGINE, 3001: ENGINE, 3002: VIEWER, 3003: OPERATOR}


class Users:
    """A daemon, and a channel for each user."""

    def __init__(self, directory: Path, *flags: str) -> None:
        allowed = [word for uid, role in USERS.items() for word in ("--allow", f"{role}=uid:{uid}")]
        self.running = Running(directory, *allowed, *flags)
        socket = Path(f"{directory}/k.sock")
        self._channels = {uid: grpc.insecure_channel(f"unix:{guest_socket(socket, uid)}") for uid in USERS}

    def stub(self, uid: int) -> Any:
        return kvcache_pb2_grpc.KvCacheServiceStub(self._channels[uid])

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self.running.close()


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users may pass through, which pytest's own is not in."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture
def users(reachable: Path) -> Iterator[Users]:
    one = Users(reachable)
    yield one
    one.close()


def refusal(stub: Any, method: str, request: Any = None) -> ServiceError | None:
    """The error of a call, by default with an empty request; None if it succeeds."""
    request = getattr(pb, SERVICE.methods_by_name[method].input_type.name)() if request is None else request
    try:
        answer = getattr(stub, method)(request, timeout=30)
        if SERVICE.methods_by_name[method].server_streaming:
            next(answer)
            answer.cancel()
    except grpc.RpcError as failure:
        return rpc.error_from(failure)
    return None


@pytest.mark.needs("other-users")
def test_every_call_needs_its_role(users: Users) -> None:
    assert set(NEEDED) == {method.name for method in SERVICE.methods}
    for uid, role in USERS.items():
        for method, needed in NEEDED.items():
            error = refusal(users.stub(uid), method)
            allowed = needed in {role, *INCLUDES[role]}
            assert isinstance(error, RoleMissing) != allowed, (uid, method, error)
            if isinstance(error, RoleMissing):
                assert error.code == "PERMISSION_DENIED"
                assert error.metadata == {"identity": f"uid:{uid}", "role": needed}
                assert f"--allow {needed}=uid:{uid}" in error.message
    for method in NEEDED:
        assert not isinstance(refusal(users.running.stub, method), RoleMissing), "the owner may do all"


@pytest.mark.needs("other-users")
def test_a_viewer_watches_without_tokens(users: Users) -> None:
    request = pb.WatchEventsRequest(include_tokens=True)
    refused = refusal(users.stub(3002), "WatchEvents", request)
    assert isinstance(refused, RoleMissing) and OPERATOR in refused.message
    assert refusal(users.stub(3003), "WatchEvents", request) is None
    assert refusal(users.stub(3002), "WatchEvents") is None


@pytest.mark.needs("other-users")
def test_calls_in_flight_are_limited_by_identity(reachable: Path) -> None:
    users = Users(reachable, "--identity-calls", "3")
    try:
        streams = [users.stub(3002).WatchEvents(pb.WatchEventsRequest()) for _ in range(3)]
        for stream in streams:
            next(stream)
        error = refusal(users.stub(3002), "GetStats")
        assert error is not None and error.reason == "TOO_MANY_CALLS" and error.retry_after_s == 0.1
        assert error.metadata == {"identity": "uid:3002", "limit": "3"}
        assert refusal(users.stub(3003), "GetStats") is None, "others have their own"
        done = threading.Event()
        streams[0].add_callback(done.set)
        streams[0].cancel()
        assert done.wait(30)
        # The server hears of it a moment later than the client.
        while (error := refusal(users.stub(3002), "GetStats")) is not None:
            assert error.reason == "TOO_MANY_CALLS"
        for stream in streams[1:]:
            stream.cancel()
    finally:
        users.close()


@pytest.mark.needs("other-users")
def test_pools_are_shared_only_when_told(users: Users, reachable: Path) -> None:
    def opened(among: Users, uid: int) -> str:
        request = pb.OpenSessionRequest(pool_id="pool", layout=LAYOUT_PB, pool_pages=4)
        return str(among.stub(uid).OpenSession(request).pool_id)

    assert [opened(users, uid) for uid in (3000, 3001)] == ["pool/uid:3000", "pool/uid:3001"]
    assert (
        users.running.stub.OpenSession(pb.OpenSessionRequest(pool_id="pool", layout=LAYOUT_PB, pool_pages=4)).pool_id
        == "pool"
    )
    (reachable / "shared").mkdir(mode=0o711)
    sharing = Users(reachable / "shared", "--shared-pools")
    try:
        assert [opened(sharing, uid) for uid in (3000, 3001)] == ["pool", "pool"]
    finally:
        sharing.close()


@pytest.mark.needs("other-users")
def test_too_many_pools_and_too_large_ones_name_the_identity(reachable: Path) -> None:
    users = Users(reachable, "--identity-pools", "2")

    def opening(name: str, pages: int) -> ServiceError | None:
        request = pb.OpenSessionRequest(pool_id=name, layout=LAYOUT_PB, pool_pages=pages)
        return refusal(users.stub(3000), "OpenSession", request)

    try:
        large = opening("a", 5000)
        assert large is not None and (large.reason, large.field) == ("EXCEEDS_SHARE", "pool_pages")
        assert large.metadata["limit"] == str(1 << 19), "half of the budget, since several may open sessions"
        assert opening("a", 1) is opening("b", 1) is None
        many = opening("c", 1)
        assert many is not None and many.reason == "TOO_MANY_POOLS"
        assert many.metadata == {"identity": "uid:3000", "limit": "2"}
    finally:
        users.close()


def test_a_policy_gives_what_it_is_told_and_no_more() -> None:
    owner, other = Identity.of_uid(1), Identity.of_uid(2)
    policy = Policy(owner, [role_allowance("operator=uid:2"), role_allowance("viewer=cn:a=b")], INCLUDES)
    assert all(policy.has(owner, role) for role in INCLUDES)
    assert (policy.has(other, OPERATOR), policy.has(other, VIEWER), policy.has(other, ENGINE)) == (True, True, False)
    assert policy.guests == [2] and policy.holders(ENGINE) == [owner]
    CALLER.set(Identity.parse("cn:a=b"))
    assert policy.require(VIEWER) == "cn:a=b"
    with pytest.raises(RoleMissing, match="needs the role engine, which cn:a=b does not have"):
        policy.require(ENGINE)


@pytest.mark.parametrize("text", ["", "engine", "root=uid:1", "engine=", "engine=bob", "viewer=uid:1,uid:2"])
def test_a_role_for_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        role_allowance(text)
