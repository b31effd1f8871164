"""Asks a dead rank's node, beside the recovery, whether the kernel killed the rank for want of memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_fn.out_of_memory import look_for_oom

_ANSWER_S = 30.0

logger = logging.getLogger(__name__)


def ask_node(node_id: str, pid: int, kills_before: int | None, tell: Callable[[dict[str, Any]], None]) -> threading.Thread:
    """Ask in a thread, which calls ``tell`` with what was found, if anything was. A node that does not answer says nothing."""

    def ask() -> None:
        task = ray.remote(num_cpus=0, max_retries=0)(look_for_oom)
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        try:
            found = ray.get(task.options(scheduling_strategy=where).remote(pid, kills_before), timeout=_ANSWER_S)
        except RayError as exc:
            logger.info("node %s did not say why process %d is gone: %s", node_id, pid, exc)
            return
        if found is not None:
            tell(found)

    thread = threading.Thread(target=ask, name="oom-probe", daemon=True)
    thread.start()
    return thread
