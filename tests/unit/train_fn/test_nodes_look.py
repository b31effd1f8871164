"""A look at the cluster's nodes joins what Ray says of them with the service's marks."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import ray

from storage.cluster.node_marks import NodeMark, encode_marks, write_marks_file
from storage.filesystem import Storage
from train_fn.ray_train import nodes
from train_fn.recovery.marks import MarksReader

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
        monkeypatch.setattr(nodes, "cluster_state", state)
        marks = [
            NodeMark("cordoned", "cordoned", None, "ann", 1.0),
            NodeMark("drained", "draining", None, "ann", 1.0, 70.0),
        ]
        write_marks_file(
            local_storage, encode_marks([*marks, NodeMark("gone", "cordoned", None, "ann", 1.0)])
        )
        seen = nodes.look_at_nodes(5.0, MarksReader(local_storage))
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
