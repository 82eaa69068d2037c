"""A daemon and two engines under load, scraped by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from rocmforge.engine.v1 import engine_pb2_grpc
from tests.generation import request
from tests.processes import ROOT, Service, engine, kvcache

DEPLOY = ROOT / "deploy" / "observability"
MODEL = ROOT / "models" / "shakespeare"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels."""
    found: list[dict[str, Any]] = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return found


def filled(expression: str) -> str:
    """A query without the dashboard's variables: the scrapes are a second apart."""
    return expression.replace("$__rate_interval", "10s")


class Prometheus:
    """One that has loaded the rules."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, what: str, **parameters: str) -> Any:
        """The data of an API call."""
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with _DIRECT.open(url, timeout=30) as answer:
            told = json.loads(answer.read())
        assert told["status"] == "success", told
        return told["data"]

    def series(self, expression: str) -> list[Any]:
        """What a query finds now."""
        found: list[Any] = self.ask("query", query=filled(expression))["result"]
        return found


def _load(one: Service, nth: int, over: threading.Event) -> None:
    stub = engine_pb2_grpc.EngineServiceStub(one.channel)
    for turn in range(10**6):
        if over.is_set():
            return
        # Half of the prompt is everybody's, so that some of it is cached; the rest makes others be evicted.
        prompt = [*range(1, 33), *[(7 * nth + turn) % 500 + 1] * 24]
        with contextlib.suppress(grpc.RpcError):
            for _ in stub.Generate(request(prompt, max_tokens=20 + nth * 7)):
                if over.is_set():
                    return


@contextlib.contextmanager
def observed() -> Iterator[Prometheus]:
    """The load runs until the end."""
    with tempfile.TemporaryDirectory(prefix="rf-") as name:
        directory = Path(name)
        metrics = ("--metrics", "127.0.0.1:0")
        with (
            kvcache(directory, *metrics, "--memory", "8MiB") as daemon,
            engine(directory, daemon.address, *metrics, "--engine-name", "a", model=MODEL, name="a") as one,
            engine(directory, daemon.address, *metrics, "--engine-name", "b", model=MODEL, name="b") as other,
        ):
            targets = [service.started()["metrics"] for service in (daemon, one, other)]
            settings = {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(DEPLOY / "rules.yml")],
                "scrape_configs": [{"job_name": "rocmforge", "static_configs": [{"targets": targets}]}],
            }
            (directory / "prometheus.yml").write_text(json.dumps(settings))  # YAML, too
            over = threading.Event()
            with _prometheus(directory) as prometheus:
                clients = [
                    threading.Thread(target=_load, args=(service, nth, over), daemon=True)
                    for service in (one, other)
                    for nth in range(4)
                ]
                for client in clients:
                    client.start()
                try:
                    yield prometheus
                finally:
                    over.set()
                    for client in clients:
                        client.join(60)


@contextlib.contextmanager
def _prometheus(directory: Path) -> Iterator[Prometheus]:
    log = directory / "prometheus.log"
    command = [
        *("prometheus", f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'tsdb'}"),
        *("--web.listen-address=127.0.0.1:0", "--log.format=json"),
    ]
    with log.open("ab") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield Prometheus(_listening(process, log))
        finally:
            process.terminate()


def _listening(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline, address = time.monotonic() + 60, ""
    while True:
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                said = str(event.get("msg", ""))
                if "Listening on" in said and "address" in event:
                    address = str(event["address"])
                elif address and "ready to receive" in said:
                    return address
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
