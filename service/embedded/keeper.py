"""The process that keeps an embedded Ray cluster: starts head and nodes, watches them, ends them
all on SIGTERM.

``python -m service.embedded.keeper HOME --temp-dir DIR --nodes N --cpus-per-node C`` runs apart
from the service, so that a killed service leaves the cluster and its runs alone. It is the only
module of the service that imports ray.

The cluster is watched by process id, not through Ray's handles: a keeper that was killed is
replaced by one with ``--adopt``, which goes on where cluster.json says.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
from ray._private.node import Node
from ray._private.parameter import RayParams

from service.cluster.cluster_note import ClusterNote, NodeNote, read_note, write_note
from service.embedded import worker_start
from service.embedded.environment import (
    HEAD_VARIABLES,
    NODE_CORES_VARIABLE,
    PRELOADED_MODULES,
    WORKER_NODE_VARIABLES,
)
from service.embedded.patience import start_patiently
from service.embedded.precedence import Precedence
from service.embedded.processes import end_members, lives, members, started_at

LOOK_INTERVAL_S = 10.0
"""Between two looks at processes whose end was not told."""
STOP_GRACE_S = 1.0
RETRY_S = 10.0
"""From a node that did not start to the next one in its place."""
OBJECT_STORE_BYTES = 100 * 1024 * 1024
LOOPBACK = "127.0.0.1"
HEAD_DIR = "head"
FORK_SOCKET = "fork.sock"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Of malloc's memory, where the system leaves the choice to programs. Source: glibc's manual,
"Memory Allocation Tunables"."""

log = logging.getLogger("keeper")


