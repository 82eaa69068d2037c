"""docker-compose.yml with a real Docker engine: up, called, killed, upgraded, scaled, encrypted, and down.

The tests run in order, each on what the one before left. ``make test-compose`` runs them; the name of this file keeps
`make test` from finding them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from rocmforge.engine.v1 import engine_pb2, engine_pb2_grpc
from services.version import VERSION
from tests import tools
from tests.compose.stack import NEW, OLD, PROJECT, Stack, docker, missing
from tests.generation import collect, request
from tests.processes import ROOT

ENGINE = "127.0.0.1:50051"
MOST_MIB = 250
PROMPT = "ROMEO:\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun."
#: Seconds in which a request is answered although the daemon has just been killed. Docker restarts it at once.
BACK_S = 30.0

pytestmark = pytest.mark.timeout(900, func_only=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if problem := missing():
        pytest.fail(f"make test-compose needs a Docker engine: {problem}", pytrace=False)
    one = Stack()
    one.down()
    for target in ("kvcache", "engine"):
        words = ["--build-arg", f"VERSION={VERSION}", "--build-arg", f"REVISION={OLD}"]
        docker("build", "--quiet", "--target", target, *words, "--tag", f"rocmforge-{target}:{OLD}", ".")
        (folder := tmp_path_factory.mktemp(target)).joinpath("Dockerfile").write_text(
            f"FROM rocmforge-{target}:{OLD}\nLABEL org.opencontainers.image.revision={NEW}\n"
        )
        docker("build", "--quiet", "--tag", f"rocmforge-{target}:{NEW}", str(folder))
    try:
        yield one
    finally:
        print(one.compose("logs", "--no-color", "--tail", "40", check=False))
        one.down()


@contextlib.contextmanager
def client(address: str = ENGINE) -> Iterator[Any]:
    with grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


def generated(address: str = ENGINE, *, wait_s: float = 60.0) -> engine_pb2.Finish:
    """A generation of ``PROMPT``, greedy, that waits for an engine."""
    with client(address) as stub:
        return collect(stub.Generate(request(PROMPT, 16), timeout=wait_s, wait_for_ready=True))[2]


def run(target: str, *words: str) -> str:
    return docker("run", "--rm", "--read-only", "--entrypoint", words[0], f"rocmforge-{target}:{OLD}", *words[1:])


# --- the images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["kvcache", "engine"])
def test_images_are_small_labelled_and_have_no_installers(stack: Stack, target: str) -> None:
    image = json.loads(docker("image", "inspect", f"rocmforge-{target}:{OLD}"))[0]
    print(f"rocmforge-{target}: {image['Size'] / 1e6:.0f} MB")
    assert image["Size"] < MOST_MIB * 1e6
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == f"rocmforge-{target}"
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.revision"] == OLD
    assert image["Config"]["User"] == "10001:10001"
    names = ("pip", "setuptools", "huggingface_hub", "grpc_tools")
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    for python in ("python", "/usr/bin/python3"):
        assert run(target, python, "-c", code) == "[]\n"
    assert run(target, f"rocmforge-{target}", "--version") == f"rocmforge {VERSION}\n"


# --- up, and called ---------------------------------------------------------------------------------------------------


def test_it_comes_up_and_is_called(stack: Stack) -> None:
    stack.up()
    for words in (["list"], ["-d", '{"prompt": {"text": "ROMEO:"}}']):
        method = [] if words == ["list"] else ["rocmforge.engine.v1.EngineService/Generate"]
        flags = [] if words == ["list"] else words
        done = subprocess.run(
            [tools.path_of("grpcurl"), "-plaintext", *flags, ENGINE, *(method or ["list"])],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "rocmforge.engine.v1.EngineService" in done.stdout or "FINISH_REASON" in done.stdout


@pytest.mark.parametrize("service", ["kvcache", "engine", "namespaces"])
def test_containers_are_confined(stack: Stack, service: str) -> None:
    one = stack.inspect(service)
    host = one["HostConfig"]
    assert one["Config"]["User"] in ("10001:10001", "") and host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["PidsLimit"] > 0 and host["Memory"] > 0
    assert host["LogConfig"]["Config"] == {"max-file": "3", "max-size": "10m"}
    status = Path(f"/proc/{one['State']['Pid']}/status").read_text()
    assert "Uid:\t10001\t10001\t10001\t10001" in status and "CapEff:\t0000000000000000" in status


def test_the_doctor_finds_what_they_share(stack: Stack) -> None:
    found = doctor(stack, "engine")
    assert found["KV-cache daemon"]["status"] == "ok", found
    assert found["namespaces"]["status"] == "ok" and "pid:" not in found["namespaces"]["found"], found


#: The daemon's process id in the PID namespace that both share.
PEER = """
import pathlib
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"rocmforge-kvcache" in path.read_bytes():
        print(path.parent.name)
        break
