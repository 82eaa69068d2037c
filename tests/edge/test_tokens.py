"""Tokens: who has one is known by it, and what one caller has begun is no business of another's."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from rocmforge.engine.v1 import engine_pb2 as pb
from rocmforge.engine.v1 import engine_pb2_grpc
from services.common.access.identity import Identity
from services.common.access.tokens import Tokens, make_token
from services.common.errors import InvalidConfiguration, ServiceError
from services.engine import __main__ as program
from services.engine import cli
from services.engine.cli.bearer import Bearer
from services.engine.config import Config
from tests.edge.certificates import issued
from tests.engine.running import RunningEngine, refused
from tests.generation import collect, request
from tests.strangers import UID, give_away

METHODS = pb.DESCRIPTOR.services_by_name["EngineService"].methods


def written(path: Path, *names: str) -> dict[str, str]:
    """Write a file with a token for each name; the tokens."""
    made = {name: make_token(name) for name in names}
    path.write_text("# clients\n\n" + "".join(f"{line}\n" for _, line in made.values()))
    path.chmod(0o600)
    return {name: token for name, (token, _) in made.items()}


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_token_is_long_random_and_kept_as_its_hash() -> None:
    (token, line), (other, _) = make_token("gateway"), make_token("gateway")
    assert token != other and len(token) >= 43
    assert line == f"gateway:{hashlib.sha256(token.encode()).hexdigest()}" and token not in line
    for name in ("", "a:b", " a", "#a", "a\n", "a,b", "x" * 300):
        with pytest.raises(ValueError, match=r"expected|a name"):
            make_token(name)


def test_the_bearer_is_known_by_name(tmp_path: Path) -> None:
    has = written(tmp_path / "tokens", "alice", "bob")
    tokens = Tokens(tmp_path / "tokens")
    assert tokens.bearer(f"Bearer {has['alice']}") == Identity.of_token("alice")
    assert tokens.bearer(f"bearer  {has['bob']} ") == Identity.of_token("bob")
    digest = (tmp_path / "tokens").read_text().split(":")[-1].strip()
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {has['alice']}",
        has["alice"],
        f"Bearer {has['alice']}x",
        f"Bearer {digest}",
    ):
        assert tokens.bearer(wrong) is None, wrong


def test_every_token_is_compared_whichever_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = written(tmp_path / "tokens", "alice", "bob", "carol")
    tokens, compared, compare = Tokens(tmp_path / "tokens"), list[str](), hmac.compare_digest

    def counted(one: str, other: str) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for token in (has["alice"], has["carol"], "none"):
        compared.clear()
        tokens.bearer(f"Bearer {token}")
        assert len(compared) == 3


def test_a_file_that_changes_counts_at_once_and_a_broken_one_never(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    has = written(path, "alice")
    tokens = Tokens(path)
    new = written(path, "bob", "carol")
    assert tokens.bearer(f"Bearer {has['alice']}") is None
    assert tokens.bearer(f"Bearer {new['bob']}") == Identity.of_token("bob")
    path.write_text("nonsense")
    with capture_logs() as logs:
        assert tokens.bearer(f"Bearer {new['bob']}") == Identity.of_token("bob")
        assert tokens.bearer(f"Bearer {new['bob']}") == Identity.of_token("bob")
    assert [one["event"] for one in logs] == ["tokens_kept"]
    assert "line 1 is not NAME:SHA-256" in logs[0]["detail"] and "nonsense" not in logs[0]["detail"]


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice", "line 1 is not"),
        (f"alice:{DIGEST[1:]}", "line 1 is not"),
        (f"#\nalice:{'A' * 64}", "line 2 is not"),
        (f":{DIGEST}", "line 1 is not"),
        (f"a,b:{DIGEST}", "line 1: a name cannot be 'a,b'"),
        (f"alice:{DIGEST}\nbob:{DIGEST}", "line 2 has the token of alice again"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidConfiguration, match=f"^--tokens {path}: {problem}"):
        Tokens(path)


def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    written(path, "alice")
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(InvalidConfiguration, match=f"has mode {mode:04o}: others could add tokens"):
            Tokens(path)
    path.chmod(0o644)
    Tokens(path)
    for other, why in (
        (tmp_path, "is a directory"),
        (tmp_path / "none", "No such file"),
        (Path("/dev/null"), "regular"),
    ):
        with pytest.raises(InvalidConfiguration, match=f"(?i){why}"):
            Tokens(other)


@pytest.mark.needs("other-users")
def test_a_strangers_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    written(path, "alice")
    give_away(path)
    with pytest.raises(InvalidConfiguration, match=f"belongs to uid {UID}"):
        Tokens(path)


def test_the_command_makes_tokens_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens"
    before = os.umask(0)
    try:
        made = {}
        for name in ("alice", "bob"):
            assert program.main(["token", name, "--tokens", str(path)]) == 0
            shown = capsys.readouterr()
            made[name], rest = shown.out.strip(), shown.err
            assert rest == ""
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    tokens = Tokens(path)
    for name, token in made.items():
        assert tokens.bearer(f"Bearer {token}") == Identity.of_token(name) and token not in path.read_text()
    assert program.main(["token", "carol"]) == 0
    shown = capsys.readouterr()
    assert f"carol:{hashlib.sha256(shown.out.strip().encode()).hexdigest()}" in shown.err
    assert program.main(["token", "a:b"]) == 2
    path.write_text("nonsense")
    assert program.main(["token", "dave", "--tokens", str(path)]) == 1
    assert path.read_text() == "nonsense" and capsys.readouterr().out == ""


# --- an engine that takes them ----------------------------------------------------------------------------------------


class Caller:
    """A client of the engine over TCP, with or without a token."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        shown = self.channel if token is None else grpc.intercept_channel(self.channel, Bearer(token))
        self.stub = engine_pb2_grpc.EngineServiceStub(shown)


