"""The manifests of deploy/kubernetes as kustomize builds them, and their containers as the services read them."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from services.common.edge.listener import Listener
from services.engine.config import Config as EngineConfig
from services.kvcache.config import Config as KvCacheConfig
from tests import tools
from tests.processes import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())

Manifest = dict[str, Any]
Config = EngineConfig | KvCacheConfig


@functools.cache
def built(overlay: str) -> list[Manifest]:
    """What kustomize makes of an overlay. Skips the test without kustomize."""
    command = [tools.path_of("kustomize"), "build", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a warning, such as of a field that is deprecated"
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(overlay: str, kind: str) -> list[Manifest]:
    return [one for one in built(overlay) if one["kind"] == kind]


@dataclass(frozen=True)
class Workload:
    """A DaemonSet or Deployment, with its only container."""

    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def service(self) -> str:
        """kvcache or engine."""
        return str(self.manifest["metadata"]["labels"]["app.kubernetes.io/name"])

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.manifest["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def pod(self) -> Manifest:
        pod: Manifest = self.manifest["spec"]["template"]["spec"]
        return pod

    @property
    def container(self) -> Manifest:
        [container] = self.pod["containers"]
        assert container["name"] == self.service
        found: Manifest = container
        return found

    @property
    def uid(self) -> int:
        return int(self.container["securityContext"]["runAsUser"])

    @property
    def environment(self) -> dict[str, str]:
        return {one["name"]: one["value"] for one in self.container["env"]}

    @property
    def config(self) -> Config:
        """Its settings, as the service reads them. Raises InvalidConfiguration."""
        assert "command" not in self.container, "the image's entrypoint takes the arguments"
        kind: type[EngineConfig] | type[KvCacheConfig] = EngineConfig if self.service == "engine" else KvCacheConfig
        return kind.read(self.container["args"], self.environment)

    @property
    def tcp(self) -> list[Listener]:
        return [one for one in self.config.listeners if one.path is None]

    @property
    def sockets(self) -> list[str]:
        return [str(one) for one in self.config.listeners if one.path is not None]

    @property
    def mounts(self) -> dict[str, Any]:
        """The volumes by where they are mounted."""
        volumes = {one["name"]: one for one in self.pod["volumes"]}
        return {mount["mountPath"]: volumes[mount["name"]] for mount in self.container["volumeMounts"]}

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each exec of a probe or hook, by what it is."""
        hooks = self.container.get("lifecycle", {})
        for name in ("startupProbe", "livenessProbe", "readinessProbe", *hooks):
            one = hooks.get(name) or self.container[name]
            if "exec" in one:
                yield name, one["exec"]["command"]


def workloads(overlay: str) -> list[Workload]:
    found = [Workload(one) for one in built(overlay) if one["kind"] in ("DaemonSet", "Deployment")]
    assert {one.service for one in found} == {"kvcache", "engine"}
    return found


def daemon(overlay: str) -> Workload:
    [found] = [one for one in workloads(overlay) if one.service == "kvcache"]
    return found


def engines(overlay: str) -> list[Workload]:
    return [one for one in workloads(overlay) if one.service == "engine"]


def bytes_of(quantity: str) -> int:
    """A quantity of memory."""
    for suffix, power in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)):
        if quantity.endswith(suffix):
            return int(quantity.removesuffix(suffix)) << power
    return int(quantity)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()
