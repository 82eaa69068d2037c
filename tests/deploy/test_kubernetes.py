"""deploy/kubernetes: valid for the versions it is for, and all of it fits the services and itself."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from services import healthcheck
from services.common.edge.health import LIVENESS
from services.common.edge.unix_sockets import guest_socket
from services.engine.api.servicer import SERVICE as ENGINE
from services.engine.cli import COMMANDS, drain
from services.engine.config import Config as EngineConfig
from services.engine.server import STOP_S
from services.kvcache.api.servicer import SERVICE as KVCACHE
from services.kvcache.config import Config as KvCacheConfig
from services.version import VERSION
from tests.deploy.manifests import (
    OVERLAYS,
    Manifest,
    Workload,
    built,
    bytes_of,
    daemon,
    engines,
    of_kind,
    selects,
    workloads,
)
from tests.processes import ROOT

pytestmark = [pytest.mark.needs("kustomize"), pytest.mark.parametrize("overlay", OVERLAYS)]

#: The oldest that the manifests are for, and newer ones; claims of devices came later.
VERSIONS = ("1.30", "1.35", "1.37")
OLDEST = {"rocm-dra": "1.35"}
#: Kinds of operators, which have no schema here. What they refer to is looked at below.
FOREIGN = {"ServiceMonitor", "ScaledObject"}
READINESS = {"engine": ENGINE, "kvcache": KVCACHE}
#: What a service takes beside its budgets, and with a GPU the runtime.
BASE, RUNTIME = 256 << 20, 2 << 30


def test_each_manifest_is_valid_strictly(overlay: str) -> None:
    for version in VERSIONS[VERSIONS.index(OLDEST.get(overlay, VERSIONS[0])) :]:
        judged = [one for one in built(overlay) if one["kind"] not in FOREIGN]
        assert len(judged) >= 11
        for one in judged:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_field_that_there_is_not_is_found(overlay: str) -> None:
    manifest: Manifest = {**daemon(overlay).manifest, "spec": {**daemon(overlay).manifest["spec"], "replicas": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replicas"):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_the_services_take_every_setting(overlay: str) -> None:
    for one in workloads(overlay):
        config = one.config
        assert config.grace_s and config.metrics is not None
        unknown = [name for name in one.environment if not name.startswith("ROCMFORGE_") and name != "CUPY_CACHE_DIR"]
        assert not unknown


def test_images_are_those_of_this_version(overlay: str) -> None:
    tag = f"{VERSION}-rocm" if overlay.startswith("rocm") else VERSION
    for one in workloads(overlay):
        for container in (one.container, *one.pod["initContainers"]):
            assert container["image"] == f"rocmforge-{one.service}:{tag}"


def test_a_service_is_no_setting(overlay: str) -> None:
    """For a Service named rocmforge-engine, Kubernetes sets variables in pods that the engine would refuse."""
    assert all(one.pod["enableServiceLinks"] is False for one in workloads(overlay))


def test_the_daemon_lets_the_engines_in_as_engines(overlay: str) -> None:
    served = daemon(overlay)
    config = served.config
    assert isinstance(config, KvCacheConfig)
    for one in engines(overlay):
        own = one.config
        assert isinstance(own, EngineConfig)
        assert one.uid != served.uid and own.kvcache_owner == served.uid
        assert [str(allowance) for allowance in config.allow] == [f"engine=uid:{one.uid}"]
        [path] = [listener.path for listener in config.listeners if listener.path is not None]
        assert own.kvcache == f"unix:{guest_socket(path, one.uid)}"
        assert own.device == config.device
        for shared in (str(path.parent), str(config.arena_dir)):
            hosts = {work.mounts[shared]["hostPath"]["path"] for work in (one, served)}
            assert len(hosts) == 1, shared


def test_they_see_each_others_processes_and_share_nodes(overlay: str) -> None:
    gpu = daemon(overlay).config.device == "gpu"
    for one in workloads(overlay):
        assert one.pod["hostPID"] is True
        assert (one.pod.get("hostNetwork"), one.pod.get("hostIPC")) == ((True, True) if gpu else (None, None))
        assert one.pod["nodeSelector"] == {"rocmforge/kvcache": "true"}
    for one in engines(overlay):
        [term] = one.pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert selects(term["labelSelector"]["matchLabels"], daemon(overlay).labels)


def test_only_devices_that_no_plugin_shares_need_privileges(overlay: str) -> None:
    for one in workloads(overlay):
        secured = one.container["securityContext"]
        assert secured["readOnlyRootFilesystem"] and one.uid > 0 and one.pod["securityContext"]["runAsNonRoot"]
        assert secured.get("privileged", False) is (overlay == "rocm")
        if overlay != "rocm":
            assert secured["capabilities"] == {"drop": ["ALL"]} and secured["allowPrivilegeEscalation"] is False
        for first in one.pod["initContainers"]:
            assert first["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_ports_are_those_listened_on(overlay: str) -> None:
    for one in workloads(overlay):
        config = one.config
        assert config.metrics is not None
        listening = {*(listener.port for listener in one.tcp), config.metrics.port}
        assert {port["containerPort"] for port in one.container["ports"]} == listening
    if daemon(overlay).pod.get("hostNetwork"):
        ports = [port["containerPort"] for one in workloads(overlay) for port in one.container["ports"]]
        assert len(set(ports)) == len(ports), "two pods of a node would listen on one port"


def test_nobody_calls_an_engine_on_the_nodes_network_without_tls(overlay: str) -> None:
    for one in workloads(overlay):
        if one.pod.get("hostNetwork") and one.tcp:
            assert one.config.tls is not None and one.config.tls.client_ca is not None


def known(one: Workload, address: str, name: str) -> None:
    """Whether a probe asks what is there: a socket of the service, a name of its health."""
    assert address in one.sockets
    assert name in (LIVENESS, READINESS[one.service])


def test_probes_ask_for_names_that_there_are(overlay: str) -> None:
    for one in workloads(overlay):
        for kind, name in (
            ("startupProbe", LIVENESS),
            ("livenessProbe", LIVENESS),
            ("readinessProbe", READINESS[one.service]),
        ):
            probe = one.container[kind]
            if "grpc" in probe:
                assert probe["grpc"]["service"] == name
                assert probe["grpc"]["port"] in {listener.port for listener in one.tcp}
                assert one.config.tls is None, "the kubelet speaks no TLS"
            else:
                assert probe["exec"]["command"][:2] == ["rocmforge", "healthcheck"]
                assert probe["exec"]["command"][3:] == [name]
                known(one, *probe["exec"]["command"][2:])
                assert probe["timeoutSeconds"] >= 3, "less than the command's own limit"


def test_commands_are_commands(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(healthcheck, "main", asked.append)
    for one in workloads(overlay):
        for _, (program, command, *words) in one.commands:
            assert program == "rocmforge"
            if command == "healthcheck":
                healthcheck.main(words)
            else:
                assert command in COMMANDS and command == "drain"
                assert drain._parser().parse_args(words).target in one.sockets
    assert all(len(words) == 2 for words in asked)


def test_a_stop_has_the_time_that_it_takes(overlay: str) -> None:
    for one in workloads(overlay):
        hooked = [drain._parser().parse_args(words[2:]).wait for name, words in one.commands if name == "preStop"]
        assert len(hooked) == (one.service == "engine")
        needed = sum(hooked) + one.config.grace_s + (STOP_S if hooked else 0)
        assert needed <= one.pod["terminationGracePeriodSeconds"]
        if hooked:
            config = one.config
            assert isinstance(config, EngineConfig)
            assert 0 < config.lame_duck_s < min(hooked)


def test_memory_is_what_the_budgets_need(overlay: str) -> None:
    served = daemon(overlay)
    config = served.config
    assert isinstance(config, KvCacheConfig)
    needed = config.host_memory + (BASE + config.memory if config.device == "cpu" else RUNTIME)
    for one in workloads(overlay):
        resources = one.container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"], "what is over the request goes first"
    assert bytes_of(served.container["resources"]["limits"]["memory"]) == needed


def ports_of(one: Workload) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in one.container["ports"]}


def test_services_lead_to_ready_pods(overlay: str) -> None:
    behind: set[str] = set()
    for service in of_kind(overlay, "Service"):
        assert service["spec"]["clusterIP"] == "None"
        [one] = [work for work in workloads(overlay) if selects(service["spec"]["selector"], work.labels)]
        behind.add(one.name)
        for port in service["spec"]["ports"]:
            assert ports_of(one)[port["targetPort"]] == port["port"], "a headless Service translates no port"
    assert behind == {one.name for one in workloads(overlay)}


def test_workloads_select_their_own_pods_alone(overlay: str) -> None:
    for one in workloads(overlay):
        selector = one.manifest["spec"]["selector"]["matchLabels"]
        assert [other.name for other in workloads(overlay) if selects(selector, other.labels)] == [one.name]


def test_policies_and_budgets_are_for_what_there_is(overlay: str) -> None:
    [budget] = of_kind(overlay, "PodDisruptionBudget")
    assert all(selects(budget["spec"]["selector"]["matchLabels"], one.labels) for one in engines(overlay))
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(overlay, "NetworkPolicy")}
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name in ("clients", "metrics"):
        [rule] = policies[name]["ingress"]
        assert rule["from"], "an empty list is everybody"
        selector = policies[name]["podSelector"].get("matchLabels")
        chosen = [one for one in workloads(overlay) if selector is None or selects(selector, one.labels)]
        assert chosen and all(port["port"] in ports_of(one) for port in rule["ports"] for one in chosen)
    collectors = {one.config.otlp_endpoint for one in workloads(overlay)}
    assert len(collectors) == 1, "one trace goes to one collector"
    for collector in collectors - {None}:
        to, dns = policies["traces"]["egress"]
        assert [port["port"] for port in to["ports"]] == [urlsplit(str(collector)).port]
        [peer] = to["to"]
        assert peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] in str(collector)
        assert {port["port"] for port in dns["ports"]} == {53} and dns["to"]
    assert ("traces" in policies) == (collectors != {None})
    [priority] = of_kind(overlay, "PriorityClass")
    assert daemon(overlay).pod["priorityClassName"] == priority["metadata"]["name"]


def test_what_has_no_schema_refers_to_what_there_is(overlay: str) -> None:
    for monitor in of_kind(overlay, "ServiceMonitor"):
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1" and set(monitor["spec"]) == {"selector", "endpoints"}
        chosen = [
            service
            for service in of_kind(overlay, "Service")
            if selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        ]
        assert chosen
        for endpoint in monitor["spec"]["endpoints"]:
            assert set(endpoint) <= {"port", "interval", "scheme", "path"}
            assert all(endpoint["port"] in [port["name"] for port in one["spec"]["ports"]] for one in chosen)


def test_what_scales_asks_for_a_metric_that_there_is(overlay: str) -> None:
    metrics = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        [metric] = scaler["spec"]["metrics"]
        assert metric["pods"]["metric"]["name"] in metrics
        [scaled] = [one for one in engines(overlay) if one.name == scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in scaled.manifest["spec"], "each apply would undo what the autoscaler did"


def test_keda_asks_for_a_metric_that_there_is_and_scales_what_there_is(overlay: str) -> None:
    """A ScaledObject has no schema here: every field that it has is one that KEDA has."""
    for scaler in of_kind(overlay, "ScaledObject"):
        assert scaler["apiVersion"] == "keda.sh/v1alpha1" and set(scaler) == {"apiVersion", "kind", "metadata", "spec"}
        spec = scaler["spec"]
        assert set(spec) == {
            *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval"),
            *("fallback", "advanced", "triggers"),
        }
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engine"}
        [scaled] = [one for one in engines(overlay) if one.name == spec["scaleTargetRef"]["name"]]
        assert "replicas" not in scaled.manifest["spec"], "each apply would undo what the autoscaler did"
        assert not of_kind(overlay, "HorizontalPodAutoscaler"), "two autoscalers would undo each other's work"
        assert 0 < spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]
        assert set(spec["fallback"]) == {"failureThreshold", "replicas"}
        # What it hands on to the HorizontalPodAutoscaler that it makes has a schema.
        [(name, handed)] = spec["advanced"]["horizontalPodAutoscalerConfig"].items()
        made: Manifest = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": scaler["metadata"],
            "spec": {"scaleTargetRef": spec["scaleTargetRef"], "maxReplicas": spec["maxReplicaCount"], name: handed},
        }
        kubernetes_validate.validate(made, VERSIONS[-1], strict=True)
        [trigger] = spec["triggers"]
        assert set(trigger) == {"type", "metricType", "metadata"}
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        asked = trigger["metadata"]
        assert set(asked) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
        assert all(isinstance(value, str) for value in asked.values()), "numbers would be refused"
        assert float(asked["threshold"]) > 0 and asked["ignoreNullValues"] in ("true", "false")
        metrics = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
        [(metric, namespace)] = re.findall(r'^sum\((\w+)\{namespace="(\w+)"\}\)$', asked["query"])
        assert metric in metrics and namespace == scaler["metadata"]["namespace"]
        [(_, where)] = re.findall(r"^http://([\w-]+)\.([\w-]+)\.svc\.cluster\.local:9090$", asked["serverAddress"])
        [policy] = [one for one in of_kind(overlay, "NetworkPolicy") if one["metadata"]["name"] == "metrics"]
        [peer] = policy["spec"]["ingress"][0]["from"]
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": where}
        assert of_kind(overlay, "ServiceMonitor"), "nothing would be scraped"


def test_claims_are_those_of_the_pods(overlay: str) -> None:
    claims = {one["metadata"]["name"] for one in of_kind(overlay, "ResourceClaim")}
    for one in workloads(overlay):
        named: list[Any] = one.pod.get("resourceClaims", [])
        assert {claim["resourceClaimName"] for claim in named} == claims
        assert [claim["name"] for claim in one.container["resources"].get("claims", [])] == [c["name"] for c in named]
