"""Inject faults on this node for drills. Only processes of the node's raylet are touched."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Collection
from pathlib import Path

import psutil

from train_fn.node.node_dir import snapshots_dir


def find_raylet(node_id: str) -> psutil.Process | None:
    """Return the raylet of a node, found by its command line: a machine may run several."""
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"] or []
        if cmdline and Path(cmdline[0]).name == "raylet" and f"--node_id={node_id}" in cmdline:
            return process
    return None


def signal_ranks(node_id: str, pids: Collection[int], signal_number: int) -> str | None:
    """Send a signal to ranks of this node, if all of them are there. Return why it was not sent, or
    None."""
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
    """Return the pids of a raylet's descendants, and of forked workers that one of them represents
    and holds a pidfd of."""
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
    """Kill ranks that were stopped before, and remove the run's snapshots from this machine. Return
    why that failed, or None."""
    shutil.rmtree(snapshots_dir(run_id), ignore_errors=True)
    return signal_ranks(node_id, pids, signal.SIGKILL.value)


def kill_raylet(node_id: str) -> str | None:
    """Kill a node's raylet, with which its workers end, this one too. Return why that failed, or
    None."""
    raylet = find_raylet(node_id)
    if raylet is None:
        return f"no raylet of node {node_id} runs here"
    try:
        raylet.kill()
    except psutil.Error as exc:
        return f"the raylet of node {node_id} cannot be killed: {exc}"
    return None
