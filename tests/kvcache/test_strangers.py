"""Other users of the machine, as processes of theirs, against a daemon and a tenant whose pages are in it.

The tenant is uid 3000. Each test is something that anybody could do through the loopback port that there once was.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import subprocess
import sys
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
from services.healthcheck import wait_serving
from tests.kvcache.clients.stranger import Stranger
from tests.kvcache.conftest import LAYOUT_PB
from tests.processes import ROOT, START_S, Service, kvcache

TENANT, RIVAL, VIEWER, NOBODY = 3000, 3001, 3002, 3999
PROMPT = list(range(1, 18))
LAYOUT = json_format.MessageToDict(LAYOUT_PB)

pytestmark = pytest.mark.needs("other-users")


@dataclass
class House:
    """A daemon, and the tenant's session in it."""

    daemon: Service
    tenant: Any
    session: str
    tcp: str

    def address(self, uid: int) -> str:
        return f"unix:{guest_socket(Path(self.daemon.address.removeprefix('unix:')), uid)}"

    def tokens(self) -> list[int]:
        """What the tenant has in its sequence, which nobody may change."""
        request = pb.GetSequenceRequest(session_id=self.session, sequence_id="a", include_tokens=True)
        return list(self.tenant.GetSequence(request).sequence.tokens)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        os.chmod(name, 0o711)
        allowed = [f"engine=uid:{TENANT}", f"engine=uid:{RIVAL}", f"viewer=uid:{VIEWER}"]
        flags = ["--listen", "127.0.0.1:0", "--memory", "1MiB", *(w for one in allowed for w in ("--allow", one))]
        with kvcache(Path(name), *flags) as daemon:
            socket = guest_socket(Path(daemon.address.removeprefix("unix:")), TENANT)
            with grpc.insecure_channel(f"unix:{socket}") as channel:  # as root, who may connect anywhere
                stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
                session = attached(stub)
                prompt = pb.Prompt(tokens=PROMPT)
                opening = pb.SequenceOpening(sequence_id="a", prompt=prompt, total_pages=5)
                steps = pb.SequenceSteps(
                    sequence_ids=["a"],
                    starts=[0],
                    token_counts=[16],
                    tokens=PROMPT[:16],
                    total_pages=[5],
                    known_pages=[5],
                )
                demands = [pb.Demand(opening=opening), pb.Demand(steps=steps)]
                stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=demands))
                yield House(daemon, stub, session, daemon.tcp())


