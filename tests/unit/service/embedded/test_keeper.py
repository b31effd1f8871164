"""The keeper of an embedded cluster where a node does not start: the others are there, and its
place is tried again."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from ray._private.parameter import RayParams

from service.cluster.cluster_view import ClusterNote, NodeNote, read_note
from service.embedded import keeper as keeper_module
from service.embedded.cluster import agent_ports
from service.embedded.keeper import Keeper
from service.embedded.processes import CLUSTER_DIR_VARIABLE
from service.embedded.supervisor import NodeReturns


def node(slot: int, pids: tuple[int, ...] = ()) -> NodeNote:
    return NodeNote(f"node-{slot}", slot == 0, slot, os.getpid(), pids)


def test_the_named_ports_are_free_and_no_two_nodes_have_the_same() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as taken:
        found = []
        for slot in range(4):
            ports = agent_ports(slot, 4)
            assert set(ports) <= set(inspect.signature(RayParams).parameters)
            found += ports.values()
        assert len(found) == len(set(found)) == 16
        assert all(20_000 <= port < max(lowest, 25_000) for port in found)
        taken.bind(("127.0.0.1", found[0]))
        for _ in range(3):
            assert found[0] not in agent_ports(0, 4).values()


class Slow(Keeper):
    """A cluster on a machine that is so busy that the raylets in some places are not there in time,
    at first."""

    late: ClassVar[list[int]] = []
    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def _start_node(self, slot: int) -> NodeNote:
        if slot in self.late:
            self.late.remove(slot)
            command = [
                sys.executable,
                "-c",
                "import time; time.sleep(60)",
                f"{self._note.temp_dir}/n{slot}.0/raylet",
            ]
            self.left.append(
                subprocess.Popen(
                    command, env={**os.environ, CLUSTER_DIR_VARIABLE: self._note.temp_dir}
                )
            )
            raise Exception("The current node timed out during startup.")  # as Ray says it
        return node(slot)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    temp_dir = tmp_path / "cluster"
    temp_dir.mkdir()
    pid = os.getpid()
    note = ClusterNote("ready", pid, str(temp_dir), 3, 1)
    note = replace(note, gcs_pid=pid, dashboard_pid=pid, fork_server_pid=pid, nodes=(node(0),))
    monkeypatch.setattr(keeper_module, "lives", lambda *_: True)
    monkeypatch.setattr(Slow, "left", [])
    return Slow(tmp_path / "cluster.json", note)


def test_a_node_that_does_not_start_takes_no_other_along_and_is_tried_again(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "late", [2])
    slow._fill()
    note = read_note(slow._note_path)
    assert note is not None and [each.slot for each in note.nodes] == [0, 1, 3]
    assert [process.wait(60) for process in slow.left] == [-9], "what Ray had begun for it is ended"

    assert slow.tick()
    assert len(slow._note.nodes) == 3, "not at once"
    assert slow._note.coming_back, "and the note says when"
    slow._returns._now = lambda: 1e9
    assert slow.tick()
    assert [each.slot for each in slow._note.nodes] == [0, 1, 2, 3]
    assert slow._note.coming_back == () and slow._returns.next_in_s() == float("inf")


def test_what_does_not_start_is_tried_again_for_two_minutes_and_a_wrong_setting_ends_it(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keeper_module.GIVE_UP_S >= 120
    monkeypatch.setattr(keeper_module, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(keeper_module, "RETRY_S", 0.0)
    for error, is_tried_again in ((TimeoutError("no port file"), True), (ValueError("x"), False)):
        left: list[str] = []
        waits: list[str | None] = []

        def start(error: Exception = error, waits: list[str | None] = waits) -> None:
            found = read_note(slow._note_path)
            waits.append(found and found.waiting_for)
            raise error

        with pytest.raises(type(error)):
            slow._patiently("the head", start, lambda left=left: left.append("cleared"))
        assert (len(waits) > 2) == is_tried_again and len(left) == len(waits) - 1
        assert waits[0] == "the head to start"
        assert not is_tried_again or "the last one with TimeoutError" in str(waits[1])


def test_the_note_of_a_newer_or_older_keeper_is_read(slow: Slow) -> None:
    slow._publish()
    kept = json.loads(slow._note_path.read_text())
    del kept["waiting_for"]
    slow._note_path.write_text(json.dumps(kept | {"makes_way": True}))
    assert read_note(slow._note_path) == slow._note, "else a service ends the cluster that runs"


def test_a_keeper_that_takes_over_brings_back_what_was_dead_before_it(slow: Slow) -> None:
    now = 1000.0
    slow._returns = NodeReturns(15.0, lambda: now)
    slow._note = replace(slow._note, nodes=(node(0), node(1), node(3)))
    slow.adopt()
    note = read_note(slow._note_path)
    assert note is not None and len(note.coming_back) == 1
    assert slow.tick() and [each.slot for each in slow._note.nodes] == [0, 1, 3]
    now += 15
    assert slow.tick() and [each.slot for each in slow._note.nodes] == [0, 1, 2, 3]


def test_a_dead_node_comes_back_after_a_while_and_not_while_the_cluster_ends(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    slow._returns = NodeReturns(15.0, lambda: now)
    slow._note = replace(
        slow._note, nodes=(node(0), node(1), replace(node(2), raylet_pid=-1), node(3))
    )
    monkeypatch.setattr(keeper_module, "lives", lambda pid, _: pid != -1)
    assert slow.tick()
    assert [each.slot for each in slow._note.nodes] == [0, 1, 3]
    note = read_note(slow._note_path)
    assert note is not None and len(note.coming_back) == 1
    now += 14.9
    assert slow.tick() and len(slow._note.nodes) == 3
    now += 0.2
    slow._stopping = True
    assert slow.tick() and len(slow._note.nodes) == 3
    slow._stopping = False
    assert slow.tick()
    assert [each.slot for each in slow._note.nodes] == [0, 1, 2, 3]
    note = read_note(slow._note_path)
    assert note is not None and note.coming_back == ()
