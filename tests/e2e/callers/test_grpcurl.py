"""The real grpcurl against both services, through reflection alone, as the README shows it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests import tools
from tests.e2e.conftest import Pair
from tests.processes import Service

ENGINE, CACHE = "rocmforge.engine.v1.EngineService", "rocmforge.kvcache.v1.KvCacheService"

pytestmark = pytest.mark.needs("grpcurl")


def grpcurl(service: Service, *arguments: str, body: str = "") -> subprocess.CompletedProcess[str]:
    flags = ["-plaintext", *(["-d", body] if body else [])]
    # Its versions disagree on how a unix socket is named.
    for address in (service.address, service.address.removeprefix("unix:")):
        command = [tools.path_of("grpcurl"), *flags, "-unix", address, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if "Failed to dial" not in done.stderr:
            break
    return done


def messages(output: str) -> list[Any]:
    """grpcurl prints the messages of a stream one after another."""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    while at < len(output.rstrip()):
        message, end = decoder.raw_decode(output, at)
        found.append(message)
        at = end + len(output[end:]) - len(output[end:].lstrip())
    return found


def test_list_and_describe(pair: Pair) -> None:
    assert ENGINE in grpcurl(pair.engine, "list").stdout.split()
    assert "grpc.health.v1.Health" in grpcurl(pair.engine, "list").stdout.split()
    assert CACHE in grpcurl(pair.daemon, "list").stdout.split()
    assert f"{CACHE}.AllocatePages" in grpcurl(pair.daemon, "list", CACHE).stdout.split()
    assert "rpc Generate" in grpcurl(pair.engine, "describe", ENGINE).stdout
    method = grpcurl(pair.daemon, "describe", f"{CACHE}.AllocatePages").stdout
    assert method.splitlines()[0] == f"{CACHE}.AllocatePages is a method:", method
    opening = grpcurl(pair.daemon, "describe", "rocmforge.kvcache.v1.Prompt")
    assert ".rocmforge.kvcache.v1.Retention retention" in opening.stdout, opening.stderr
    for symbol, kind in (
        *(("rocmforge.engine.v1.Finish.seed", "a field"), ("rocmforge.engine.v1.Finish.matched", "a one-of")),
        *(("rocmforge.engine.v1.FinishReason", "an enum"), ("rocmforge.engine.v1.FINISH_REASON_EOS", "an enum value")),
        *(("google.rpc.BadRequest.FieldViolation", "a message"), ("google.protobuf.Struct", "a message")),
    ):
        assert f" is {kind}:" in grpcurl(pair.engine, "describe", symbol).stdout, symbol
    assert "Symbol not found" in grpcurl(pair.engine, "describe", f"{ENGINE}.Unheard").stderr


def test_generate_and_stats(pair: Pair) -> None:
    stopping = {"maxTokens": 8, "ignoreEos": True}
    body = json.dumps({"prompt": {"text": "ROMEO:"}, "sampling": {"temperature": 0}, "stopping": stopping})
    done = grpcurl(pair.engine, f"{ENGINE}/Generate", body=body)
    assert done.returncode == 0, done.stderr
    assert '"requestId"' in done.stdout and '"tokenIds"' in done.stdout and "_id" not in done.stdout
    answers = messages(done.stdout)
    assert answers[-1]["finish"]["usage"]["completionTokens"] == 8
    assert sum(len(answer.get("tokenIds", [])) for answer in answers) == 8
    [stats] = messages(grpcurl(pair.daemon, f"{CACHE}/GetStats").stdout)
    assert stats["pools"][0]["freePages"] > 0
    health = grpcurl(pair.daemon, "grpc.health.v1.Health/Check", body=json.dumps({"service": CACHE}))
    assert messages(health.stdout) == [{"status": "SERVING"}]


def test_errors_are_readable(pair: Pair) -> None:
    done = grpcurl(pair.engine, f"{ENGINE}/Generate", body='{"prompt": {"text": ""}}')
    assert done.returncode != 0
    assert "InvalidArgument" in done.stderr and "FIELD_INVALID" in done.stderr and "prompt" in done.stderr
    done = grpcurl(pair.daemon, f"{CACHE}/RenewSession", body='{"sessionId": "x"}')
    assert "SESSION_EXPIRED" in done.stderr
    done = grpcurl(pair.engine, f"{ENGINE}/WatchGeneration", body='{"requestId": "none"}')
    assert "NotFound" in done.stderr and "REQUEST_UNKNOWN" in done.stderr
