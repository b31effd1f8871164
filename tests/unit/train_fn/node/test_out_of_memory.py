"""What the kernel says of a process that it killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from train_fn.node import memory
from train_fn.node.memory import look_for_oom, oom_kills, oom_line

KERNEL_LOG = """6,1,100,-;eth0: link up
4,2,200,-;Memory cgroup out of memory: Killed process 41 (python) total-vm:1kB
3,3,300,-;Out of memory: Killed process 4242 (ray::train) total-vm:9000kB, anon-rss:8000kB, UID:0
"""


def test_the_kernel_s_line_of_that_process_alone(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(KERNEL_LOG)
    assert (oom_line(4242, log) or "").startswith("Out of memory: Killed process 4242 (ray::train)")
    assert (oom_line(41, log) or "").startswith("Memory cgroup out of memory")
    assert oom_line(4, log) is None and oom_line(1, tmp_path / "none") is None


def test_kills_are_counted_from_when_the_rank_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "oom_line", lambda pid: None)
    monkeypatch.setattr(memory, "oom_kills", lambda: 3)
    assert look_for_oom(1, 3) is None and look_for_oom(1, None) is None
    assert look_for_oom(1, 2) == {"oom_line": None, "oom_kills": 1}
    monkeypatch.setattr(memory, "oom_line", lambda pid: "Killed process 1 (x)")
    assert look_for_oom(1, None) == {"oom_line": "Killed process 1 (x)", "oom_kills": None}


def test_this_machine_can_be_asked() -> None:
    kills = oom_kills()
    assert kills is None or kills >= 0


def test_the_count_of_a_cgroup(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nmax 5\noom 2\noom_kill 7\noom_group_kill 1\n")
    assert memory._count_in(events) == 7
    assert memory._count_in(tmp_path / "none") is None
