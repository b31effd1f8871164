"""Against Kubernetes's own API server: it accepts every manifest, the node watcher has the rights
that it needs and no others, and what Kubernetes announces of a node reaches the service."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.check_kubernetes import OTHERS, charted, kustomized, tool, values_files
from tests.kubernetes.api_server import ApiServer, Refused, is_possible
from tests.kubernetes.objects import SINCE, apply, definitions, serves
from tests.kubernetes.place import ACCOUNT, DEADLINE_S, NODE_IPS, Place
from tests.support.fake_ray import FakeRay, serving
from tests.support.service_process import wait_for

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


@pytest.fixture(scope="module")
def place(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    ray = FakeRay()
    ray.nodes = [
        FakeRay.node("head", {"memory": 1e9}, head=True),
        *(FakeRay.node(name * 56, {"CPU": 2.0}) | {"node_ip": ip} for name, ip in NODE_IPS.items()),
    ]
    ray.nodes[0]["node_ip"] = "10.0.0.9"
    with serving(ray):
        found = Place(server, tmp_path_factory.mktemp("place"), ray)
        try:
            found.service.wait_until_ready(DEADLINE_S)
            found.prepare()
            found.start_watcher()
            yield found
        finally:
            found.end()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/v1/nodes", True),
        ("GET", "/api/v1/namespaces/watched/pods", True),
        ("GET", "/api/v1/nodes/a", False),
        ("DELETE", "/api/v1/nodes/a", False),
        ("PATCH", "/api/v1/nodes/a", False),
        ("GET", "/api/v1/pods", False),
        ("GET", "/api/v1/namespaces/everstep/pods", False),
        ("GET", "/api/v1/namespaces/watched/secrets", False),
        ("DELETE", "/api/v1/namespaces/watched/pods/worker-a", False),
    ],
)
def test_the_watcher_s_account_may_do_that_and_no_more(
    place: Place, method: str, path: str, allowed: bool
) -> None:
    with place.server.http(place.server.account_token(place.namespace, ACCOUNT)) as http:
        body = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        response = http.request(method, path, headers=body, content="{}" if body else None)
    assert response.status_code == (200 if allowed else 403), response.text


def test_a_cordon_and_a_taint_of_a_node_reach_the_service_and_end_with_it(place: Place) -> None:
    place.set_node("a", unschedulable=True)
    place.is_("a", "CORDONED")
    assert place.node("b").state == "ALIVE"
    place.set_node("a", unschedulable=None)
    place.is_("a", "ALIVE")
    leaving = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule", "value": "1"}
    place.set_node("a", taints=[leaving])
    place.is_("a", "DRAINING", "DRAINED")
    place.set_node("a", taints=None)
    place.is_("a", "ALIVE")


def test_the_watcher_outlives_the_api_server_and_a_version_that_it_has_forgotten(
    place: Place,
) -> None:
    place.server.kill()
    place.wait_for(lambda: "out of reach" in place.log(), "the watcher's line")
    place.server.start()
    place.set_node("b", unschedulable=True)
    place.is_("b", "CORDONED")

    assert place.watcher is not None
    place.watcher.send_signal(signal.SIGSTOP)
    place.server.kill()
    place.server.start()
    place.set_node("b", unschedulable=None)
    place.server.compact()
    place.watcher.send_signal(signal.SIGCONT)
    place.is_("b", "ALIVE")
    place.wait_for(lambda: "listing anew" in place.log(), "the end of the version")


def test_a_pod_that_is_deleted_drains_its_node_with_its_deadline_and_stays_marked(
    place: Place,
) -> None:
    place.server.call("DELETE", place.pod("b"), {"gracePeriodSeconds": 60})
    place.is_("b", "DRAINING", "DRAINED")
    mark = place.node("b").mark
    assert mark is not None and mark.deadline is not None
    place.server.call("DELETE", place.pod("b"), {"gracePeriodSeconds": 0})
    place.set_node("a", unschedulable=True)
    place.is_("a", "CORDONED")
    assert place.node("b").mark is not None, "a pod that is gone opens no node"


def test_the_watcher_ends_when_it_is_told_to(place: Place) -> None:
    assert place.watcher is not None
    place.watcher.send_signal(signal.SIGTERM)
    assert place.watcher.wait(30) == 0, place.log()
