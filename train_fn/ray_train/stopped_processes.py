"""Find processes on other nodes that seem alive to the peers that wait for them: stopped ones
(SIGSTOP, a debugger, a frozen container), which are woken or ended, and those that are gone while
something that they have started holds their connections."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Collection, Iterable
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_fn.node.children import end_leftovers

_ANSWER_S = 10.0

logger = logging.getLogger(__name__)


def find_stopped(processes: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return those (node, process) pairs whose process is stopped. Nodes that do not answer in time
    are left out."""
    return _ask_nodes(stopped, processes)


def wake_stopped(processes: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Continue those processes that are stopped, and return them."""
    return _ask_nodes(signalled, processes, signal.SIGCONT)


def end_stopped(processes: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """End those processes that are stopped, by SIGKILL, and return them. Ray may have failed to: it
    first asks the process itself."""
    return _ask_nodes(signalled, processes, signal.SIGKILL)


def find_gone(
    processes: Iterable[tuple[str, int]], answer_s: float = _ANSWER_S
) -> set[tuple[str, int]]:
    """Return those (node, process) pairs whose process has ended, though Ray may not know. What
    they have started is ended, so that Ray and their peers notice."""
    return _ask_nodes(gone, processes, answer_s=answer_s)


def _ask_nodes(
    question: Callable[..., list[int]],
    processes: Iterable[tuple[str, int]],
    *arguments: Any,
    answer_s: float = _ANSWER_S,
) -> set[tuple[str, int]]:
    pids_by_node: dict[str, list[int]] = {}
    for node_id, pid in processes:
        pids_by_node.setdefault(node_id, []).append(pid)
    asked = {
        ray.remote(num_cpus=0, max_retries=0)(question)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(tuple(pids), *arguments): node_id
        for node_id, pids in pids_by_node.items()
    }
    answered, _ = (
        ray.wait(list(asked), num_returns=len(asked), timeout=answer_s) if asked else ([], [])
    )
    found = set()
    for ref in answered:
        try:
            found |= {(asked[ref], pid) for pid in ray.get(ref)}
        except RayError as exc:
            logger.warning(
                "node %s did not report which of its ranks are stopped or gone: %s", asked[ref], exc
            )
    return found


def stopped(pids: Collection[int]) -> list[int]:
    """Return those of this node's processes that exist and are stopped."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def gone(pids: Collection[int]) -> list[int]:
    """Return those of this node's processes that have ended, and end what ranks have left here."""
    end_leftovers()
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            found.append(pid)
    return found


def signalled(pids: Collection[int], number: signal.Signals) -> list[int]:
    """Send a signal to those of this node's processes that are stopped, and return them."""
    found = stopped(pids)
    for pid in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)
    return found
