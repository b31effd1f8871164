"""Faults that drills put in on the node where they happen. Only processes of that node's raylet are
ever touched."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Collection
from pathlib import Path

import psutil

from train_fn.node.node_dir import snapshots_dir


def find_raylet(node_id: str) -> psutil.Process | None:
    """The raylet of a node, by its command line: a machine may run several."""
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"] or []
        if cmdline and Path(cmdline[0]).name == "raylet" and f"--node_id={node_id}" in cmdline:
            return process
    return None


def signal_ranks(node_id: str, pids: Collection[int], signal_number: int) -> str | None:
    """Send a signal to ranks of this node; why not, where that could not be done. Nothing is sent
    unless all of them are there."""
    raylet = find_raylet(node_id)
    if raylet is None:
        return f"no raylet of node {node_id} runs here"
    try:
        workers = _workers(raylet)
        ranks = [psutil.Process(pid) for pid in pids]
        for rank in ranks:
            if rank.pid not in workers:
                return (
                    f"process {rank.pid} on node {node_id} is not one of its workers; the rank "
                    "has gone"
                )
        for rank in ranks:
            rank.send_signal(signal_number)
    except psutil.Error as exc:
        return f"a rank on node {node_id} cannot be reached: {exc}"
    return None


def _workers(raylet: psutil.Process) -> set[int]:
    """Pids of the processes below a raylet, and of those forked elsewhere for which one of them
    stands, holding a pidfd of it."""
    below = {child.pid for child in raylet.children(recursive=True)}
    held = set()
    for pid in below:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
                with contextlib.suppress(OSError):
                    held |= {
                        int(line.split()[1])
                        for line in entry.read_text().splitlines()
                        if line.startswith("Pid:")
                    }
    return below | held - {raylet.pid}


def kill_ranks(run_id: str, node_id: str, pids: Collection[int]) -> str | None:
    """SIGKILL to ranks that were stopped before, and what earlier attempts left in this machine's
    shared memory removed."""
    shutil.rmtree(snapshots_dir(run_id), ignore_errors=True)
    return signal_ranks(node_id, pids, signal.SIGKILL.value)


def kill_raylet(node_id: str) -> str | None:
    """SIGKILL to a node's raylet: its workers, this one too, end with it. Why not, where that could
    not be done."""
    raylet = find_raylet(node_id)
    if raylet is None:
        return f"no raylet of node {node_id} runs here"
    try:
        raylet.kill()
    except psutil.Error as exc:
        return f"the raylet of node {node_id} cannot be killed: {exc}"
    return None
