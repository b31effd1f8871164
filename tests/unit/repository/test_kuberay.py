"""Manifests for Kubernetes: names that exist, pods that are confined, and settings that agree with
the compose file's. `make check` compares their fields with those that Kubernetes and KubeRay know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep.options.serve import VARIABLES, ServeOptions
from tests.support.command_line import serve_flags

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "kuberay"


def manifests() -> list[dict[str, Any]]:
    listed = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]
    return [
        document for name in listed for document in yaml.safe_load_all((DEPLOY / name).read_text())
    ]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found for found in manifests() if found["kind"] == kind}


def pods() -> Iterator[dict[str, Any]]:
    """The pod of every part, as its spec."""
    cluster = of_kind("RayCluster")["everstep"]["spec"]
    yield cluster["headGroupSpec"]["template"]["spec"]
    yield from (group["template"]["spec"] for group in cluster["workerGroupSpecs"])
    for deployment in of_kind("Deployment").values():
        yield deployment["spec"]["template"]["spec"]


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]}


def test_what_pods_mount_exists() -> None:
    claims = of_kind("PersistentVolumeClaim").keys()
    readme = (DEPLOY / "README.md").read_text()
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        mounts = pod["containers"][0].get("volumeMounts", ())
        assert {mount["name"] for mount in mounts} == volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']} " in readme


NOT_IN_COMPOSE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"}
"""What Kubernetes adds: a pod gets SIGTERM before it goes, a container of compose is drained."""
ELSEWHERE = re.compile("AWS_.*|RAY_AUTH_TOKEN_PATH|RAY_.*TLS.*|EVERSTEP_SECRETS_DIR")
"""Paths of secrets, and TLS: pods' addresses can be in no certificate."""


@pytest.mark.parametrize(("part", "number"), [("head", 0), ("worker", 1), ("worker", 2)])
def test_ray_s_settings_are_those_of_the_compose_file(part: str, number: int) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][part]
    wanted = {
        name: value
        for name, value in compose["environment"].items()
        if not ELSEWHERE.fullmatch(name)
    }
    found = {
        name: value
        for name, value in environment(list(pods())[number]).items()
        if name not in NOT_IN_COMPOSE and not ELSEWHERE.fullmatch(name)
    }
    assert found == wanted


def test_pods_run_as_the_user_of_the_image() -> None:
    [user] = re.findall(r"useradd --uid (\d+)", (ROOT / "Dockerfile").read_text())
    for pod in pods():
        assert pod["securityContext"]["fsGroup"] == int(user)
        [container] = [each["securityContext"] for each in pod["containers"]]
        assert container["runAsUser"] == int(user) and container["runAsNonRoot"] is True
        assert container["allowPrivilegeEscalation"] is False
        assert container["capabilities"] == {"drop": ["ALL"]}


def test_a_node_drains_before_its_pod_ends_and_once_more_on_its_signal() -> None:
    for group in of_kind("RayCluster")["everstep"]["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[:3] == ["everstep", "drain", "--this-node"] and "--wait" in hook
        hook_s = int(hook[hook.index("--deadline") + 1])
        drain_s = int(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert min(hook_s, drain_s) > 0
        assert hook_s + drain_s <= pod["terminationGracePeriodSeconds"] - 20
        assert "exec $KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
        assert group["template"]["metadata"]["annotations"] == {
            "ray.io/overwrite-container-cmd": "true"
        }


def test_no_pod_has_a_token_of_the_service_or_rights_at_kubernetes_s_api() -> None:
    kinds = {each["kind"] for each in manifests()}
    assert not {kind for kind in kinds if "Role" in kind or kind == "ServiceAccount"}
    for pod in pods():
        assert "EVERSTEP_TOKEN" not in environment(pod) and "serviceAccountName" not in pod
        assert pod.get("automountServiceAccountToken", False) is False


def test_only_the_service_gets_at_the_database_and_the_head_runs_no_ranks() -> None:
    with_database = [
        pod["containers"][0]["name"]
        for pod in pods()
        if "everstep-database" in str(pod) or "EVERSTEP_DATABASE_FILE" in environment(pod)
    ]
    assert with_database == ["service"]
    assert (
        of_kind("RayCluster")["everstep"]["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"]
        == "0"
    )
    assert of_kind("NetworkPolicy")["everstep-ray"]["spec"]["policyTypes"] == ["Ingress", "Egress"]


def service() -> dict[str, Any]:
    containers = (each for pod in pods() for each in pod["containers"])
    return next(each for each in containers if each["name"] == "service")


def test_the_service_s_variables_are_those_of_the_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["service-a"]
    wanted = {name for name in compose["environment"] if not name.startswith("AWS_")}
    # the image says so for compose
    assert {each["name"] for each in service()["env"]} - {"RAY_AUTH_MODE"} == wanted


def test_the_service_understands_its_arguments_and_every_variable(tmp_path: Path) -> None:
    container = service()
    ours = {each["name"] for each in container["env"] if each["name"].startswith("EVERSTEP_")}
    values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    contents = {"EVERSTEP_DATABASE_FILE": "sqlite://", "EVERSTEP_METRICS_TOKEN_FILE": "x" * 32}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        values[name] = str(tmp_path / name)
    assert container["command"] == ["everstep", "serve"] and ours <= VARIABLES
    # What Kubernetes sets in every pod beside the Service named everstep.
    theirs = {"EVERSTEP_PORT": "tcp://10.0.0.1:8000", "EVERSTEP_SERVICE_HOST": "10.0.0.1"}
    read = ServeOptions.read({**theirs, **values}, serve_flags(*container["args"]))
    assert (read.host, read.port) == ("0.0.0.0", 8000)
    assert read.ray_address == "http://everstep-head-svc:8265"
    assert read.storage_uri == "/var/lib/everstep/storage"