class Bench:
    """An engine, two callers with tokens, and one without."""

    def __init__(self, folder: Path) -> None:
        self.tokens = written(folder / "tokens", "alice", "bob")
        flags = ["--listen", "127.0.0.1:0", "--tokens", str(folder / "tokens")]
        self.engine = RunningEngine(folder, *flags).start()
        self.address = self.engine.engine.bound[1]
        self.alice, self.bob = (Caller(self.address, self.tokens[name]) for name in ("alice", "bob"))
        self.nobody, self.forger = Caller(self.address), Caller(self.address, "forged")
        self.operator = self.engine.stub

    def close(self) -> None:
        for one in (self.alice, self.bob, self.nobody, self.forger):
            one.channel.close()
        self.engine.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    one = Bench(tmp_path_factory.mktemp("tokens"))
    yield one
    one.close()


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_no_method_is_open_to_who_shows_no_token(bench: Bench, method: str) -> None:
    message = getattr(pb, f"{method}Request")()
    for caller in (bench.nobody, bench.forger):
        error = refused(lambda caller=caller: getattr(caller.stub, method)(message))  # type: ignore[misc]
        assert (error.code, error.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert refused_or_none(lambda: getattr(bench.alice.stub, method)(message)) != "UNAUTHENTICATED"


def refused_or_none(call: Any) -> str | None:
    """The reason that a call is refused with, None if it is answered."""
    try:
        return refused(call).reason
    except AssertionError:
        return None


def test_health_is_open_and_the_socket_shows_who_one_is(bench: Bench) -> None:
    health_pb2_grpc.HealthStub(bench.nobody.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    bench.operator.GetModel(pb.GetModelRequest())
    forged = grpc.intercept_channel(bench.engine.channel, Bearer("forged"))
    assert refused(lambda: engine_pb2_grpc.EngineServiceStub(forged).GetModel(pb.GetModelRequest())).reason == (
        "UNAUTHENTICATED"
    )


def submitted(caller: Any, name: str) -> None:
    """Submit a generation and wait for its end."""
    caller.SubmitGeneration(pb.SubmitGenerationRequest(request=request(request_id=name, max_tokens=2)))
    list(caller.WatchGeneration(pb.WatchGenerationRequest(request_id=name)))


def same_but_for_the_id(one: ServiceError, other: ServiceError, names: tuple[str, str]) -> bool:
    told = [(error.code, error.reason, error.field, error.metadata) for error in (one, other)]
    return told[0] == told[1] and one.message.replace(names[0], "") == other.message.replace(names[1], "")


@pytest.mark.parametrize("rpc", ["WatchGeneration", "GetGeneration", "CancelGeneration", "DeleteGeneration"])
def test_a_generation_of_another_is_unknown(bench: Bench, rpc: str) -> None:
    name = f"alices-{rpc}"
    submitted(bench.alice.stub, name)
    message = getattr(pb, f"{rpc}Request")
    hers = refused(lambda: getattr(bench.bob.stub, rpc)(message(request_id=name)))
    none = refused(lambda: getattr(bench.bob.stub, rpc)(message(request_id="nobodys")))
    assert hers.reason == "REQUEST_UNKNOWN" and same_but_for_the_id(hers, none, (name, "nobodys"))
    assert refused_or_none(lambda: getattr(bench.alice.stub, rpc)(message(request_id=name))) is None


def test_a_live_request_of_another_cannot_be_cancelled(bench: Bench) -> None:
    bench.engine.steps.hold()
    try:
        stream = bench.alice.stub.Generate(request(request_id="attached", max_tokens=20))
        assert bench.engine.steps.reached.wait(60)
        live = pb.SubmitGenerationRequest(request=request(request_id="live", max_tokens=20))
        submission = bench.alice.stub.SubmitGeneration.future(live)
        bench.engine.until_live(2)
        for name in ("attached", "live"):
            cancel = pb.CancelGenerationRequest(request_id=name)
            assert refused(lambda cancel=cancel: bench.bob.stub.CancelGeneration(cancel)).reason == "REQUEST_UNKNOWN"  # type: ignore[misc]
    finally:
        bench.engine.steps.release()
    assert collect(stream)[2].reason == pb.FINISH_REASON_LENGTH
    assert submission.result(60).generation.request_id == "live"
    *_, last = bench.alice.stub.WatchGeneration(pb.WatchGenerationRequest(request_id="live"))
    assert last.response.finish.reason == pb.FINISH_REASON_LENGTH
    # What has ended is remembered for a while, and not told to others either.
    ended = pb.CancelGenerationRequest(request_id="attached")
    assert refused(lambda: bench.bob.stub.CancelGeneration(ended)).reason == "REQUEST_UNKNOWN"
    assert bench.alice.stub.CancelGeneration(ended).request_id == "attached"


def test_an_id_of_another_is_taken_and_gives_nothing_away(bench: Bench) -> None:
    again = pb.SubmitGenerationRequest(request=request(request_id="taken", max_tokens=2))
    submitted(bench.alice.stub, "taken")
    assert refused(lambda: bench.bob.stub.SubmitGeneration(again)).reason == "REQUEST_EXISTS"
    assert bench.alice.stub.SubmitGeneration(again).generation.request_id == "taken"


def test_one_purges_ones_own_and_the_operator_everybodys(bench: Bench) -> None:
    everything = pb.PurgeGenerationsRequest(older_than=duration_pb2.Duration())
    bench.operator.PurgeGenerations(everything)
    for name, stub in (("a", bench.alice.stub), ("b", bench.bob.stub), ("c", bench.bob.stub), ("d", bench.operator)):
        submitted(stub, f"purged-{name}")
    assert bench.bob.stub.PurgeGenerations(everything).purged == 2
    assert bench.operator.GetGeneration(pb.GetGenerationRequest(request_id="purged-a")).generation.request_id
    assert bench.operator.PurgeGenerations(everything).purged == 2


def test_a_token_that_is_taken_back_no_longer_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    try:
        bench.alice.stub.GetModel(pb.GetModelRequest())
        written(tmp_path / "tokens", "carol")
        assert refused(lambda: bench.alice.stub.GetModel(pb.GetModelRequest())).reason == "UNAUTHENTICATED"
    finally:
        bench.close()


# --- clients ----------------------------------------------------------------------------------------------------------


def test_commands_show_a_token(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", bench.address]
    assert cli.run("status", target) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err
    (tmp_path / "token").write_text(bench.tokens["alice"] + "\n")
    shown = ["--token-file", str(tmp_path / "token")]
    for words in (["status"], ["generate", "ROMEO:", "--max-tokens", "2"], ["models"], ["bench", "--requests", "2"]):
        assert cli.run(words[0], [*words[1:], *target, *shown]) == 0, capsys.readouterr().err
    monkeypatch.setenv("ROCMFORGE_TOKEN", bench.tokens["bob"])
    assert cli.run("status", [*target, "--wait", "30"]) == 0
    monkeypatch.setenv("ROCMFORGE_TOKEN", "forged")
    assert cli.run("status", target) == 1
    assert cli.run("status", [*target, *shown]) == 0, "the file wins"
    assert cli.run("status", [*target, "--token-file", str(tmp_path / "none")]) == 1
    (tmp_path / "token").write_text("two words")
    assert cli.run("status", [*target, *shown]) == 1
    assert "expected a token" in capsys.readouterr().err


def test_no_token_is_sent_to_another_host_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROCMFORGE_TOKEN", "secret")
    assert cli.run("status", ["--target", "192.0.2.1:50051"]) == 1
    assert "no token is sent there without TLS" in capsys.readouterr().err


def test_tokens_over_tls_may_be_taken_from_other_hosts(tmp_path: Path) -> None:
    own = issued(tmp_path, "own")
    tokens = ["--tokens", str(tmp_path / "tokens"), "--listen", "0.0.0.0:50051"]
    assert Config.read([*tokens, *own.serving()], {}).tokens == tmp_path / "tokens"
    for flags in (tokens, [*tokens[2:], *own.serving()]):
        with pytest.raises(InvalidConfiguration, match="reachable from other hosts"):
            Config.read(flags, {})