class Keeper:
    """Starts, watches and ends the nodes of one cluster, and keeps cluster.json true.

    Args:
        note_path: Where cluster.json lies.
        note: What it says at the beginning.
    """

    def __init__(self, note_path: Path, note: ClusterNote) -> None:
        self._note_path = note_path
        self._note = note
        self._precedence = Precedence(note.temp_dir)
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self._refill = False
        self._refill_at: float | None = None
        """When the places of nodes that did not start are tried again; by ``time.monotonic``."""

    def install_signals(self) -> None:
        """SIGTERM and SIGINT end the cluster; SIGUSR1 puts a new node in the place of each that
        died."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def start(self) -> None:
        """Bring up the head, then all nodes at once; cluster.json says ``ready`` at the end."""
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
        self._note = replace(self._note, state="ready")
        self._publish()
        log.info("cluster is ready after %.1f s", time.monotonic() - began)

    def adopt(self) -> None:
        """Take over what a keeper that died has left running."""
        self._publish()
        log.info("took over the cluster at %s", self._note.address)

    def watch(self) -> bool:
        """Until told to stop, or the head is lost. Returns whether the head was there to the
        end."""
        threading.Thread(target=self._precedence.keep, name="precedence", daemon=True).start()
        while not self._stopping:
            self._wait()
            if not self.tick():
                return False
        return True

    def _wait(self) -> None:
        """Until a process of the cluster ends, a signal comes, or it is time to look anyway:
        nothing wakes up meanwhile."""
        note = self._note
        pids = [
            note.gcs_pid,
            note.dashboard_pid,
            note.fork_server_pid,
            *(node.raylet_pid for node in note.nodes),
        ]
        look_in_s = LOOK_INTERVAL_S
        if self._refill_at is not None:
            look_in_s = min(look_in_s, max(0.0, self._refill_at - time.monotonic()))
        with contextlib.ExitStack() as opened:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            for pid in filter(None, pids):
                try:
                    pidfd = os.pidfd_open(pid)
                except ProcessLookupError:
                    return
                opened.callback(os.close, pidfd)
                poll.register(pidfd, select.POLLIN)
            poll.poll(1000 * look_in_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1024)

    def tick(self) -> bool:
        """Look once at every node; False when the head is lost, and the cluster with it."""
        _reap_children()
        note = self._note
        heads = (note.gcs_pid, note.dashboard_pid, note.head.raylet_pid if note.head else None)
        if lost := [pid for pid in heads if not lives(pid, note.temp_dir)]:
            log.error("the head is lost: process %s ended", ", ".join(map(str, lost)))
            return False
        dead = [node for node in note.nodes if not lives(node.raylet_pid, note.temp_dir)]
        if dead:
            for node in dead:
                log.warning("node %s is dead", node.node_id)
                _kill_pids([pid for pid in node.pids if lives(pid, note.temp_dir)])
            self._note = replace(note, nodes=tuple(node for node in note.nodes if node not in dead))
            self._publish()
        if not lives(note.fork_server_pid, note.temp_dir) and not self._stopping:
            log.warning("the fork server is gone; starting another")
            self._start_fork_server()
        overdue = self._refill_at is not None and time.monotonic() >= self._refill_at
        if (self._refill or overdue) and not self._stopping:
            self._refill, self._refill_at = False, None
            self._fill()
        return True

    def end(self) -> None:
        """End every process of the cluster and remove what it left."""
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
        with contextlib.suppress(BlockingIOError):  # there is word already
            os.write(self._wake, b"+")

    def _publish(self) -> None:
        write_note(self._note_path, self._note)

    def _start_fork_server(self) -> None:
        """Start the process that forks into workers. Those that raylets ask for meanwhile wait for
        its imports.

        Its malloc, and so theirs, asks the kernel for huge pages, where the operator did not say
        how to allocate: a process can be told so only by its environment, and only as it begins.
        """
        path = self._fork_socket()
        path.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "service.embedded.fork_server",
            str(path),
            *PRELOADED_MODULES,
        ]
        pid = os.posix_spawn(sys.executable, command, {"GLIBC_TUNABLES": HUGE_PAGES, **os.environ})
        self._note = replace(self._note, fork_server_pid=pid)
        self._publish()

    def _fork_socket(self) -> Path:
        return Path(self._note.temp_dir) / FORK_SOCKET

    def _variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {**variables, worker_start.FORK_SERVER_VARIABLE: str(self._fork_socket())}

    def _start_head(self) -> None:
        params = RayParams(
            **self._params(HEAD_DIR, num_cpus=0),
            include_dashboard=True,
            dashboard_host=LOOPBACK,
            dashboard_port=0,
            no_monitor=True,
            env_vars=self._variables(HEAD_VARIABLES),
            ray_client_server_port=None,
        )
        node = Node(params, head=True, shutdown_at_exit=False, spawn_reaper=False)
        # A job's supervisor looks for "the" cluster of this machine: without this file it may find
        # another one.
        (Path(self._note.temp_dir) / HEAD_DIR / "ray_current_cluster").write_text(node.gcs_address)
        pids = {name: info[0].process.pid for name, info in node.all_processes.items()}
        self._note = replace(
            self._note,
            address=node.gcs_address,
            dashboard_url=f"http://{node.webui_url}",
            gcs_pid=pids["gcs_server"],
            dashboard_pid=pids["dashboard"],
            nodes=(_note_of(node, slot=0),),
        )
        self._precedence.give_way(self._note.nodes[0].pids)
        self._publish()

    def _fill_first(self) -> None:
        """Start every node, and where none comes up in time, as on a machine that is very busy,
        again."""

        def fill() -> None:
            self._fill()
            if (
                not self._stopping
                and self._note.num_nodes
                and all(node.is_head for node in self._note.nodes)
            ):
                raise RuntimeError("no node started; what is above says why")

        self._patiently("the first node", fill, lambda: None)

    def _patiently(self, what: str, start: Callable[[], None], clear: Callable[[], None]) -> None:
        """Start something, again where it fails, and say in cluster.json what is waited for."""

        def say(waiting_for: str | None) -> None:
            self._note = replace(self._note, waiting_for=waiting_for)
            self._publish()

        def pause(seconds: float) -> None:
            select.select([self._woken], [], [], seconds)

        start_patiently(
            what, start, clear=clear, say=say, pause=pause, is_stopping=lambda: self._stopping
        )

    def _clear_head(self) -> None:
        """End what a head that did not start left, and remove its directory. The fork server
        stays."""
        keep = tuple(pid for pid in (os.getpid(), self._note.fork_server_pid) if pid is not None)
        end_members(self._note.temp_dir, grace_s=0, without=keep)
        _reap_children()
        shutil.rmtree(Path(self._note.temp_dir) / HEAD_DIR, ignore_errors=True)
        self._note = replace(
            self._note, address=None, dashboard_url=None, gcs_pid=None, dashboard_pid=None, nodes=()
        )

    def _fill(self) -> None:
        """Start a node in every free place, side by side, and note them. Where one does not start
        another is tried later."""
        taken = {node.slot for node in self._note.nodes}
        free = [slot for slot in range(1, self._note.num_nodes + 1) if slot not in taken]
        if not free or self._stopping:
            return
        with ThreadPoolExecutor(len(free)) as pool:
            added = [node for node in pool.map(self._try_to_start_node, free) if node is not None]
        if len(added) < len(free):
            self._refill_at = time.monotonic() + RETRY_S
        nodes = sorted([*self._note.nodes, *added], key=lambda node: node.slot)
        self._note = replace(self._note, nodes=tuple(nodes))
        self._publish()
        for node in added:
            log.info("node %s is up in place %d", node.node_id, node.slot)

    def _try_to_start_node(self, slot: int) -> NodeNote | None:
        """None where it does not start: Ray gives a raylet 30 s, which a machine may need that is
        busy. Nothing of it is left."""
        try:
            return self._start_node(slot)
        except Exception:
            log.exception("the node in place %d did not start", slot)
        for process in list(members(self._note.temp_dir, without=(os.getpid(),))):
            with contextlib.suppress(psutil.Error):
                if any(f"/n{slot}." in part for part in process.cmdline()):
                    _kill_pids(
                        [process.pid, *(child.pid for child in process.children(recursive=True))]
                    )
        return None

    def _start_node(self, slot: int) -> NodeNote:
        """One raylet. Its directory is its own: nodes that start side by side in one would take
        each other's socket names."""
        generation = len(list(Path(self._note.temp_dir).glob(f"n{slot}.*")))
        gpus = _gpus_by_node(self._note.num_nodes)[slot - 1]
        env = self._variables(WORKER_NODE_VARIABLES)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        env[NODE_CORES_VARIABLE] = ",".join(
            map(str, cores_of(slot, self._note, sorted(os.sched_getaffinity(0))))
        )
        params = RayParams(
            **self._params(
                f"n{slot}.{generation}", num_cpus=self._note.cpus_per_node, num_gpus=len(gpus)
            ),
            gcs_address=self._note.address,
            node_manager_port=0,
            env_vars=env,
        )
        note = _note_of(Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False), slot)
        # its ranks inherit from the raylet
        self._precedence.give_way([pid for pid in note.pids if pid != note.raylet_pid])
        return note

    def _params(self, name: str, *, num_cpus: int, num_gpus: int = 0) -> dict[str, object]:
        return {
            "temp_dir": str(Path(self._note.temp_dir) / name),
            "node_ip_address": LOOPBACK,
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "object_store_memory": OBJECT_STORE_BYTES,
            "min_worker_port": 0,
            "max_worker_port": 0,
            "dashboard_agent_listen_port": 0,
            # Rank logs are Everstep's own; Ray's log monitor would only echo them into the driver.
            "include_log_monitor": False,
            # Forks a worker instead of starting Python and importing torch anew.
            "setup_worker_path": worker_start.__file__,
        }


