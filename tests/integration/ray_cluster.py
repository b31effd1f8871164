"""An own Ray cluster for tests of train_fn: a head without CPUs and nodes of one CPU, apart from
every other cluster here.

It runs in a process of its own (``python -m tests.integration.ray_cluster``), which takes orders
line by line, so that the test process neither connects to Ray nor inherits its settings. Its
workers are forked, as the embedded cluster's are: a test need not import torch for each of them.
Otherwise it is as a cluster that is not ours: the controller keeps a warm pool there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from service.embedded import worker_start
from service.embedded.environment import PRELOADED_MODULES, WORKER_NODE_VARIABLES

REPOSITORY = Path(__file__).parents[2]
_PRELOAD_VARIABLE = "EVERSTEP_TEST_PRELOAD"
_GPUS_VARIABLE = "EVERSTEP_TEST_GPUS_PER_NODE"


class RayCluster:
    """Handle of one cluster; ``env`` is what a driver on its head needs, once it has started."""

    def __init__(
        self, temp_dir: Path, env: Mapping[str, str], *, preload: bool, gpus_per_node: int = 0
    ) -> None:
        self._temp_dir = temp_dir
        self.secrets_dir = temp_dir / "secrets"
        """Where every node's ranks look for secrets."""
        self.env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("RAY_", "EVERSTEP_"))
            },
            "RAY_TMPDIR": str(temp_dir),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 32 + "test",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_idle_worker_killing_time_threshold_ms": "1000000000",
            "RAY_num_workers_soft_limit": "3",
            "RAY_kill_worker_timeout_milliseconds": "500",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "EVERSTEP_RECOVERY_AUTOSCALER_REQUESTS": "0",
            "EVERSTEP_SECRETS_DIR": str(self.secrets_dir),
            **env,
        }
        host_env = {
            **self.env,
            _PRELOAD_VARIABLE: "1" if preload else "",
            _GPUS_VARIABLE: str(gpus_per_node),
        }
        log = (temp_dir / "host.log").open("ab")
        self._host = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ray_cluster"],
            cwd=REPOSITORY,
            env=host_env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()

    def start(self) -> None:
        """Start the head."""
        self.env["RAY_ADDRESS"] = self._order("start")["address"]

    def add_node(self, **env: str) -> str:
        """Start a node of one CPU, with ``env`` in the environment of all its processes; its id."""
        return str(self._order("add", env=env)["node_id"])

    def node_ids(self) -> list[str]:
        """Nodes that run ranks, oldest first."""
        return list(self._order("nodes")["node_ids"])

    def kill_node(self, node_id: str) -> None:
        """SIGKILL a node's raylet with every process below it, as when its host dies."""
        self._order("kill", node_id=node_id)

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Announce that a node will be taken away, as a cloud or ``ray drain-node`` does."""
        self._order("drain", node_id=node_id, deadline_s=deadline_s)

    def processes(self) -> list[psutil.Process]:
        """Return every process of the cluster."""
        return psutil.Process(self._host.pid).children(recursive=True)

    def stop(self) -> None:
        """End every process of the cluster."""
        tree = self.processes() if self._host.poll() is None else []
        if self._host.stdin is not None:
            self._host.stdin.close()
        try:
            self._host.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._host.kill()
            self._host.wait()
        if self._host.stdout is not None:
            self._host.stdout.close()
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(tree, timeout=10)

    def _order(self, name: str, **arguments: Any) -> dict[str, Any]:
        assert self._host.stdin is not None and self._host.stdout is not None
        self._host.stdin.write(json.dumps({"order": name, **arguments}) + "\n")
        self._host.stdin.flush()
        for line in self._host.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer
        raise RuntimeError(
            f"the cluster's host ended: {(self._temp_dir / 'host.log').read_text()[-4000:]}"
        )


@contextmanager
def ray_cluster(
    num_nodes: int, *, preload: bool = True, gpus_per_node: int = 0, **env: str
) -> Iterator[RayCluster]:
    """A cluster of ``num_nodes`` nodes beside the head, with ``env`` in the environment of all its
    processes, ended on exit.

    Each node says that it has ``gpus_per_node`` GPUs: those of this machine, which they share.
    Without ``preload`` nothing is forked or imported ahead, and its warm pool is none to speak of.
    """
    # short: a unix socket's path has 107 bytes
    temp_dir = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    cluster = RayCluster(temp_dir, env, preload=preload, gpus_per_node=gpus_per_node)
    try:
        cluster.start()
        for _ in range(num_nodes):
            cluster.add_node()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(temp_dir, ignore_errors=True)


def _host() -> None:
    """Take orders from stdin until it is closed."""
    import contextlib

    from ray.cluster_utils import Cluster

    state: dict[str, Any] = {}
    preload = bool(os.environ[_PRELOAD_VARIABLE])
    forked: dict[str, Any] = {}
    if preload:
        socket = Path(os.environ["RAY_TMPDIR"]) / "fork.sock"
        command = [
            sys.executable,
            "-m",
            "train_fn.ray_train.fork_server",
            str(socket),
            *PRELOADED_MODULES,
        ]
        state["fork_server"] = subprocess.Popen(command)
        os.environ[worker_start.FORK_SERVER_VARIABLE] = str(socket)
        forked["setup_worker_path"] = worker_start.__file__

    def start() -> dict[str, Any]:
        state["cluster"] = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, **forked},
        )
        if preload:
            os.environ.update(WORKER_NODE_VARIABLES)
        return {"address": state["cluster"].address}

    def add(env: dict[str, str]) -> dict[str, Any]:
        before = dict(os.environ)
        os.environ.update(env)
        try:
            resources = {"num_cpus": 1, "num_gpus": int(os.environ[_GPUS_VARIABLE])}
            try:
                node = state["cluster"].add_node(**resources, **forked)
            except Exception as exc:  # Ray waits for 30 s, which a busy machine may need
                if "timed out during startup" not in str(exc):
                    raise
                node = state["cluster"].add_node(**resources, **forked)
            return {"node_id": node.node_id}
        finally:
            for name in env.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

    def nodes() -> dict[str, Any]:
        alive = [
            node
            for node in state["cluster"].worker_nodes
            if node.node_id not in state.get("killed", set())
        ]
        return {"node_ids": [node.node_id for node in alive]}

    def kill(node_id: str) -> dict[str, Any]:
        node = next(node for node in state["cluster"].worker_nodes if node.node_id == node_id)
        roots = [
            psutil.Process(info.process.pid)
            for infos in node.all_processes.values()
            for info in infos
        ]
        tree = [*roots, *(child for root in roots for child in root.children(recursive=True))]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        state.setdefault("killed", set()).add(node_id)
        return {}

    def drain(node_id: str, deadline_s: float) -> dict[str, Any]:
        import time

        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        client = GcsClient(address=state["cluster"].address)
        accepted, problem = client.drain_node(
            node_id, reason, "test", int((time.time() + deadline_s) * 1000)
        )
        assert accepted, problem
        return {}

    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "start": start,
        "add": add,
        "nodes": nodes,
        "kill": kill,
        "drain": drain,
    }
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = orders[order.pop("order")](**order)
            except Exception as exc:
                answer = {"error": repr(exc)}
            print(json.dumps(answer), flush=True)
    if "cluster" in state:
        state["cluster"].shutdown()
    if "fork_server" in state:
        state["fork_server"].kill()
        state["fork_server"].wait()


if __name__ == "__main__":
    _host()
