"""A check of the whole deployment, as a Ray job: ``python -m train_fn.deployment_check --storage
URI --check-id ID``.

A process on every live node checks the node. Together they test storage, ports, clocks and an
all-reduce. The report goes to the storage, even if much is wrong. There is none only if the head
cannot use the cluster or the storage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.wire.deployment import AllReduceFacts, DeploymentReport, NodeFacts, StorageFacts
from storage import cluster
from storage.filesystem import open_storage
from train_fn.node.node_check import ALL_REDUCE_BYTES, JOIN_S, NodeProbe
from train_fn.ray_train.ray_internals import cluster_state
from train_fn.ray_train.scaling import head_node_ids

START_S = 60.0
"""How long a node may take to start a process and import torch."""
ANSWER_S = 30.0
CLOCK_QUESTIONS = 5


class ClusterCheck:
    """Run one process on each node, and collect its answers. A node that fails once is not called
    again."""

    def __init__(self, storage_uri: str, check_id: str, all_reduce_s: float) -> None:
        self._uri = storage_uri
        self._check_id = check_id
        self._all_reduce_s = all_reduce_s
        heads = head_node_ids()
        self._nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        free = cluster_state.available_resources_per_node()
        self._with_gpu = {
            node_id for node_id in self._nodes if free.get(node_id, {}).get("GPU", 0) >= 1
        }
        self._facts: dict[str, dict[str, Any]] = {
            node_id: {
                "id": node_id,
                "hostname": node["NodeManagerHostname"],
                "ip": node["NodeManagerAddress"],
                "is_head": node_id in heads,
                "gpus": int(node["Resources"].get("GPU", 0)),
            }
            for node_id, node in self._nodes.items()
        }
        self._probes = {node_id: self._probe(node_id) for node_id in self._nodes}

    def report(self) -> DeploymentReport:
        """Return the report of all checks."""
        calls = {
            node_id: probe.facts.remote(node_id in self._with_gpu)
            for node_id, probe in self._probes.items()
        }
        for node_id, found in self._answers(calls, START_S).items():
            self._facts[node_id] |= found
        for node_id, probe in list(self._probes.items()):
            self._ask_clock(node_id, probe)
        self._try_ports()
        self._try_storage()
        summed = self._try_all_reduce()
        nodes = tuple(NodeFacts(**facts) for facts in self._facts.values())
        return DeploymentReport(at=datetime.now(UTC), nodes=nodes, all_reduce=summed)

    def _probe(self, node_id: str) -> Any:
        options = {
            "num_cpus": 0,
            "num_gpus": 1 if node_id in self._with_gpu else 0,
            "max_restarts": 0,
        }
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = ray.remote(**options)(NodeProbe).options(scheduling_strategy=where)
        return actor.remote(node_id, self._facts[node_id]["ip"])

    def _answers(self, calls: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answers by node. A node that fails, or does not answer in time, gets a problem
        and is not called again."""
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s) if calls else None
        answers = {}
        for node_id, ref in calls.items():
            try:
                answers[node_id] = ray.get(ref, timeout=0.1)
            except RayError as exc:
                self._facts[node_id]["problem"] = _words(exc, timeout_s)
                self._probes.pop(node_id, None)
        return answers

    def _ask_clock(self, node_id: str, probe: Any) -> None:
        """Measure the node's clock by the fastest of several calls, which is the most exact."""
        best: tuple[float, float] | None = None
        for _ in range(CLOCK_QUESTIONS):
            asked = time.time()
            answer = self._answers({node_id: probe.now.remote()}, ANSWER_S).get(node_id)
            answered = time.time()
            if answer is None:
                return
            error = (answered - asked) / 2
            if best is None or error < best[1]:
                best = (answer - (asked + answered) / 2, error)
        assert best is not None
        self._facts[node_id] |= {
            "clock_offset_s": round(best[0], 4),
            "clock_error_s": round(best[1], 4),
        }

    def _try_ports(self) -> None:
        """Connect each node to a free port of each other node, as ranks do, and to its raylet."""
        ports = self._answers(
            {node_id: probe.listen.remote() for node_id, probe in self._probes.items()}, ANSWER_S
        )
        own = [(node_id, (self._facts[node_id]["ip"], port)) for node_id, port in ports.items()]
        raylets = [
            (node_id, (node["NodeManagerAddress"], node["NodeManagerPort"]))
            for node_id, node in self._nodes.items()
        ]
        for field, targets in (("unreachable", own), ("raylets_unreachable", raylets)):
            addresses = [address for _, address in targets]
            found = self._answers(
                {
                    node_id: probe.connect.remote(addresses)
                    for node_id, probe in self._probes.items()
                },
                ANSWER_S,
            )
            for node_id, accepted in found.items():
                self._facts[node_id][field] = tuple(
                    name for (name, _), up in zip(targets, accepted, strict=True) if not up
                )

    def _try_storage(self) -> None:
        """Let all nodes write, then read each other's files. A node's local directory passes any
        check that only this node makes."""
        calls = {
            node_id: probe.write_storage.remote(self._uri, self._check_id)
            for node_id, probe in self._probes.items()
        }
        written: dict[str, StorageFacts] = self._answers(calls, ANSWER_S)
        writers = [node_id for node_id, facts in written.items() if facts.problem is None]
        calls = {
            node_id: probe.read_storage.remote(self._uri, self._check_id, writers)
            for node_id, probe in self._probes.items()
            if node_id in writers
        }
        seen: dict[str, StorageFacts] = self._answers(calls, ANSWER_S)
        for node_id, facts in written.items():
            rate = {"write_mb_per_s": facts.write_mb_per_s}
            self._facts[node_id]["storage"] = (
                seen[node_id].model_copy(update=rate) if node_id in seen else facts
            )

    def _try_all_reduce(self) -> AllReduceFacts | None:
        trainers = [
            node_id
            for node_id in self._probes
            if self._nodes[node_id]["Resources"].keys() & {"CPU", "GPU"}
        ]
        if len(trainers) < 2:
            return None
        on_gpus = all(self._facts[node_id].get("cuda") for node_id in trainers)
        backend: Literal["gloo", "nccl"] = "nccl" if on_gpus else "gloo"
        facts = AllReduceFacts(backend=backend, nodes=tuple(trainers), size_bytes=ALL_REDUCE_BYTES)
        try:
            port = ray.get(self._probes[trainers[0]].host_store.remote(), timeout=ANSWER_S)
            meeting = (self._facts[trainers[0]]["ip"], port)
            limit_s = self._all_reduce_s + 3 * JOIN_S
            sums = [
                self._probes[node_id].all_reduce.remote(
                    backend, rank, meeting, len(trainers), self._all_reduce_s
                )
                for rank, node_id in enumerate(trainers)
            ]
            rounds, round_s = ray.get(sums, timeout=limit_s)[0]
        except RayError as exc:
            return facts.model_copy(update={"problem": _words(exc, ANSWER_S)})
        return facts.model_copy(update={"rounds": rounds, "round_s": round(round_s, 5)})


def _words(exc: RayError, timeout_s: float) -> str:
    """Return the last line of Ray's message, which names the reason."""
    if isinstance(exc, ray.exceptions.GetTimeoutError):
        return f"no answer within {timeout_s:g} s"
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(exc).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train_fn.deployment_check", description="Check an Everstep deployment."
    )
    parser.add_argument(
        "--storage", required=True, metavar="URI", help="storage root, as the service was given it"
    )
    parser.add_argument("--check-id", required=True, metavar="ID")
    parser.add_argument("--all-reduce-s", type=float, default=5.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    ray.init(address="auto", log_to_driver=False, configure_logging=False)
    report = ClusterCheck(arguments.storage, arguments.check_id, arguments.all_reduce_s).report()
    cluster.write_report(
        open_storage(arguments.storage), arguments.check_id, report.model_dump_json().encode()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
