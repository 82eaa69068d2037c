"""The conformance suite: our client keeps every law, and a client that breaks one is found by that law."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rocmforge.conformance.laws import LAWS
from rocmforge.conformance.subject import Failed, Refused, Subject
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from tests.conformance.broken import BROKEN, OTHERS
from tests.edge.certificates import issued
from tests.gpus import host
from tests.processes import ROOT, Service, kvcache

pytestmark = pytest.mark.timeout(600)
REFERENCE = (sys.executable, "-m", "rocmforge.conformance.adapter")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="conf-") as name:
        with kvcache(Path(name), "--memory", "16MiB") as service:
            yield service


def suite(
    address: str, client: tuple[str, ...], *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rocmforge.conformance", "--daemon", address, *words, "--", *client]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def test_our_client_keeps_every_law(daemon: Service) -> None:
    done = suite(daemon.address, REFERENCE)
    lines = [line.split() for line in done.stdout.splitlines()[:-1]]
    verdicts = {line[1]: line[0] for line in lines}
    assert verdicts == {law.name: "kept" for law in LAWS}, done.stdout
    assert done.returncode == 0 and done.stdout.endswith(f"{len(LAWS)} of {len(LAWS)} laws kept\n")


@pytest.mark.parametrize(
    ("client", "law"), [*((law.name, law.name) for law in LAWS), *((name, law) for name, (law, _) in OTHERS.items())]
)
def test_a_client_that_breaks_a_law_is_found_by_it(daemon: Service, client: str, law: str) -> None:
    done = suite(daemon.address, (sys.executable, "-m", "tests.conformance.broken", client), "--law", law)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].split()[:2] == ["BROKEN", law] and done.stdout.endswith("0 of 1 laws kept\n")
    why = done.stdout.splitlines()[1]
    assert "the client ended" not in why and "no answer" not in why, "it is found by what it does"


def test_over_mutual_tls(tmp_path: Path) -> None:
    own, client = issued(tmp_path, "own", "kvcache.internal"), issued(tmp_path, "client", common="suite")
    flags = ["--listen", "127.0.0.1:0", *own.serving(client.ca), "--allow", "engine=cn:suite"]
    shown = ["--ca", str(own.ca), "--cert", str(client.cert), "--key", str(client.key), "--name", "kvcache.internal"]
    laws = [word for name in ("attach", "replies", "stale") for word in ("--law", name)]
    with kvcache(tmp_path, "--memory", "16MiB", *flags, "--allow", "operator=cn:suite") as service:
        done = suite(service.tcp(), REFERENCE, *shown, *laws)
        assert done.returncode == 0 and done.stdout.endswith("3 of 3 laws kept\n"), done.stdout + done.stderr
        stub = kvcache_pb2_grpc.KvCacheServiceStub(service.channel)
        assert not stub.GetStats(pb.GetStatsRequest()).pools, "the suite leaves its pools behind"
        done = suite(service.tcp(), REFERENCE, *shown[:2], *shown[6:], *laws)
        assert done.returncode == 2 and "no answer" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--name", "kvcache.internal"], "--name needs --ca"),
        (["--cert", "CERT"], "--cert and --key must be given together"),
        (["--ca", "/proc/none"], "--ca: cannot read /proc/none"),
        (["--ca", "CA"], "--ca: unix:/run/k.sock is not a TCP address"),
    ],
)
def test_flags_that_do_not_fit_end_it(tmp_path: Path, words: list[str], error: str) -> None:
    own = issued(tmp_path, "own")
    done = suite("unix:/run/k.sock", REFERENCE, *({"CA": str(own.ca), "CERT": str(own.cert)}.get(w, w) for w in words))
    assert done.returncode == 2 and error in done.stderr and not done.stdout


def test_pages_on_a_gpu(tmp_path: Path) -> None:
    machine = host(1).environment
    flags = ["--device", "gpu", "--memory", "8MiB"]
    with kvcache(tmp_path, *flags, environment=machine) as service:
        done = suite(service.address, REFERENCE, "--gpu", "0", environment=machine)
        assert done.returncode == 0, done.stdout + done.stderr
        for law in ("places", "copies", "stale"):
            client = (sys.executable, "-m", "tests.conformance.broken", law)
            done = suite(service.address, client, "--gpu", "0", "--law", law, environment=machine)
            assert done.returncode == 1 and "the client ended" not in done.stdout, done.stdout + done.stderr


def test_a_broken_client_breaks_no_other_law_of_these(daemon: Service) -> None:
    """A verdict names what is wrong: what is written next door says nothing about epochs."""
    for broken, kept in (("places", "epoch"), ("lease", "copies"), ("epoch", "grants")):
        done = suite(daemon.address, (sys.executable, "-m", "tests.conformance.broken", broken), "--law", kept)
        assert done.returncode == 0, done.stdout


def test_each_law_has_a_client_that_breaks_it() -> None:
    assert list(BROKEN) == [law.name for law in LAWS]


def test_what_is_no_client_breaks_laws_and_no_daemon_is_another_matter(daemon: Service, tmp_path: Path) -> None:
    for command, words in (
        ((sys.executable, "-c", "print('hello'); input()"), "the answer is not a JSON object: hello"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "the client ended, with status 3"),
        (("/proc/none/client",), "/proc/none/client cannot be started: No such file or directory"),
    ):
        done = suite(daemon.address, command, "--law", "places")
        assert done.returncode == 1 and words in done.stdout
    done = suite(f"unix:{tmp_path}/none.sock", REFERENCE, "--law", "places")
    assert done.returncode == 2 and "no answer from the KV-cache daemon" in done.stderr and not done.stdout


def test_an_answer_that_does_not_come_is_no_verdict_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocmforge.conformance.subject.ANSWER_S", 0.2)
    client = Subject((sys.executable, "-c", "input(); input()"))
    with pytest.raises(Failed, match=r"open: no answer for 0\.2 s"):
        client.do("open")
    client.end()


def test_a_refusal_has_the_reason() -> None:
    client = Subject((sys.executable, "-c", 'input(); print(\'{"error": "NO_PAGES", "message": "m"}\')'))
    with pytest.raises(Refused, match="step: NO_PAGES: m") as caught:
        client.do("step")
    assert caught.value.reason == "NO_PAGES"
    client.end()
