"""The keeper of an embedded Ray cluster: a process that starts head and nodes, watches them, and
ends them all on SIGTERM.

``python -m service.embedded.keeper HOME --temp-dir DIR --nodes N --cpus-per-node C`` runs apart
from the service, so that a killed service leaves the cluster and its runs alone.

The keeper watches processes by pid, not through Ray's handles. If it is killed, a keeper with
``--adopt`` continues from cluster.json.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from service.cluster.cluster_view import ClusterNote, NodeNote, read_note, write_note
from service.embedded import cluster
from service.embedded.processes import (
    end_members,
    end_node,
    give_way,
    kill_all,
    lives,
    reap_children,
    wait_for_end,
)
from service.embedded.supervisor import NodeReturns

GIVE_UP_S: Final = 150.0
"""Shortest time for tries to start a part of the cluster, however often it fails."""
RETRY_S: Final = 3.0
_LASTING: Final = (
    ValueError,
    TypeError,
    LookupError,
    ImportError,
    AttributeError,
    FileNotFoundError,
    PermissionError,
)
"""Errors of a wrong setting or installation, which every try would raise."""
LOOK_INTERVAL_S = 10.0
"""Seconds between two checks of all processes, for ends that raise no event."""
STOP_GRACE_S = 1.0

log = logging.getLogger("keeper")


class Keeper:
    """Starts, watches and ends the nodes of one cluster, and keeps cluster.json up to date.

    Args:
        note_path: Path of cluster.json.
        note: Its first content.
        return_s: Seconds after which a dead node is started again; 0 leaves it dead.
    """

    def __init__(self, note_path: Path, note: ClusterNote, return_s: float = 0.0) -> None:
        self._note_path = note_path
        self._note = note
        self._at_once = max(1, note.num_nodes)
        """How many nodes are started side by side."""
        self._was_late = False
        """Whether a node, or the head, did not start in time."""
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self._refill = False
        self._returns = NodeReturns(return_s)

    def install_signals(self) -> None:
        """Let SIGTERM and SIGINT end the cluster, and SIGUSR1 replace each dead node."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def start(self) -> None:
        """Start the head, then all nodes at once. cluster.json then says ``ready``."""
        self._publish()
        began = time.monotonic()
        self._start_fork_server()
        self._patiently("the head", self._start_head, self._clear_head)
        log.info(
            "head is up after %.1f s; dashboard at %s",
            time.monotonic() - began,
            self._note.dashboard_url,
        )
        self._fill_first()
        # Not before: nodes that start would keep the head, which they wait for, from its turn.
        if self._note.head is not None:
            give_way(self._note.head.pids)
        self._note = replace(self._note, state="ready")
        self._publish()
        log.info("cluster is ready after %.1f s", time.monotonic() - began)

    def adopt(self) -> None:
        """Take over the cluster of a keeper that died. Slots without a node get one later."""
        for slot in self._free_slots():
            end_node(self._note.temp_dir, slot)  # The other keeper may have begun to start it.
            self._returns.died(slot)
        self._publish()
        log.info("took over the cluster at %s", self._note.address)

    def watch(self) -> bool:
        """Watch the cluster until a stop. Return False once the head is lost."""
        while not self._stopping:
            self._wait()
            if not self.tick():
                return False
        return True

    def _wait(self) -> None:
        """Wait until a process of the cluster ends, a signal comes, or the next check is due."""
        timeout_s = min(LOOK_INTERVAL_S, self._returns.next_in_s())
        if not wait_for_end(self._note.lasting_pids, self._woken, timeout_s):
            return
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1024)

    def tick(self) -> bool:
        """Check every node once. Return False if the head is lost, and so the cluster."""
        reap_children()
        note = self._note
        heads = (note.gcs_pid, note.dashboard_pid, note.head.raylet_pid if note.head else None)
        if lost := [pid for pid in heads if not lives(pid, note.temp_dir)]:
            log.error("the head is lost: process %s ended", ", ".join(map(str, lost)))
            return False
        dead = [node for node in note.nodes if not lives(node.raylet_pid, note.temp_dir)]
        if dead:
            for node in dead:
                wait_s = self._returns.died(node.slot)
                then = "stays so" if wait_s is None else f"is started again in {wait_s:.0f} s"
                log.warning("node %s in slot %d is dead and %s", node.node_id, node.slot, then)
                kill_all([pid for pid in node.pids if lives(pid, note.temp_dir)])
            self._note = replace(note, nodes=tuple(node for node in note.nodes if node not in dead))
            self._publish()
        if not lives(note.fork_server_pid, note.temp_dir) and not self._stopping:
            log.warning("the fork server is gone; starting another")
            self._start_fork_server()
        if not self._stopping:
            slots = self._free_slots() if self._refill else self._returns.due()
            self._refill = False
            self._fill(slots)
        return True

    def end(self) -> None:
        """End every process of the cluster and remove its files."""
        began = time.monotonic()
        count = end_members(self._note.temp_dir, grace_s=STOP_GRACE_S, without=(os.getpid(),))
        shutil.rmtree(self._note.temp_dir, ignore_errors=True)
        self._note_path.unlink(missing_ok=True)
        log.info("ended %d processes in %.1f s", count, time.monotonic() - began)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            self._refill = True
        else:
            self._stopping = True
        with contextlib.suppress(BlockingIOError):  # The pipe is full, so a wake-up is pending.
            os.write(self._wake, b"+")

    def _publish(self) -> None:
        self._note = replace(self._note, coming_back=self._returns.at())
        write_note(self._note_path, self._note)

    def _start_fork_server(self) -> None:
        pid = cluster.start_fork_server(self._note.temp_dir)
        self._note = replace(self._note, fork_server_pid=pid)
        self._publish()

    def _start_head(self) -> None:
        self._note = cluster.start_head(self._note, names_ports=self._was_late)
        self._publish()

    def _fill_first(self) -> None:
        """Start every node. If none starts in time, as on a very busy machine, try again."""

        def fill() -> None:
            self._fill()
            if (
                not self._stopping
                and self._note.num_nodes
                and all(node.is_head for node in self._note.nodes)
            ):
                raise RuntimeError("no node started; see the errors above")

        self._patiently("the first node", fill, lambda: None)

    def _patiently(self, what: str, start: Callable[[], None], clear: Callable[[], None]) -> None:
        """Call ``start`` until it succeeds, for at least GIVE_UP_S: a busy machine may need several
        tries. Say in cluster.json what is waited for.

        Raises the last error, and at once one that a wrong setting causes.

        Args:
            what: Name in messages, for example "the head".
            start: May raise anything.
            clear: Removes what a failed start left.
        """
        began, num_failed, so_far = time.monotonic(), 0, ""
        while True:
            self._note = replace(self._note, waiting_for=f"{what} to start{so_far}")
            self._publish()
            try:
                start()
                break
            except Exception as exc:
                num_failed += 1
                waited_s = time.monotonic() - began
                if self._stopping or isinstance(exc, _LASTING) or waited_s >= GIVE_UP_S:
                    raise
                problem = f"{type(exc).__name__}: {exc}"[:300]
                so_far = f": {num_failed} tries failed so far, the last one with {problem}"
                load = os.getloadavg()[0] / (os.cpu_count() or 1)
                log.warning(
                    "%s did not start (try %d, %.0f s so far, load of %.1f a core); trying again: "
                    "%s",
                    *(what, num_failed, waited_s, load, problem),
                )
            clear()
            select.select([self._woken], [], [], RETRY_S)
        self._note = replace(self._note, waiting_for=None)
        self._publish()

    def _clear_head(self) -> None:
        """End the processes of a head that did not start, and remove its directory.

        The fork server stays.
        """
        self._was_late = True
        keep = tuple(pid for pid in (os.getpid(), self._note.fork_server_pid) if pid is not None)
        end_members(self._note.temp_dir, grace_s=0, without=keep)
        reap_children()
        shutil.rmtree(Path(self._note.temp_dir) / cluster.HEAD_DIR, ignore_errors=True)
        self._note = replace(
            self._note, address=None, dashboard_url=None, gcs_pid=None, dashboard_pid=None, nodes=()
        )

    def _free_slots(self) -> list[int]:
        taken = {node.slot for node in self._note.nodes}
        return [slot for slot in range(1, self._note.num_nodes + 1) if slot not in taken]

    def _fill(self, slots: Collection[int] | None = None) -> None:
        """Start a node in every free slot, or those of ``slots``, in parallel. Those that do not
        start are tried later.

        Nodes that start side by side delay each other, and each of them has 60 s. So once one
        was late, half as many are started at once, and the ports of their agents are named.
        """
        free = [slot for slot in self._free_slots() if slots is None or slot in slots]
        if not free or self._stopping:
            return
        with ThreadPoolExecutor(min(len(free), self._at_once)) as pool:
            added = [node for node in pool.map(self._try_to_start_node, free) if node is not None]
        if len(added) < len(free):
            self._was_late, self._at_once = True, max(1, self._at_once // 2)
        up = {node.slot for node in added}
        for slot in free:
            self._returns.tried(slot, is_up=slot in up)
        nodes = sorted([*self._note.nodes, *added], key=lambda node: node.slot)
        self._note = replace(self._note, nodes=tuple(nodes))
        self._publish()
        for node in added:
            log.info("node %s is up in slot %d", node.node_id, node.slot)

    def _try_to_start_node(self, slot: int) -> NodeNote | None:
        """Start a node, or return None and leave nothing of it. A raylet has 60 s, which may be
        too short on a busy machine."""
        if self._stopping or not lives(self._note.gcs_pid, self._note.temp_dir):
            return None
        try:
            return self._start_node(slot)
        except Exception:
            log.exception("the node in slot %d did not start", slot)
        end_node(self._note.temp_dir, slot)
        return None

    def _start_node(self, slot: int) -> NodeNote:
        node = cluster.start_node(self._note, slot, names_ports=self._was_late)
        # Ranks inherit their priority from the raylet, so it keeps its own.
        give_way([pid for pid in node.pids if pid != node.raylet_pid])
        return node


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the cluster until SIGTERM (exit code 0) or the loss of the head (exit code 1)."""
    args = parse(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    note_path: Path = args.home / "cluster.json"
    # Drivers start in the directory of their node. Modules of another one could shadow ours.
    os.chdir(args.temp_dir)
    pid = os.getpid()
    note = read_note(note_path) if args.adopt else None
    note = note or ClusterNote("starting", pid, args.temp_dir, args.nodes, args.cpus_per_node)
    note = replace(note, keeper_pid=pid)
    keeper = Keeper(note_path, note, args.node_return_s)
    keeper.install_signals()
    ok = False
    try:
        keeper.adopt() if args.adopt else keeper.start()
        ok = keeper.watch()
    except Exception:
        log.exception("the cluster could not be kept")
    finally:
        keeper.end()
    return 0 if ok else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; ``argv`` None reads those of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m service.embedded.keeper",
        description="Start the nodes of a Ray cluster, watch them, and end them on SIGTERM.",
    )
    parser.add_argument("home", type=Path, help="the service's home directory")
    parser.add_argument(
        "--temp-dir", required=True, help="the cluster's own directory, which exists"
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus-per-node", type=int, required=True)
    parser.add_argument("--node-return-s", type=float, default=0.0)
    parser.add_argument(
        "--adopt", action="store_true", help="take over the running cluster of cluster.json"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