def _note_of(node: Node, slot: int) -> NodeNote:
    raylet = node.all_processes["raylet"][0].process.pid
    services = [info.process.pid for infos in node.all_processes.values() for info in infos]
    agents = [child.pid for child in psutil.Process(raylet).children()]
    return NodeNote(
        node_id=node.node_id,
        is_head=slot == 0,
        slot=slot,
        raylet_pid=raylet,
        raylet_started_at=started_at(raylet),
        port=node.node_manager_port,
        pids=tuple(sorted({*services, *agents})),
    )


def cores_of(slot: int, note: ClusterNote, cores: Sequence[int]) -> Sequence[int]:
    """The cores that the ranks of a node keep to: its own, where the nodes' CPUs are all ``cores``
    that there are; else none are.

    Ranks that move to and fro lose what their core's caches hold. Where cores are to spare,
    whatever disturbs a rank has those.
    """
    if len(cores) != note.num_nodes * note.cpus_per_node:
        return ()
    return cores[(slot - 1) * note.cpus_per_node : slot * note.cpus_per_node]


def _gpus_by_node(num_nodes: int) -> list[list[str]]:
    """The machine's GPUs dealt out over the nodes: ids for each node, as CUDA_VISIBLE_DEVICES names
    them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    else:
        gpus = [str(index) for index, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]
    return [gpus[index::num_nodes] for index in range(num_nodes)]


def _kill_pids(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap_children() -> None:
    """Collect exit states of ended children, which would stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m service.embedded.keeper", description=__doc__)
    parser.add_argument("home", type=Path, help="the service's home directory")
    parser.add_argument(
        "--temp-dir", required=True, help="the cluster's own directory, which exists"
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus-per-node", type=int, required=True)
    parser.add_argument(
        "--adopt", action="store_true", help="take over the running cluster of cluster.json"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the cluster until SIGTERM (exit code 0) or until the head is lost (exit code 1)."""
    args = _parse(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    note_path: Path = args.home / "cluster.json"
    # Drivers start where their node was started: not in a directory whose modules could shadow
    # ours.
    os.chdir(args.temp_dir)
    pid = os.getpid()
    note = read_note(note_path) if args.adopt else None
    note = note or ClusterNote("starting", pid, 0.0, args.temp_dir, args.nodes, args.cpus_per_node)
    keeper = Keeper(note_path, replace(note, keeper_pid=pid, keeper_started_at=started_at(pid)))
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


if __name__ == "__main__":
    sys.exit(main())
