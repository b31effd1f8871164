"""A look at the cluster's nodes joins what Ray says of them with the service's marks."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import ray

from storage.cluster import MarkedNode, encode_marks, write_marks_file
from storage.filesystem import Storage
from train_fn.ray_train import scaling
from train_fn.recovery.links import SlowNodes
from train_fn.recovery.marks import MarksReader
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

pytest_plugins = ["tests.support.storage_fixtures"]


def test_marks_and_ray_s_own_drain_show_on_the_nodes(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        said = [
            {
                "NodeID": name,
                "Alive": name != "dead",
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": port,
                "Resources": {},
            }
            for name in ("open", "cordoned", "drained", "by_ray", "dead")
        ]
        monkeypatch.setattr(ray, "nodes", lambda: said)
        state = SimpleNamespace(
            available_resources_per_node=dict,
            get_draining_nodes=lambda: {"by_ray": 0, "drained": 90_000},
        )
        monkeypatch.setattr(scaling, "cluster_state", state)
        marks = [
            MarkedNode("cordoned", "cordoned", None, "ann", 1.0),
            MarkedNode("drained", "draining", None, "ann", 1.0, 70.0),
        ]
        write_marks_file(
            local_storage, encode_marks([*marks, MarkedNode("gone", "cordoned", None, "ann", 1.0)])
        )
        seen = scaling.read_nodes(5.0, MarksReader(local_storage))
    assert {
        view.node_id: (view.cordoned, view.draining, view.reachable, view.usable) for view in seen
    } == {
        "open": (False, False, True, True),
        "cordoned": (True, False, True, False),
        "drained": (False, True, True, False),
        "by_ray": (False, True, True, False),
    }
    deadlines = {view.node_id: view.drain_deadline for view in seen}
    assert deadlines == {"open": None, "cordoned": None, "drained": 70.0, "by_ray": None}, (
        "the earlier of both words"
    )


A = NodeView("a", "10.0.0.1", 1, {}, {})
B = NodeView("b", "10.0.0.2", 1, {}, {})
HEAD = NodeView("head", "10.0.0.3", 1, {}, {}, is_head=True)


class Seen:
    """The nodes of one run's controller, at a time that the test sets."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.num_reads = 0.0, 0
        self.views: tuple[NodeView, ...] = (A, B, HEAD)
        monkeypatch.setattr(scaling, "node_reader", lambda timeout_s, storage: self._read)
        monkeypatch.setattr(scaling, "time", SimpleNamespace(monotonic=lambda: self.now))
        settings = RecoverySettings(apart_s=60.0, resize_interval_s=1.0)
        self.nodes = scaling.LiveNodes(settings, storage, SlowNodes(moves=False))

    def _read(self) -> tuple[NodeView, ...]:
        self.num_reads += 1
        return self.views

    def excluded(self) -> list[str]:
        return [node.node_id for node in self.nodes.read() if node.cordoned]


@pytest.fixture
def seen(local_storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(local_storage, monkeypatch)


def test_an_excluded_node_gets_no_ranks_for_a_while(seen: Seen) -> None:
    seen.nodes.exclude(["b"])
    seen.now = 59.0
    assert seen.excluded() == ["b"]
    seen.now = 61.0
    assert seen.excluded() == []


def test_nodes_that_were_just_read_are_not_read_again(seen: Seen) -> None:
    seen.nodes.read()
    seen.now = 1.9
    assert seen.nodes.recent() == seen.views and seen.num_reads == 1
    seen.now = 2.0
    seen.nodes.recent()
    assert seen.num_reads == 2
