"""The manifests for Kubernetes: built by kustomize, checked against the published schemas, and their containers run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from gpu_worker.start.config import WorkerConfig
from ops.cli.setup import SetupConfig
from ops.stack.config import DEMO_MODEL
from shared.config import variable_name
from tests.architecture.source import ROOT
from tests.certificates import OPENSSL, make_authority, make_named_certificate
from tests.ops.cli.command import headrace
from tests.ops.deploy.compose_file import image_environ
from tests.ops.deploy.machine import Container, Machine, can_make_machines
from tests.waiting import wait_for

FOLDER = ROOT / "ops" / "deploy" / "kubernetes"
OVERLAYS = ["base", "overlays/gpu", "overlays/keda", "overlays/hpa", "overlays/group", "overlays/roles"]
SCHEMAS = "1.33"
SECRETS = {role: f"password{role}" for role in ("gateway", "worker", "batch", "admin")} | {
    "operator": "operators-own-key",
    "responses": "secret-of-all-gateways-for-responses",
}
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for its kustomize")


def built(overlay: str) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def settings_of(config: type[Any]) -> set[str]:
    return {variable_name(field) for field in config.__dataclass_fields__}


def pod_of(resource: dict[str, Any]) -> dict[str, Any]:
    return resource["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def base() -> dict[str, dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for its kustomize")
    return {f"{found['kind']}/{found['metadata']['name']}": found for found in built("base")}


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Resources that keep to their schemas: overlays have most of the base's as they are, and checking takes long."""
    return set()


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_keep_to_the_published_schemas(overlay: str, valid: set[str]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which brings the schemas")
    resources = built(overlay)
    for resource in resources:
        if (content := repr(resource)) not in valid and not resource["apiVersion"].startswith("keda.sh/"):
            schemas.validate(resource, SCHEMAS, strict=True)
            valid.add(content)
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "headrace"


def test_every_variable_is_a_setting_of_its_command(base: dict[str, dict[str, Any]]) -> None:
    configs = {"Job/setup": SetupConfig, "Deployment/gateway": GatewayConfig, "Deployment/worker": WorkerConfig}
    for name, config in configs.items():
        (container,) = pod_of(base[name])["containers"]
        assert set(_environ(base, name, container)) - settings_of(config) == set()


def test_group_of_pods_is_told_what_a_worker_takes_and_what_it_needs() -> None:
    found = yaml.safe_load_all((FOLDER / "overlays/group/group.yaml").read_text())
    service, pods = found
    (container,) = pod_of(pods)["containers"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environ.keys() - settings_of(WorkerConfig) == set()
    assert int(environ["HEADRACE_NNODES"]) == pods["spec"]["replicas"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(environ["HEADRACE_TENSOR_PARALLEL_SIZE"]) == gpus * pods["spec"]["replicas"]
    assert environ["HEADRACE_MASTER_ADDR"] == f"{pods['metadata']['name']}-0.{service['metadata']['name']}"
    assert service["spec"]["ports"] == [{"name": "ranks", "port": WorkerConfig().master_port}]
    assert service["spec"]["selector"] == pods["spec"]["template"]["metadata"]["labels"]
    assert pod_of(pods)["securityContext"]["runAsNonRoot"] is True


@needs_kubectl
def test_workers_with_roles_tell_one_another_where_their_kv_is() -> None:
    resources = built("overlays/roles")
    found = {each["metadata"]["name"]: each for each in resources if each["kind"] == "Deployment"}
    selectors = [found[name]["spec"]["selector"]["matchLabels"] for name in ("worker", "decode")]
    assert selectors[0] != selectors[1]
    for name, role in (("worker", "prefill"), ("decode", "decode")):
        (container,) = pod_of(found[name])["containers"]
        environ = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environ.keys() - settings_of(WorkerConfig) == {"POD_IP"}
        assert environ["HEADRACE_ROLE"] == role
        # What a value refers to has to stand before it.
        names = list(environ)
        assert names.index("POD_IP") < names.index("HEADRACE_KV_ADDRESS")
        (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "kv")
        assert environ["HEADRACE_KV_ADDRESS"] == f"$(POD_IP):{port}"
        assert "nvidia.com/gpu" in container["resources"]["limits"]
        assert found[name]["spec"]["template"]["metadata"]["labels"] == found[name]["spec"]["selector"]["matchLabels"]


def test_pods_have_longer_to_end_than_a_drain_takes(base: dict[str, dict[str, Any]]) -> None:
    for name, config in (("Deployment/gateway", GatewayConfig()), ("Deployment/worker", WorkerConfig())):
        assert pod_of(base[name])["terminationGracePeriodSeconds"] >= config.drain_timeout_s + 10


def test_what_selects_pods_finds_them(base: dict[str, dict[str, Any]]) -> None:
    labels = {
        name: found["spec"]["template"]["metadata"]["labels"]
        for name, found in base.items()
        if found["kind"] in ("Deployment", "StatefulSet")
    }
    for found in base.values():
        if found["kind"] not in ("Service", "PodDisruptionBudget"):
            continue
        selector = found["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= had.items() for had in labels.values()), found["metadata"]["name"]


def test_pods_have_no_rights_that_they_do_not_need(base: dict[str, dict[str, Any]]) -> None:
    pods = [pod_of(found) for found in base.values() if found["kind"] in ("Deployment", "StatefulSet", "Job")]
    assert len(pods) == 4
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_operators_port_is_open_to_the_namespace_that_scrapes_alone(base: dict[str, dict[str, Any]]) -> None:
    assert base["NetworkPolicy/same-namespace"]["spec"]["podSelector"] == {}
    doors = {door["ports"][0]["port"]: door for door in base["NetworkPolicy/gateway"]["spec"]["ingress"]}
    (container,) = pod_of(base["Deployment/gateway"])["containers"]
    assert set(doors) == {port["name"] for port in container["ports"]}
    assert "from" not in doors["http"]
    (scraper,) = doors["operator"]["from"]
    server = yaml.safe_load((FOLDER / "overlays/keda/scaled-object.yaml").read_text())
    addresses = {trigger["metadata"]["serverAddress"] for trigger in server["spec"]["triggers"]}
    namespace = scraper["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert all(f".{namespace}:" in address for address in addresses), addresses


def test_scaling_asks_for_metrics_that_there_are() -> None:
    scaled = yaml.safe_load((FOLDER / "overlays/keda/scaled-object.yaml").read_text())
    (trigger,) = scaled["spec"]["triggers"]
    autoscaler = yaml.safe_load((FOLDER / "overlays/hpa/autoscaler.yaml").read_text())
    (metric,) = autoscaler["spec"]["metrics"]
    documented = (ROOT / "ops/docs/metrics.md").read_text()
    names = {*re.findall(r"headrace_\w+", trigger["metadata"]["query"]), metric["external"]["metric"]["name"]}
    assert names == {"headrace_fleet_workers_needed"}
    assert f"`{names.pop()}`" in documented
    # By default KEDA takes a query without a result as 0 workers.
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    # The figure is a number of workers, so each stands for one.
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


# From here on: the containers, as processes.


def _environ(base: dict[str, dict[str, Any]], name: str, container: dict[str, Any], pod: str = "pod") -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if source.get("secretRef", {}).get("optional"):
            continue
        wanted = source["configMapRef"]["name"]
        found |= next(
            item["data"] for key, item in base.items() if key.startswith("ConfigMap/") and key.endswith(wanted)
        )
    for variable in container.get("env", []):
        origin = variable.get("valueFrom", {})
        secret, field = origin.get("secretKeyRef"), origin.get("fieldRef")
        assert field is None or field["fieldPath"] == "metadata.name"
        found[variable["name"]] = SECRETS[secret["key"]] if secret else pod if field else variable["value"]
    return found


class Cluster:
    """Pods on a machine: one container each."""

    def __init__(self, machine: Machine, base: dict[str, dict[str, Any]], directory: Path) -> None:
        self.machine = machine
        self._base = base
        self._directory = directory
        self._authority = make_authority(directory)
        self.pods: dict[str, Container] = {}
        self.keys = directory / "keys"
        self.keys.mkdir()

    def start(self, pod: str, name: str, **replaced: str) -> None:
        spec = pod_of(self._base[name])
        (container,) = spec["containers"]
        sources = {volume["name"]: volume for volume in spec["volumes"]} | {"data": {}}
        mounts = {mount["mountPath"]: self._source(pod, sources[mount["name"]]) for mount in container["volumeMounts"]}
        image = {} if name == "StatefulSet/nats" else image_environ(ROOT / "ops/deploy/Dockerfile")
        environ = image | _environ(self._base, name, container, pod.split(".")[0]) | replaced
        log = self._directory / f"{pod}.log"
        is_read_only = container["securityContext"]["readOnlyRootFilesystem"]
        self.pods[pod] = Container(pod, container["command"], environ, mounts, log, is_read_only)
        self.machine.start(self.pods[pod])

    def probe(self, pod: str, name: str, kind: str) -> bool:
        """Ask what the kubelet asks."""
        (container,) = pod_of(self._base[name])["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probe = container[kind]
        host = pod
        if "tcpSocket" in probe:
            command = ["nc", "-z", host, str(ports[probe["tcpSocket"]["port"]])]
        else:
            asked = probe["httpGet"]
            command = ["curl", "-sS", "-f", "-m", "3", f"http://{host}:{ports[asked['port']]}{asked['path']}"]
        return self.machine.execute(self.pods["nats-0.nats"], command).returncode == 0

    def _source(self, pod: str, volume: dict[str, Any]) -> Path:
        if volume.get("configMap", {}).get("name") == "nats":
            return ROOT / "ops" / "nats"
        folder = self._directory / f"{pod}-{volume.get('name', 'data')}"
        if volume.get("secret", {}).get("secretName") == "keys":
            return self.keys
        if "emptyDir" in volume:
            # As empty as for each new pod of a job.
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if "secret" in volume:
            made = make_named_certificate(self._directory, self._authority, pod)
            shutil.copy(self._authority.certificate, folder / "ca.pem")
            for kind in ("server", "client"):
                shutil.copy(made.certificate, folder / f"{kind}.pem")
                shutil.copy(made.key, folder / f"{kind}.key")
        return folder


@pytest.fixture
def cluster(base: dict[str, dict[str, Any]], tmp_path: Path) -> Iterator[Cluster]:
    nats = [f"nats-{index}.nats" for index in range(base["StatefulSet/nats"]["spec"]["replicas"])]
    with Machine(tmp_path / "machine", [*nats, "setup", "gateway", "worker"]) as machine:
        yield Cluster(machine, base, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not can_make_machines() or OPENSSL is None, reason="needs Linux namespaces with a network between them, openssl"
)
def test_containers_serve_a_completion_and_probes_say_so(cluster: Cluster) -> None:
    made = headrace("keys", "create", HEADRACE_KEYS_FILE=str(cluster.keys / "keys.json"))
    for pod in ("nats-0.nats", "nats-1.nats", "nats-2.nats"):
        cluster.start(pod, "StatefulSet/nats")
    setup = None
    for _ in range(10):
        # As the job's backoff: until the servers have found each other.
        if setup is None or setup.process is None or setup.process.wait(60) != 0:
            shutil.rmtree(cluster.pods["nats-0.nats"].log.parent / "setup-tls", ignore_errors=True)
            cluster.start("setup", "Job/setup")
            setup = cluster.pods["setup"]
    assert setup is not None
    assert setup.process is not None
    assert setup.process.wait(60) == 0, setup.output()
    cluster.start("gateway", "Deployment/gateway")
    model = {"HEADRACE_MODEL": str(DEMO_MODEL), "HEADRACE_SIMULATE": "5"}
    cluster.start("worker", "Deployment/worker", **model)
    pods = [("gateway", "Deployment/gateway"), ("worker", "Deployment/worker"), ("nats-1.nats", "StatefulSet/nats")]
    for pod, name in pods:
        wait_for(partial(cluster.probe, pod, name, "readinessProbe"), 60, cluster.pods[pod].output)
        assert cluster.probe(pod, name, "livenessProbe")
    body = json.dumps({"model": "qwen3-0.6b", "prompt": "x", "max_tokens": 4})
    headers = ["-H", f"Authorization: Bearer {made.stdout.strip()}", "-H", "Content-Type: application/json"]
    url = "http://gateway:8000/v1/completions"
    done = cluster.machine.execute(cluster.pods["worker"], ["curl", "-sS", "-f", *headers, "-d", body, url])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4
    for place, is_writable in (("/", False), ("/usr", False), ("/home", False), ("/tmp", True)):
        touched = cluster.machine.execute(cluster.pods["gateway"], ["touch", f"{place}/written"])
        assert (touched.returncode == 0) == is_writable, place
    assert cluster.pods["worker"].process is not None
    cluster.machine.terminate(cluster.pods["worker"])
    assert cluster.pods["worker"].process.wait(45) == 0
