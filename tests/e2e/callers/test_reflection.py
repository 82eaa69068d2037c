"""ghz and buf curl against both services, which have no proto files: reflection of both versions is all they go by."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests import tools
from tests.e2e.callers.test_grpcurl import CACHE, ENGINE, messages
from tests.e2e.conftest import Pair

BODY = json.dumps({"prompt": {"text": "ROMEO:"}, "stopping": {"maxTokens": 2, "ignoreEos": True}})


def test_ghz_calls_both(pair: Pair) -> None:
    for service, method, body in ((pair.engine, f"{ENGINE}.Generate", BODY), (pair.daemon, f"{CACHE}.GetStats", "{}")):
        flags = ["--insecure", "--call", method, "-d", body, "-n", "6", "-c", "2", "--format", "json"]
        done = subprocess.run(
            [tools.path_of("ghz"), *flags, service.tcp()], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["statusCodeDistribution"] == {"OK": 6}


@pytest.mark.parametrize("version", ["grpc-v1", "grpc-v1alpha"])
@pytest.mark.needs("node", "buf")
def test_buf_curl_goes_by_either_version(pair: Pair, version: str) -> None:
    flags = ["--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", version]

    def curl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [tools.path_of("buf"), "curl", *flags, *arguments]
        return subprocess.run(command, cwd=pair.directory, capture_output=True, text=True, timeout=120)

    address = f"http://{pair.engine.tcp()}"
    listed = curl("--list-methods", address)
    assert f"{ENGINE}/Generate" in listed.stdout.split(), listed.stderr
    assert "grpc.reflection.v1.ServerReflection/ServerReflectionInfo" in listed.stdout.split()
    done = curl("-d", BODY, f"{address}/{ENGINE}/Generate")
    assert done.returncode == 0, done.stderr
    assert messages(done.stdout)[-1]["finish"]["usage"]["completionTokens"] == 2