"""


# --- killed -----------------------------------------------------------------------------------------------------------


def test_a_killed_engine_comes_back_to_a_warm_cache(stack: Stack) -> None:
    assert generated().usage.completion_tokens == 16
    since = time.time()
    stack.kill_process("engine")
    stack.until_back("engine", since)
    assert generated().usage.cached_tokens > 0


def test_a_killed_daemon_comes_back_and_no_request_is_lost(stack: Stack) -> None:
    """Three times: its tmpfs has room for one arena, and the engine had the one before mapped."""
    engine = stack.containers("engine")
    for _ in range(3):
        with client() as stub:
            stream = stub.Generate(request(PROMPT, 200), timeout=60)
            next(iter(stream))
            since, began = time.time(), time.monotonic()
            stack.kill_process("kvcache")
            assert collect(stream)[2].usage.completion_tokens == 200
        print(f"a stream went on {time.monotonic() - began:.1f} s after the daemon was killed, its rest included")
        began = time.monotonic()
        assert generated(wait_s=BACK_S).usage.completion_tokens == 16
        stack.until_back("kvcache", since)
    assert stack.containers("engine") == engine
    logs = stack.compose("logs", "--no-color", "engine")
    assert "EXCEEDS_BUDGET" not in logs


def test_docker_kill_is_a_stop_that_up_undoes(stack: Stack) -> None:
    """Docker takes its own kill for the operator's wish, and restarts nothing by itself."""
    [daemon] = stack.containers("kvcache")
    docker("kill", daemon)
    docker("wait", daemon)
    assert stack.inspect("kvcache")["RestartCount"] == 3, "the three times before"
    stack.up()
    assert generated(wait_s=BACK_S).usage.completion_tokens == 16


# --- upgraded ---------------------------------------------------------------------------------------------------------


