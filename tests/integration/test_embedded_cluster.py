"""The embedded cluster with real raylets: started, adopted, broken, and gone without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.cluster.cluster_view import ClusterNote
from service.embedded.cluster import EmbeddedCluster
from service.embedded.processes import CONTROL_NICENESS, lives, members
from service.settings import Settings
from tests.support.service_process import wait_for


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    made = Settings(home=tmp_path, nodes=2, node_return_s=1.0)
    yield made
    EmbeddedCluster(made).stop()


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired, ChildProcessError):
        psutil.Process(pid).wait(5)


def node_ids(cluster: EmbeddedCluster) -> list[str]:
    note = cluster.note()
    return [node.node_id for node in note.nodes] if note else []


def alive_nodes(cluster: EmbeddedCluster, note: ClusterNote) -> dict[str, dict[str, float]]:
    """Resources of live nodes as the dashboard tells."""
    answer = httpx.get(
        f"{note.dashboard_url}/api/v0/nodes?detail=1",
        headers={"Authorization": f"Bearer {cluster.token()}"},
        timeout=10,
    )
    nodes = answer.raise_for_status().json()["data"]["result"]["result"]
    return {node["node_id"]: node["resources_total"] for node in nodes if node["state"] == "ALIVE"}


def test_a_cluster_lives_is_adopted_mended_and_ends_without_a_trace(settings: Settings) -> None:
    cluster = EmbeddedCluster(settings)
    note = cluster.ensure_running()
    assert [node.is_head for node in note.nodes] == [True, False, False]
    resources = alive_nodes(cluster, note)
    assert sorted(nodes.get("CPU", 0.0) for nodes in resources.values()) == [0.0, 1.0, 1.0], (
        "the head trains nothing"
    )

    # Whatever only keeps order gives way to ranks, which inherit from their node's raylet.
    niceness = {pid: psutil.Process(pid).nice() for node in note.nodes for pid in node.pids}
    raylets = {node.raylet_pid for node in note.nodes if not node.is_head}
    assert {niceness[pid] for pid in raylets} == {0}
    assert {value for pid, value in niceness.items() if pid not in raylets} == {CONTROL_NICENESS}

    # Ray's own authentication is on, and the token is the owner's.
    assert httpx.get(f"{note.dashboard_url}/api/v0/nodes", timeout=10).status_code == 401
    assert stat.S_IMODE(settings.ray_token_path.stat().st_mode) == 0o600

    # Everything listens on loopback only.
    pids = {process.pid for process in members(note.temp_dir)}
    assert {pid for node in note.nodes for pid in node.pids} <= pids
    listening = [
        c
        for pid in pids
        for c in psutil.Process(pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening and {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

    # A service that comes later finds it as it is.
    successor = EmbeddedCluster(settings)
    assert successor.ensure_running() == note

    # A node dies: it is gone from the note, and another one comes by itself.
    killed = note.nodes[1]
    kill(killed.raylet_pid)
    wait_for(lambda: killed.node_id not in node_ids(cluster), 120, "the note without the node")
    assert not any(lives(pid, note.temp_dir) for pid in killed.pids)
    wait_for(lambda: len(node_ids(cluster)) == 3, 120, "a new node in its place")

    # The keeper dies: the nodes do not notice, and a new keeper takes over.
    before = node_ids(cluster)
    kill(note.keeper_pid)
    assert not cluster.is_running()
    taken_over = EmbeddedCluster(settings).ensure_running()
    assert taken_over.keeper_pid != note.keeper_pid
    assert (taken_over.address, node_ids(cluster)) == (note.address, before)
    assert sorted(alive_nodes(cluster, taken_over)) == sorted(before)

    # Somebody reads a log meanwhile: not a process of the cluster, whatever it names and holds
    # open.
    with subprocess.Popen(
        ["tail", "-f", *Path(note.temp_dir).glob("head/session_2*/logs/gcs_server.out")],
        stdout=subprocess.DEVNULL,
    ) as reader:
        EmbeddedCluster(settings).stop()
        assert reader.poll() is None
        reader.kill()
    assert list(members(note.temp_dir)) == []
    assert not Path(note.temp_dir).exists()
    assert not settings.cluster_path.exists()


@pytest.mark.chaos
def test_what_a_head_and_a_keeper_leave_that_die_at_once_is_cleared(settings: Settings) -> None:
    """Nobody is left to clear up but the next service. A lost note does not hide what is left."""
    settings = settings.model_copy(update={"nodes": 1})  # two clusters are started
    first = EmbeddedCluster(settings).ensure_running()
    kill(first.keeper_pid)
    kill(first.gcs_pid)
    settings.cluster_path.unlink()
    second = EmbeddedCluster(settings).ensure_running()
    assert list(members(first.temp_dir)) == []
    assert not Path(first.temp_dir).exists()
    assert second.state == "ready"


@pytest.mark.chaos
def test_a_head_that_did_not_start_is_started_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``everstep serve`` ended with code 2 on a busy machine. The first try's processes must be
    gone, and the second's its own."""
    spawn = os.posix_spawn

    def spawn_failing(path: str, command: list[str], env: dict[str, str], **more: Any) -> int:
        return spawn(
            path, [*command[:2], "tests.integration.failing_head", *command[3:]], env, **more
        )

    monkeypatch.setattr(os, "posix_spawn", spawn_failing)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    cluster = EmbeddedCluster(settings.model_copy(update={"nodes": 1}))
    note = cluster.ensure_running()
    assert note.state == "ready" and note.waiting_for is None and len(note.nodes) == 2
    assert (
        sum(resources.get("CPU", 0.0) for resources in alive_nodes(cluster, note).values()) == 1.0
    )
    servers = [process.pid for process in members(note.temp_dir) if "gcs_server" in process.name()]
    assert servers == [note.gcs_pid], "nothing is left of the first try"
    assert "the head did not start (try 1" in settings.cluster_log_path.read_text()
