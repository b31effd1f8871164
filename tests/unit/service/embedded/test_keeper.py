"""The keeper of an embedded cluster where a node does not start: the others are there, and its
place is tried again."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from ray._private.parameter import RayParams

from service.cluster.cluster_view import ClusterNote, NodeNote, read_note
from service.embedded import keeper as keeper_module
from service.embedded.cluster import agent_ports, cores_of
from service.embedded.keeper import Keeper
from service.embedded.precedence import SUBMISSION_S
from service.embedded.processes import CLUSTER_DIR_VARIABLE, started_at
from service.embedded.supervisor import NodeReturns


def node(slot: int, pids: tuple[int, ...] = ()) -> NodeNote:
    return NodeNote(f"node-{slot}", slot == 0, slot, os.getpid(), 0.0, 1, pids)


class Counting(Keeper):
    """A cluster that notes what begins, ends and gives way, in this order."""

    said: ClassVar[list[str]] = []
    running: ClassVar[list[int]] = []
    most: ClassVar[list[int]] = []
    late: ClassVar[list[int]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def _start_fork_server(self) -> None:
        pass

    def _start_node(self, slot: int) -> NodeNote:
        with self.lock:
            self.running.append(slot)
            self.most.append(len(self.running))
        time.sleep(0.05)  # the others begin meanwhile
        with self.lock:
            self.running.remove(slot)
        if slot in self.late:
            self.late.remove(slot)
            raise Exception("The current node timed out during startup.")
        self.said.append(f"node {slot}")
        return node(slot)


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    pid = os.getpid()
    note = ClusterNote("starting", pid, started_at(pid), str(tmp_path), 4, 1)
    with_head = replace(note, gcs_pid=pid, dashboard_pid=pid, nodes=(node(0, pids=(1, 2)),))
    monkeypatch.setattr(keeper_module.cluster, "start_head", lambda _, names_ports: with_head)
    monkeypatch.setattr(keeper_module, "lives", lambda pid, _: pid is not None)
    for name in ("said", "running", "most", "late"):
        monkeypatch.setattr(Counting, name, [])
    keeper = Counting(tmp_path / "cluster.json", note)
    monkeypatch.setattr(
        keeper._precedence, "give_way", lambda pids: keeper.said.append(f"{pids} give way")
    )
    return keeper


def test_the_head_gives_way_once_the_nodes_that_wait_for_it_are_up(counting: Counting) -> None:
    counting.start()
    assert sorted(counting.said[:4]) == ["node 1", "node 2", "node 3", "node 4"]
    assert counting.said[4:] == ["(1, 2) give way"]
    assert max(counting.most) == 4, "side by side"


def test_after_a_late_node_fewer_are_started_side_by_side(counting: Counting) -> None:
    counting.late.extend((1, 2, 3, 4))
    counting.start()
    assert [each.slot for each in counting._note.nodes] == [0, 1, 2, 3, 4]
    assert max(counting.most[:4]) == 4 and max(counting.most[4:]) == 2
    counting.late.append(1)
    for _ in range(2):
        counting._note = replace(counting._note, nodes=counting._note.nodes[:1])
        counting.most.clear()
        counting._fill()
    assert set(counting.most) == {1}, "never none"


def test_agents_get_their_ports_once_a_raylet_did_not_wait_for_them(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[tuple[int, bool]] = []

    def start_node(note: ClusterNote, slot: int, *, names_ports: bool) -> NodeNote:
        named.append((slot, names_ports))
        if slot == 2 and not names_ports:
            raise Exception("The current node timed out during startup.")
        return node(slot)

    monkeypatch.setattr(keeper_module.cluster, "start_node", start_node)
    monkeypatch.setattr(Counting, "_start_node", Keeper._start_node)
    counting._start_head()
    counting._fill()
    counting._fill()
    assert sorted(named) == [(1, False), (2, False), (2, True), (3, False), (4, False)]


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


def test_no_node_is_started_without_the_head_that_it_would_wait_for(counting: Counting) -> None:
    counting._note = replace(counting._note, gcs_pid=None)
    counting._fill()
    assert counting.most == []


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
    note = ClusterNote("ready", pid, started_at(pid), str(temp_dir), 3, 1)
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


def test_the_death_of_a_node_lets_what_recovers_run(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(slow._precedence, "let_run", lambda: asked.append("now"))
    slow._note = replace(slow._note, nodes=(node(0), replace(node(1), raylet_pid=-1)))
    assert slow.tick()
    assert not asked, "all live"
    monkeypatch.setattr(keeper_module, "lives", lambda pid, _: pid != -1)
    assert slow.tick()
    assert asked == ["now"] and len(slow._note.nodes) == 1


def test_the_keeper_sleeps_until_a_process_ends_or_a_signal_comes(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_INTERVAL_S", 600.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as raylet:
        slow._note = replace(slow._note, nodes=(node(0), replace(node(1), raylet_pid=raylet.pid)))
        waiting = threading.Thread(target=slow._wait, daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "there is nothing to see"
        raylet.kill()
        waiting.join(60)
        assert not waiting.is_alive()
    slow._wait()  # the same process, which was waited for
    slow._note = replace(slow._note, nodes=(node(0),))
    slow._on_signal(signal.SIGUSR1, None)
    slow._wait()
    assert slow._refill
    slow._returns = NodeReturns(0.1)
    slow._returns.died(1)
    slow._wait()
    assert slow._returns.due() == [1]


def test_nodes_have_cores_of_their_own_where_they_take_them_all(slow: Slow) -> None:
    """Three nodes of one CPU, then of two."""
    one, two = slow._note, replace(slow._note, cpus_per_node=2)
    assert [list(cores_of(slot, one, [0, 2, 5])) for slot in (1, 2, 3)] == [
        [0],
        [2],
        [5],
    ]
    assert [list(cores_of(slot, two, range(6))) for slot in (1, 2, 3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    for cores in ([0, 1], [0, 1, 2, 3]):
        assert list(cores_of(1, one, cores)) == [], "too few, or some to spare"


@pytest.mark.slow
def test_a_machine_on_which_no_node_starts_in_time_gets_a_second_try(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "late", [1, 2, 3])
    slow._fill_first()
    assert [each.slot for each in slow._note.nodes] == [0, 1, 2, 3]

    slow._note = replace(slow._note, nodes=(node(0),))
    monkeypatch.setattr(slow, "late", [1, 1, 2, 2, 3, 3])
    slow._fill_first()
    assert [each.slot for each in slow._note.nodes] == [0, 1, 2, 3], (
        "and a third: it is given up by the clock, not by tries"
    )
    assert [process.wait(60) for process in slow.left] == [-9] * 9


def test_control_processes_run_beside_the_ranks_once_a_run_is_submitted(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting.start()
    let_run: list[float] = []
    monkeypatch.setattr(counting._precedence, "let_run", let_run.append)
    assert counting.tick() and let_run == []
    counting._on_signal(signal.SIGUSR2, None)
    assert counting.tick() and counting.tick() and let_run == [SUBMISSION_S]