def attached(stub: Any) -> str:
    opened = stub.OpenSession(
        pb.OpenSessionRequest(pool_id="pool", layout=LAYOUT_PB, pool_pages=16, ttl={"seconds": 600})
    )
    with open(opened.arena.file_path, "r+b") as file, mmap.mmap(file.fileno(), opened.arena.size_bytes) as arena:
        at = opened.arena.canary_offset
        canary = arena[at : at + 32]
        arena[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
    stub.AttachSession(pb.AttachSessionRequest(session_id=opened.session_id, seen=canary))
    return str(opened.session_id)


REPORT = {"sequenceIds": ["a"], "starts": [16], "tokenCounts": [1], "tokens": [99]}
ATTACKS: list[tuple[str, dict[str, Any]]] = [
    ("ListSequences", {}),
    ("GetStats", {}),
    ("GetSequence", {"sessionId": "SESSION", "sequenceId": "a", "includeTokens": True}),
    ("AllocatePages", {"sessionId": "SESSION", "demands": []}),
    ("AppendTokens", {"sessionId": "SESSION", "steps": REPORT}),
    ("RemoveSequences", {"sessionId": "SESSION", "sequenceIds": ["a"]}),
    ("CloseSession", {"sessionId": "SESSION"}),
    ("OpenSession", {"poolId": "all", "layout": LAYOUT}),
    ("EvictPages", {"poolId": "pool"}),
    ("ExpireSequences", {"olderThan": "0s"}),
    ("DropPool", {"poolId": "pool"}),
    ("Fsck", {}),
    ("ExplainPrefix", {"poolId": "pool/uid:3000", "prompt": PROMPT}),
]


def filled(body: dict[str, Any], session: str) -> dict[str, Any]:
    return {key: session if value == "SESSION" else value for key, value in body.items()}


def test_over_loopback_a_stranger_may_do_nothing(house: House) -> None:
    with Stranger(NOBODY, house.tcp) as stranger:
        for method, body in ATTACKS:
            answer = stranger.ask(method, **filled(body, house.session))
            assert (answer.get("code"), answer.get("reason")) == ("PERMISSION_DENIED", "ROLE_MISSING"), (method, answer)
            assert "anyone" in answer["message"] and answer["role"] in answer["message"]
    assert house.tokens() == PROMPT[:16]


def test_a_stranger_cannot_connect_to_anybodys_socket(house: House) -> None:
    sockets = [house.daemon.address, house.address(TENANT), house.address(VIEWER)]
    for address in sockets:
        with Stranger(NOBODY, address) as stranger:
            assert stranger.ask("GetStats")["code"] == "UNAVAILABLE"
    path = house.daemon.address.removeprefix("unix:")
    script = f"import os\nos.setgroups([])\nos.setresuid(*[{NOBODY}] * 3)\nos.listdir({os.path.dirname(path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "PermissionError" in done.stderr


@pytest.mark.parametrize(
    ("method", "body"),
    [one for one in ATTACKS if one[1].get("sessionId")],
    ids=[name for name, body in ATTACKS if body.get("sessionId")],
)
def test_a_session_does_not_exist_for_another_engine(house: House, method: str, body: dict[str, Any]) -> None:
    with Stranger(RIVAL, house.address(RIVAL)) as rival:
        stolen = rival.ask(method, **filled(body, house.session))
        unknown = rival.ask(method, **filled(body, house.session[:17] + 32 * "0"))
    if method == "CloseSession":
        assert not stolen.get("closed")
    else:
        assert stolen["reason"] == "SESSION_EXPIRED"
    assert stolen == unknown, "the answer tells that the session is there"
    assert house.tokens() == PROMPT[:16]


def test_another_engines_pool_is_another_pool_and_its_arena_is_shut(house: House) -> None:
    mine = house.tenant.ListSequences(pb.ListSequencesRequest(session_id=house.session)).sequences[0].pool_id
    assert mine == f"pool/uid:{TENANT}"
    arenas = list((Path(house.daemon.address.removeprefix("unix:")).parent / "arena").glob("*.arena"))
    with Stranger(RIVAL, house.address(RIVAL)) as rival:
        opened = rival.ask("OpenSession", poolId="pool", layout=LAYOUT, poolPages=16)
        assert opened["poolId"] == f"pool/uid:{RIVAL}"
        assert rival.ask("CloseSession", sessionId=opened["sessionId"])["closed"]
    own = Path(opened["arena"]["filePath"])
    [tenants] = [path for path in arenas if path != own]
    for path, uid, may in ((own, RIVAL, True), (tenants, RIVAL, False), (tenants, TENANT, True), (own, NOBODY, False)):
        script = f"import os\nos.setgroups([])\nos.setresuid(*[{uid}] * 3)\nopen({str(path)!r}, 'r+b')"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) == may, (path, uid, done.stderr)
        assert may or "PermissionError" in done.stderr
    assert stat.S_IMODE(tenants.stat().st_mode) & 0o007 == 0


