"""Ask a dead rank's node, in the background of a recovery, whether the kernel's OOM killer ended
the rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_fn.node.out_of_memory import look_for_oom

DELAY_S = 10.0
"""Delay in seconds, after which the next attempt runs and one of its ranks on that node can be
asked. A Ray task would take an idle worker process that a new rank needs."""
_ANSWER_S = 30.0

logger = logging.getLogger(__name__)


def ask_node(
    node_id: str,
    pid: int,
    kills_before: int | None,
    find_rank: Callable[[], Any | None],
    report: Callable[[dict[str, Any]], None],
    delay_s: float = DELAY_S,
) -> threading.Thread:
    """Ask the node on a thread, and return the thread. No answer from a node means no finding.

    Args:
        node_id: the node of the process.
        pid: the process that is gone.
        kills_before: the node's out-of-memory kills while the process lived.
        find_rank: returns the actor of a rank that is on that node by then, or None.
        report: called with the finding, if there is one.
        delay_s: seconds to wait first.
    """

    def ask() -> None:
        time.sleep(delay_s)
        try:
            found = ray.get(_question(find_rank(), node_id, pid, kills_before), timeout=_ANSWER_S)
        except (RayError, ValueError) as exc:
            # This includes a group that ends while `find_rank` reads its ranks.
            logger.info("node %s did not report why process %d ended: %s", node_id, pid, exc)
            return
        if found is not None:
            report(found)

    thread = threading.Thread(target=ask, name="oom-probe", daemon=True)
    thread.start()
    return thread


def _question(rank: Any | None, node_id: str, pid: int, kills_before: int | None) -> Any:
    if rank is not None:
        return rank.look_for_oom.remote(pid, kills_before)
    task = ray.remote(num_cpus=0, max_retries=0)(look_for_oom)
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(scheduling_strategy=where).remote(pid, kills_before)
