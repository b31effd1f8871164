"""The check of the manifests for Kubernetes finds what an API server would refuse or drop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.check_kubernetes import (
    KUSTOMIZATION,
    custom_faults,
    definitions,
    documents,
    faults,
)

pytest.importorskip("kubernetes_validate", reason="comes with the extra dev")
DEFINITION = {
    "spec": {
        "group": "ray.io",
        "names": {"kind": "RayCluster"},
        "versions": [
            {
                "name": "v1",
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["headGroupSpec"],
                                "properties": {
                                    "headGroupSpec": {
                                        "type": "object",
                                        "x-kubernetes-preserve-unknown-fields": True,
                                    },
                                    "rayVersion": {"x-kubernetes-int-or-string": True},
                                },
                            }
                        },
                    }
                },
            }
        ],
    }
}
"""A definition as KubeRay has it, but for its size."""


def of_kind(name: str, kind: str) -> dict[str, Any]:
    found = documents((KUSTOMIZATION / name).read_text())
    return next(each for each in found if each["kind"] == kind)


@pytest.fixture
def cluster() -> dict[str, Any]:
    return copy.deepcopy(of_kind("raycluster.yaml", "RayCluster"))


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    service = of_kind("service.yaml", "Deployment")
    assert not list(faults(service))
    service["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert any("readynessProbe" in fault for fault in faults(service))


def test_a_field_of_a_ray_pod_that_kubernetes_does_not_know_is_found(
    cluster: dict[str, Any],
) -> None:
    assert not list(faults(cluster))
    pod = cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"]
    pod["terminationGracePeriod"] = 60
    [*found] = faults(cluster)
    assert all("spot" in fault and "terminationGracePeriod" in fault for fault in found) and found


def test_a_version_of_a_custom_resource_that_is_another_is_found(cluster: dict[str, Any]) -> None:
    cluster["apiVersion"] = "ray.io/v1alpha1"
    assert [*faults(cluster)] == ["RayCluster everstep: apiVersion is ray.io/v1alpha1"]


def test_a_custom_resource_is_compared_with_its_definition(
    tmp_path: Path, cluster: dict[str, Any]
) -> None:
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump(DEFINITION))
    known = definitions(tmp_path)
    small = {**cluster, "spec": {"headGroupSpec": {"anything": 1}, "rayVersion": "2.60.0"}}
    assert not list(custom_faults(small, known))
    small["spec"] = {"headGroupSpec": {}, "rayVersoin": "2.60.0"}
    assert "rayVersoin" in next(custom_faults(small, known))
    small["spec"] = {}
    assert "headGroupSpec" in next(custom_faults(small, known))
