"""Kubernetes's own API server accepts every manifest, and drops nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.check_kubernetes import OTHERS, charted, kustomized, tool, values_files
from tests.kubernetes.api_server import ApiServer, Refused, is_possible
from tests.kubernetes.objects import SINCE, apply, definitions, serves
from tests.support.service_process import wait_for

DEADLINE_S = 60.0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not is_possible() or tool("helm") is None or tool("kubectl") is None,
        reason="needs an API server, kubectl and helm: make kubernetes",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as found:
        for each in definitions():
            found.create(each)
        for kind, api_version in OTHERS.items():
            path = f"/apis/{api_version}"
            wait_for(lambda path=path: serves(found, path), DEADLINE_S, f"{kind} at {path}")
        yield found


def is_kept(sent: Any, stored: Any) -> bool:
    """Return whether all that was sent is there, beside defaults."""
    if isinstance(sent, dict):
        return all(key in stored and is_kept(value, stored[key]) for key, value in sent.items())
    if isinstance(sent, list):
        return len(sent) == len(stored) and all(map(is_kept, sent, stored))
    return bool(sent == stored)


def test_it_accepts_every_object_of_the_kustomization_and_of_the_chart(server: ApiServer) -> None:
    lacking = apply(server, kustomized(), "everstep")
    for number, values in enumerate(values_files()):
        namespace = f"chart-{number}"
        lacking += apply(server, charted("--values", str(values), namespace=namespace), namespace)
    assert not lacking or server.version() < max(SINCE.values())
    stored = server.get("/apis/ray.io/v1/namespaces/everstep/rayclusters/everstep")
    [sent] = [each for each in kustomized() if each["kind"] == "RayCluster"]
    assert is_kept(sent["spec"], stored["spec"]), "nothing was dropped"
    pods = server.get("/api/v1/namespaces/everstep/pods")["items"]
    assert {pod["metadata"]["name"] for pod in pods} == {"head", "steady", "spot"}
    [head] = [pod for pod in pods if pod["metadata"]["name"] == "head"]
    assert head["spec"]["priority"] > 1_000_000_000, "the priority class is one that is there"


def test_it_refuses_what_is_wrong(server: ApiServer) -> None:
    [deployment, *_] = [each for each in kustomized() if each["kind"] == "Deployment"]
    deployment["spec"]["selector"]["matchLabels"] = {"app": "another"}
    with pytest.raises(Refused, match="selector"):
        server.create(deployment, "default")