def test_a_viewer_sees_no_tokens_no_session_ids_and_may_not_act(house: House) -> None:
    with Stranger(VIEWER, house.address(VIEWER)) as viewer:
        [sequence] = viewer.ask("ListSequences")["sequences"]
        assert sequence["sequenceId"] == "a" and "tokens" not in sequence and "sessionId" not in sequence
        again = viewer.ask("ListSequences", sessionHandle=sequence["sessionHandle"])
        assert [one["sequenceId"] for one in again["sequences"]] == ["a"]
        as_id = viewer.ask("ListSequences", sessionId=sequence["sessionHandle"])
        assert (as_id["code"], as_id["identity"], as_id["role"]) == ("PERMISSION_DENIED", f"uid:{VIEWER}", "engine")
        told = json.dumps([viewer.ask(name) for name in ("ListSequences", "GetStats")])
        for method in ("EvictPages", "ExpireSequences", "DropPool", "Fsck", "GetSequence", "CloseSession"):
            assert viewer.ask(method)["reason"] == "ROLE_MISSING", method
        look = {"sessionHandle": sequence["sessionHandle"], "sequenceId": "a", "includeTokens": True}
        assert viewer.ask("GetSequence", **look)["role"] == "operator"
    with Stranger(TENANT, house.address(TENANT)) as tenant:
        assert tenant.ask("GetSequence", **look)["role"] == "operator", "not even of its own, by a handle"
    owner = kvcache_pb2_grpc.KvCacheServiceStub(house.daemon.channel)
    seen = owner.GetSequence(json_format.ParseDict(look, pb.GetSequenceRequest())).sequence
    assert list(seen.tokens) == PROMPT[: seen.total_tokens] != [] and str(seen.access_count) == sequence["accessCount"]
    secret = house.session.partition("-")[2]
    assert secret not in told + house.daemon.log()


def test_prompts_cannot_be_guessed_token_by_token(house: House) -> None:
    """What asks for the first difference, and learns it, has a prompt of n tokens in n vocabularies of questions."""
    guess = [*PROMPT[:2], 77, 78, 79]
    with Stranger(VIEWER, house.address(VIEWER)) as viewer:
        pages = viewer.ask("ExplainPrefix", poolId=f"pool/uid:{TENANT}", prompt=guess)["pages"]
        assert [page["outcome"] for page in pages] == ["PAGE_OUTCOME_NEVER_SEEN", "PAGE_OUTCOME_LAST_TOKEN"]
        other = viewer.ask("ExplainPrefix", poolId=f"pool/uid:{TENANT}", prompt=PROMPT, salt="mine")["pages"]
        assert {page["outcome"] for page in other[:-1]} == {"PAGE_OUTCOME_NEVER_SEEN"}
    owner = kvcache_pb2_grpc.KvCacheServiceStub(house.daemon.channel)
    request = pb.ExplainPrefixRequest(pool_id=f"pool/uid:{TENANT}", prompt=guess)
    assert owner.ExplainPrefix(request).pages[0].diverged_at == 2


def test_one_identity_cannot_take_everything(house: House) -> None:
    with Stranger(RIVAL, house.address(RIVAL)) as rival:
        whole = rival.ask("OpenSession", poolId="all", layout=LAYOUT, poolPages=4000)
        assert (whole["reason"], whole["identity"]) == ("EXCEEDS_SHARE", f"uid:{RIVAL}")
        held = [rival.ask("OpenSession", poolId="pool", layout=LAYOUT, poolPages=16) for _ in range(9)]
        assert (held[8]["reason"], held[8]["identity"], held[8]["limit"]) == ("TOO_MANY_SESSIONS", f"uid:{RIVAL}", "8")
        fresh = attached(house.tenant)
        assert house.tenant.CloseSession(pb.CloseSessionRequest(session_id=fresh)).closed
        for one in held[:8]:
            assert rival.ask("CloseSession", sessionId=one["sessionId"])["closed"]