class Load(threading.Thread):
    """A client that calls again and again, also while no engine is there; a stream that began must end whole."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self.lost: list[str] = []
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.is_set():
            count = 0
            try:
                with client() as stub:
                    for response in stub.Generate(request(PROMPT, 60), timeout=60, wait_for_ready=True):
                        count += len(response.token_ids)
                self.done += 1
                if count != 60:
                    self.lost.append(f"{count} tokens")
            except grpc.RpcError as error:
                # A draining engine refuses a new call, and gRPC cancels one that comes in the instant it closes.
                if count or error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    self.lost.append(f"{count} tokens, then {error}")


def test_an_upgrade_of_the_engine_keeps_the_cache_and_loses_no_request(stack: Stack) -> None:
    daemon, before = stack.containers("kvcache"), stack.inspect("engine")
    generated()
    load = [Load() for _ in range(4)]
    for one in load:
        one.start()
    with client() as stub:
        stream = stub.Generate(request(PROMPT, 400), timeout=120)
        next(iter(stream))
        stack.variables["ROCMFORGE_ENGINE_TAG"] = NEW
        stack.up("engine")
        assert len(collect(stream)[1]) >= 399
    after = generated()
    for one in load:
        one.ending.set()
    for one in load:
        one.join(60)
    assert stack.containers("kvcache") == daemon, "the daemon was replaced"
    assert stack.inspect("engine")["Image"] != before["Image"]
    assert after.usage.cached_tokens > 0
    assert sum(one.done for one in load) > 0 and [one.lost for one in load if one.lost] == []
    print(f"{sum(one.done for one in load)} requests during the upgrade, none lost")


def test_an_upgrade_of_the_daemon_keeps_the_engine_and_loses_the_cache(stack: Stack) -> None:
    engine = stack.containers("engine")
    assert generated().usage.cached_tokens > 0
    stack.variables["ROCMFORGE_KVCACHE_TAG"] = NEW
    stack.up("kvcache")
    assert generated(wait_s=BACK_S).usage.cached_tokens == 0
    assert stack.containers("engine") == engine
    assert generated().usage.cached_tokens > 0


# --- scaled, encrypted ------------------------------------------------------------------------------------------------


def test_two_engines_share_the_cache(stack: Stack) -> None:
    ranges = {"ROCMFORGE_ENGINE_PORTS": "50051-50058", "ROCMFORGE_METRICS_PORTS": "9470-9477"}
    several = Stack({**stack.variables, **ranges})
    several.up("--scale", "engine=2")
    ports = {docker("port", one, "50051").strip() for one in several.containers("engine")}
    assert len(ports) == 2
    generated(min(ports))
    assert all(generated(port).usage.cached_tokens > 0 for port in ports)
    stack.up("--scale", "engine=1")
    assert len(stack.containers("engine")) == 1


def test_tls_with_secrets(stack: Stack, tmp_path: Path) -> None:
    authority = trustme.CA()
    server = authority.issue_cert("localhost")
    caller = authority.issue_cert(common_name="caller")
    tmp_path.chmod(0o755)
    server.cert_chain_pems[0].write_to_path(tmp_path / "engine.crt")
    server.private_key_pem.write_to_path(tmp_path / "engine.key")
    authority.cert_pem.write_to_path(tmp_path / "clients.crt")
    for name in ("engine.crt", "engine.key", "clients.crt"):
        subprocess.run(["chown", "10001", str(tmp_path / name)], check=True)
        (tmp_path / name).chmod(0o400)
    secure = Stack({**stack.variables, "ROCMFORGE_TLS": str(tmp_path)}, (*stack.files, "docker-compose.tls.yml"))
    secure.up()
    address = docker("port", secure.containers("engine")[0], "50051").strip().replace("127.0.0.1", "localhost")
    shown = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), caller.private_key_pem.bytes(), caller.cert_chain_pems[0].bytes()
    )
    with grpc.secure_channel(address, shown) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        assert len(collect(stub.Generate(request(PROMPT, 8), timeout=60, wait_for_ready=True))[1]) == 8
    with client(address) as stub, pytest.raises(grpc.RpcError):
        stub.GetModel(engine_pb2.GetModelRequest(), timeout=5)
    anyone = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with grpc.secure_channel(address, anyone) as channel, pytest.raises(grpc.RpcError):
        engine_pb2_grpc.EngineServiceStub(channel).GetModel(engine_pb2.GetModelRequest(), timeout=5)


# --- a GPU's surroundings ---------------------------------------------------------------------------------------------


def doctor(stack: Stack, service: str, *flags: str) -> dict[str, dict[str, str]]:
    """What the doctor of the engine finds in a container, by check, with the daemon there as its peer."""
    daemon = "--kvcache=unix:/run/rocmforge/kvcache.sock"
    peer = stack.compose("exec", "-T", service, "python", "-c", PEER).strip()
    command = ["rocmforge", "doctor", "engine", "--json", daemon, "--peer", peer, *flags]
    told = stack.compose("exec", "-T", service, *command, check=False)
    return {line["check"]: line for line in map(json.loads, told.splitlines())}


def test_what_hip_needs_is_shared_and_the_doctor_says_what_is_not(stack: Stack, tmp_path: Path) -> None:
    """Device nodes by group number, and one PID, IPC and network namespace, without a GPU or ROCm."""
    (tmp_path / "dri").mkdir()
    for node in (tmp_path / "kfd", tmp_path / "dri" / "renderD128"):
        os.mknod(node, 0o660 | stat.S_IFCHR, os.makedev(1, 3))
        os.chown(node, 0, 4242)
        node.chmod(0o660)
    variables = {**stack.variables, "STANDIN": str(tmp_path), "ROCMFORGE_RENDER_GID": "992"}
    gpu = Stack(variables, (*stack.files, "tests/compose/rocm.yml"))
    gpu.up("engine-rocm")
    found = doctor(gpu, "engine-rocm", "--device=gpu")
    assert found["GPU device nodes"]["status"] == "failed" and "group 4242" in found["GPU device nodes"]["found"], found
    assert 'group_add: ["4242"]' in found["GPU device nodes"]["change"]
    gpu.variables["ROCMFORGE_RENDER_GID"] = "4242"
    gpu.up("engine-rocm")
    found = doctor(gpu, "engine-rocm", "--device=gpu")
    assert found["GPU device nodes"]["status"] == "ok", found
    assert found["namespaces"]["status"] == "ok" and "ipc, pid, net" in found["namespaces"]["found"], found
    assert found["KV-cache daemon"]["status"] == "ok", found
    assert found["CuPy"]["status"] == "failed"


# --- down -------------------------------------------------------------------------------------------------------------


def test_down_leaves_nothing(stack: Stack) -> None:
    stack.down()
    name = f"label=com.docker.compose.project={PROJECT}"
    assert docker("ps", "--all", "--quiet", "--filter", name) == ""
    assert docker("volume", "ls", "--quiet", "--filter", name) == ""
    assert ROOT.is_dir()
