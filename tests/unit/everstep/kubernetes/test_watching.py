"""List and watch as Kubernetes's API does them over HTTP: pages, bookmarks, 410, broken streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.client.client import Client
from everstep.client.transport import Timing
from everstep.errors import AuthError, ServiceError, Unavailable
from everstep.kubernetes.api import Access, Gone, KubeNode, KubernetesApi, RayPod
from everstep.kubernetes.watcher import MarkMirror, NodeWatcher
from tests.support.scripted_http import Answer, Handler, ScriptedServer, reply, scripted

NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/everstep/pods"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as found:
        yield found


@pytest.fixture
def api(server: ScriptedServer) -> Iterator[KubernetesApi]:
    found = KubernetesApi(Access(server.url))
    yield found
    found.close()


class World:
    """A mirror of nodes whose pauses take no time, and what it has said."""

    def __init__(self, api: KubernetesApi) -> None:
        self.said: list[str] = []
        self.pauses: list[float] = []
        self.changed = threading.Event()
        timing = Timing(now=lambda: 0.0, sleep=self.pauses.append, jitter=lambda: 1.0)
        self.mirror = MarkMirror(
            api, NODES, KubeNode.of, self.changed, say=self.said.append, timing=timing
        )

    @property
    def cordoned(self) -> dict[str, bool]:
        assert self.mirror.items is not None
        return {name: node.unschedulable for name, node in self.mirror.items.items()}


@pytest.fixture
def world(api: KubernetesApi) -> World:
    return World(api)


def raw(name: str, version: int, cordoned: bool = False) -> dict[str, Any]:
    spec = {"unschedulable": True} if cordoned else {}
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "spec": spec}


def listed(version: int, *items: dict[str, Any], **metadata: str) -> Answer:
    return reply({"metadata": {"resourceVersion": str(version), **metadata}, "items": items})


def watched(*changes: tuple[str, dict[str, Any]], broken: bool = False) -> Answer:
    def answer(handler: Handler) -> None:
        handler.begin_stream("application/json")
        for kind, item in changes:
            handler.chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")
        if not broken:
            handler.end()

    return answer


def status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "message": message}


def bookmark(version: int) -> tuple[str, dict[str, Any]]:
    return "BOOKMARK", {"metadata": {"resourceVersion": str(version)}}


def asked(server: ScriptedServer) -> list[str]:
    """What was asked for: ``list``, or the version from which a watch began."""
    found = []
    for request in server.to(NODES):
        query = dict(pair.split("=", 1) for pair in request.path.partition("?")[2].split("&"))
        found.append(query["resourceVersion"] if "watch" in query else "list")
    return found


def test_a_list_of_several_pages_is_whole_and_a_watch_goes_on_from_it(
    server: ScriptedServer, world: World
) -> None:
    server.script[NODES] = [
        listed(7, raw("a", 1), **{"continue": "more"}),
        listed(7, raw("b", 2, cordoned=True)),
        watched(
            ("MODIFIED", raw("a", 8, cordoned=True)),
            ("ADDED", raw("c", 9)),
            ("DELETED", raw("b", 10)),
            bookmark(20),
        ),
        watched(("MODIFIED", raw("a", 21))),
    ]
    world.mirror.turn()
    assert world.cordoned == {"a": True, "c": False} and world.changed.is_set()
    world.mirror.turn()
    assert world.cordoned == {"a": False, "c": False}
    assert asked(server) == ["list", "list", "7", "20"]
    assert world.pauses == [] and world.said == []


def test_a_version_that_the_api_has_forgotten_is_listed_anew(
    server: ScriptedServer, world: World
) -> None:
    server.script[NODES] = [
        listed(7, raw("a", 1)),
        reply(status(410, "too old resource version"), 410),
        listed(50, raw("b", 40)),
        watched(bookmark(60), ("ERROR", status(410, "expired"))),
        listed(90, raw("c", 80)),
        watched(bookmark(91)),
    ]
    for seen in ({"a": False}, {"b": False}, {"c": False}):
        world.mirror.turn()
        assert world.cordoned == seen
    assert asked(server) == ["list", "7", "list", "50", "list", "90"]
    assert len(world.pauses) == 2 and all("listing anew" in line for line in world.said)


def test_a_stream_that_breaks_is_taken_up_where_it_broke(
    server: ScriptedServer, world: World
) -> None:
    server.script[NODES] = [
        listed(7, raw("a", 1)),
        watched(("MODIFIED", raw("a", 8, cordoned=True)), broken=True),
        reply(status(503, "shutting down"), 503),
        watched(("MODIFIED", raw("a", 9))),
    ]
    world.mirror.turn()
    assert world.cordoned == {"a": True}
    world.mirror.turn()
    world.mirror.turn()
    assert world.cordoned == {"a": False}
    assert asked(server) == ["list", "7", "8", "8"]
    assert world.pauses == [0.2, 0.4], "a failure after a change is the first one again"


def test_a_watch_that_ends_at_once_is_no_loop_without_a_pause(
    server: ScriptedServer, world: World
) -> None:
    server.script[NODES] = [listed(7), watched()]
    for _ in range(4):
        world.mirror.turn()
    assert world.pauses == [0.2, 0.4, 0.8]


def test_an_object_that_cannot_be_read_is_named_and_left_out(
    server: ScriptedServer, world: World
) -> None:
    broken = {"metadata": {"name": "odd"}, "spec": {"taints": ["?"]}}
    server.script[NODES] = [listed(7, raw("a", 1), broken), watched(bookmark(8))]
    world.mirror.turn()
    assert world.cordoned == {"a": False} and "left out" in world.said[0]


def test_a_value_that_cannot_be_read_ends_no_thread(
    server: ScriptedServer, api: KubernetesApi
) -> None:
    pod = {
        "metadata": {"name": "odd"},
        "spec": {"tolerations": [{"tolerationSeconds": "soon"}]},
        "status": {"podIP": "10.0.0.1"},
    }
    server.script[PODS] = [listed(7, pod), watched(bookmark(8))]
    said: list[str] = []
    mirror = MarkMirror(api, PODS, RayPod.of, threading.Event(), say=said.append)
    mirror.turn()
    assert mirror.items == {} and mirror.problem is None and "left out" in said[0]


def test_a_refusal_ends_the_mirror_and_names_the_right(
    server: ScriptedServer, world: World
) -> None:
    message = 'nodes is forbidden: User "x" cannot list resource "nodes"'
    server.script[NODES] = [reply(status(403, message), 403)]
    world.mirror.turn()
    assert isinstance(world.mirror.problem, AuthError) and message in world.mirror.problem.message
    assert "node-watcher.yaml" in world.mirror.problem.message and world.changed.is_set()


@pytest.mark.parametrize(
    "answers",
    [
        [reply({"metadata": {"resourceVersion": "1"}, "items": [{"spec": {}}]})],
        [listed(1), watched(("ADDED", {"spec": {}}))],
    ],
)
def test_an_answer_of_another_shape_ends_the_mirror_and_no_thread_dies_in_silence(
    server: ScriptedServer, world: World, answers: list[Answer]
) -> None:
    server.script[NODES] = answers
    world.mirror.turn()
    assert isinstance(world.mirror.problem, ServiceError) and world.changed.is_set()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(status(429, "later"), 429), Unavailable),
        (reply(status(404, "no such path"), 404), ServiceError),
        (lambda handler: handler.send(200, b"<html>a proxy</html>"), ServiceError),
    ],
)
def test_errors_of_the_api_are_those_of_this_package(
    server: ScriptedServer, api: KubernetesApi, answer: Answer, error: type[Exception]
) -> None:
    server.script[NODES] = [answer]
    with pytest.raises(error):
        api.list(NODES)


def test_an_error_within_a_watch_is_one_of_these(
    server: ScriptedServer, api: KubernetesApi
) -> None:
    server.script[NODES] = [
        watched(("ERROR", status(500, "storage is away"))),
        watched(("ERROR", status(410, "too old"))),
    ]
    for error in (Unavailable, Gone):
        with pytest.raises(error):
            list(api.watch(NODES, "1"))


def test_a_cordon_reaches_the_service_once(server: ScriptedServer, api: KubernetesApi) -> None:
    """Both ends over HTTP: what Kubernetes sends, and what the service is asked for."""
    ray = {
        "id": "f" * 56,
        "hostname": "everstep-steady-1",
        "ip": "10.0.0.1",
        "state": "ALIVE",
        "is_head": False,
        "mark": None,
        "resources_total": {"CPU": 1.0},
        "runs": [],
    }
    cluster = {
        "available": True,
        **dict.fromkeys(("address", "dashboard_url", "ray_version")),
        "nodes": [ray],
    }
    mark = {
        "reason": "Kubernetes: node a is cordoned",
        "by": "node-watcher",
        "at": "2026-01-02T00:00:00Z",
        "deadline": None,
    }
    cordoned = {**ray, "state": "CORDONED", "mark": mark}
    pod = {
        "metadata": {"name": "everstep-steady-1"},
        "spec": {"nodeName": "a"},
        "status": {"podIP": "10.0.0.1", "phase": "Running"},
    }
    server.script = {
        NODES: [listed(7, raw("a", 1, cordoned=True)), watched(bookmark(8))],
        PODS: [listed(7, pod), watched(bookmark(8))],
        "/v1/cluster": [reply(cluster), reply({**cluster, "nodes": [cordoned]})],
        f"/v1/cluster/nodes/{ray['id']}/cordon": [reply(cordoned)],
    }
    said: list[str] = []
    with Client(server.url, "token") as client:
        watcher = NodeWatcher(client, api, "everstep", "ray.io/cluster=everstep", say=said.append)
        assert watcher.tick() == (), "nothing before both are listed"
        watcher.nodes.turn()
        assert watcher.tick() == ()
        watcher.pods.turn()
        assert [order.act for order in watcher.tick()] == ["cordon"]
        assert watcher.tick() == ()
    [order] = server.to(f"/v1/cluster/nodes/{ray['id']}/cordon")
    assert json.loads(order.body) == {"reason": mark["reason"]}
    assert "labelSelector=ray.io%2Fcluster%3Deverstep" in server.to(PODS)[0].path
    assert said == [f"cordon {ray['id']}: {mark['reason']}"]