def test_who_waits_gets_what_an_identity_beyond_its_share_gives_back() -> None:
    """Two users' engines on one pool: who came first has all of it, until the other asks."""

    def asked(user: Stranger, session: str, name: str, pages: int, **more: Any) -> str:
        opening = {"sequenceId": name, "prompt": {"tokens": [1]}, "totalPages": pages}
        answer = user.ask("AllocatePages", sessionId=session, demands=[{"opening": opening}], **more)
        return next((reason for reason in ("NO_PAGES", "QUOTA_EXCEEDED") if reason in str(answer)), str(answer))

    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        os.chmod(name, 0o711)
        allowed = [word for uid in (TENANT, RIVAL) for word in ("--allow", f"engine=uid:{uid}")]
        with kvcache(Path(name), "--memory", "1MiB", "--shared-pools", *allowed) as daemon:
            sockets = {
                uid: f"unix:{guest_socket(Path(daemon.address.removeprefix('unix:')), uid)}" for uid in (TENANT, RIVAL)
            }
            sessions = {}
            for uid, address in sockets.items():
                with grpc.insecure_channel(address) as channel:  # as root, who may connect anywhere
                    sessions[uid] = attached(kvcache_pb2_grpc.KvCacheServiceStub(channel))
            with Stranger(TENANT, sockets[TENANT]) as tenant, Stranger(RIVAL, sockets[RIVAL]) as rival:
                for one in "abcd":
                    assert "pageIds" in asked(rival, sessions[RIVAL], one, 4)
                assert asked(tenant, sessions[TENANT], "x", 4) == "NO_PAGES"
                assert asked(rival, sessions[RIVAL], "e", 4, removeSequenceIds=["a"]) == "QUOTA_EXCEEDED"
                assert "pageIds" in asked(tenant, sessions[TENANT], "x", 4)
            assert not list(kvcache_pb2_grpc.KvCacheServiceStub(daemon.channel).Fsck(pb.FsckRequest()).violations)


def test_nobody_can_have_the_daemon_watch_anothers_process(house: House) -> None:
    namespace = os.readlink("/proc/self/ns/pid")
    process = {"pid": os.getpid(), "startTime": 1, "pidNamespace": namespace}
    with Stranger(RIVAL, house.address(RIVAL)) as rival:
        refused = rival.ask("OpenSession", poolId="pool", layout=LAYOUT, poolPages=16, process=process)
    assert refused["reason"] == "FIELD_INVALID" and f"{os.getpid()}, a process of uid 0" in refused["message"]


def test_reflection_and_health_are_for_whoever_may_connect(house: House) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(house.tcp) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            kvcache_pb2_grpc.KvCacheServiceStub(channel).GetStats(pb.GetStatsRequest(), timeout=30)
    assert rpc.error_from(refused.value).metadata == {"identity": "anyone", "role": "viewer"}


def test_where_another_user_cannot_come_the_daemon_says_so_and_stops() -> None:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        shut = Path(name) / "run"
        shut.mkdir(mode=0o700)
        flags = ["--listen", f"unix:{shut}/k.sock", "--arena-dir", f"{shut}/a", "--memory", "1MiB"]
        command = [sys.executable, "-m", "services.kvcache", *flags, "--allow", "engine=uid:3000"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"--arena-dir {shut}/a: uid 3000 cannot be let in, because it may not pass through {shut}" in done.stderr


#: A daemon that is no root: what it imports, it imports before it gives root up, as
#: tests/kvcache/clients/stranger.py does.
UNPRIVILEGED = """
import os, sys
from services.kvcache.__main__ import main
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
raise SystemExit(main(sys.argv[2:]))
"""


def test_a_daemon_without_privileges_lets_another_user_in_and_nobody_else() -> None:
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        os.chown(name, TENANT, TENANT)
        socket = Path(name) / "k.sock"
        flags = ["--listen", f"unix:{socket}", "--arena-dir", f"{name}/a", "--memory", "1MiB"]
        command = [sys.executable, "-c", UNPRIVILEGED, str(TENANT), *flags, "--allow", f"viewer=uid:{VIEWER}"]
        daemon = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            wait_serving(f"unix:{socket}", alive=lambda: daemon.poll() is None, timeout_s=START_S)
            address = f"unix:{guest_socket(socket, VIEWER)}"
            for uid, reached, code in ((VIEWER, address, None), (NOBODY, address, "UNAVAILABLE")):
                with Stranger(uid, reached) as stranger:
                    assert stranger.ask("GetStats").get("code") == code, uid
            for uid, code in ((TENANT, None), (VIEWER, "UNAVAILABLE")):
                with Stranger(uid, f"unix:{socket}") as stranger:
                    assert stranger.ask("Fsck").get("code") == code, uid
        finally:
            daemon.terminate()
            assert daemon.wait(60) == 0
