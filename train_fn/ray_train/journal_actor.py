"""Run the run's journal as a Ray actor on the driver's node; end actors that outlive a driver;
cause the faults of drills.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.drills import DrillRefused, kill_ranks, kill_raylet, signal_ranks
from train_fn.journal.follower import Deliver, Reply, SourceEvent
from train_fn.journal.server import JournalServer
from train_fn.ray_train.ray_internals import GcsClient, autoscaler_pb2
from train_fn.ray_train.scaling import head_node_ids
from train_fn.recovery.history import RankPlace
from train_fn.recovery.marks import DriverProcess

NAMESPACE = "everstep"
LONELY_S = 10.0
"""A journal whose driver is dead ends after this many seconds without a call. The controller and
rank 0 call it twice a second."""


class LastingJournalActor(JournalServer):
    """Serve the journal on the driver's node. It outlives the driver until the ranks have sent
    their last events."""

    def __init__(
        self, run_dir: RunDir, submission: int, driver: DriverProcess, told_step: int | None
    ) -> None:
        super().__init__(run_dir, submission, told_step)
        self._driver = driver
        self._called_at = time.monotonic()
        threading.Thread(target=self._end_when_lonely, name="lonely", daemon=True).start()

    def deliver(
        self, source: str, events: Sequence[SourceEvent], stop: Stop | None = None
    ) -> Reply:
        self._called_at = time.monotonic()
        return super().deliver(source, events, stop)

    def _end_when_lonely(self) -> None:
        self._driver.wait()
        while True:
            time.sleep(1.0)
            if time.monotonic() > self._called_at + LONELY_S:
                with suppress(RayError):  # the head is unreachable; retry later
                    ray.kill(ray.get_runtime_context().current_actor)  # on exit Ray restarts it


def start_journal(
    run_dir: RunDir, submission: int, driver: DriverProcess, node_id: str, told_step: int | None
) -> Any:
    """Start the submission's journal on ``node_id`` and return the actor's handle. Earlier journals
    have the metrics of all steps up to ``told_step``.

    Ray restarts the actor if its process dies, and it continues. It does not end with its driver:
    kill it when the run is done.
    """
    # It gets several calls a second, and Ray would report each one to its dashboard.
    actor_class = ray.remote(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, enable_task_events=False
    )(LastingJournalActor)
    return actor_class.options(
        name=f"journal-{run_dir.run_id}-s{submission:03d}",
        namespace=NAMESPACE,
        lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ).remote(run_dir, submission, driver, told_step)


def deliver_to(actor: Any, timeout_s: float = 10.0) -> Deliver:
    """Return the function with which an ActorJournalClient reaches a journal actor."""

    def deliver(source: str, events: Sequence[SourceEvent], stop: Stop | None) -> Reply:
        reply: Reply = ray.get(actor.deliver.remote(source, events, stop), timeout=timeout_s)
        return reply

    return deliver


# ---------------------------------------------------------------- older submissions

# End the actors that outlive a driver: its controller with the ranks, until these have saved and
# exited, and the journal that they report to.
#
# Both are detached actors. The driver of the next submission waits for their end before it starts
# its own journal. So the older journal is complete by then, and the older submission writes nothing
# more.

_NAME = re.compile(r"(?P<kind>controller|journal)-(?P<run_id>.+)-s(?P<submission>\d+)(-[0-9a-f]+)?")
_POLL_S = 0.05
_END_S = 5.0
"""Seconds to wait for killed actors to end."""

logger = logging.getLogger(__name__)


def controller_name(run_id: str, submission: int) -> str:
    """Return a unique name for a controller, since a killed one may keep its name for a moment."""
    return f"controller-{run_id}-s{submission:03d}-{uuid.uuid4().hex[:8]}"


def end_older_submissions(run_id: str, submission: int, patience_s: float) -> None:
    """Wait at most ``patience_s`` seconds for the ranks of older submissions to save and exit, then
    kill the actors that remain.

    A controller whose driver died makes its ranks exit by itself. One whose driver was replaced but
    still lives is asked to do so.
    """

    def left() -> list[str]:
        return actors_of_older(list_named_actors(), run_id, submission)

    controllers = [name for name in left() if name.startswith("controller")]
    if controllers:
        logger.info(
            "waiting for the ranks of an older submission to save and exit (%s)",
            ", ".join(controllers),
        )
    for name in controllers:
        with suppress(ValueError):  # it has ended in the meantime
            ray.get_actor(name, namespace=NAMESPACE).leave.remote()
    if not _wait(lambda: not any(name.startswith("controller") for name in left()), patience_s):
        logger.warning(
            "the ranks of an older submission did not exit within %g s; killing them",
            patience_s,
        )
    for name in left():
        with suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    if not _wait(lambda: not left(), _END_S):
        logger.warning(
            "actors of an older submission were killed but still exist: %s", ", ".join(left())
        )


def actors_of_older(names: list[str], run_id: str, submission: int) -> list[str]:
    """Return those names of actors that belong to earlier submissions of a run."""
    parsed = [match for match in map(_NAME.fullmatch, names) if match is not None]
    return [
        match[0]
        for match in parsed
        if match["run_id"] == run_id and int(match["submission"]) < submission
    ]


def _wait(fact: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


# ---------------------------------------------------------------- faults

# Cause the faults of drills on a Ray cluster.

_ON_NODE_S = 30.0
"""Timeout in seconds for a node to start a process and cause a drill's fault there."""

NodeCall = tuple[str, Callable[..., str | None], tuple[Any, ...]]
"""Node id, a function that returns a problem or None, its arguments."""


class RayFaults:
    """Implement ``train_fn.drills.Faults`` for the cluster that this driver is connected
    to."""

    def head_node_ids(self) -> Collection[str]:
        try:
            return head_node_ids()
        except RayError as exc:
            raise DrillRefused(f"the cluster's nodes could not be read: {exc}") from exc

    def signal(self, ranks: Sequence[RankPlace], signal_number: int) -> None:
        _on_nodes(
            [
                (node_id, signal_ranks, (node_id, pids, int(signal_number)))
                for node_id, pids in _by_node(ranks).items()
            ]
        )

    def kill_without_trace(self, ranks: Sequence[RankPlace], run_id: str) -> None:
        _on_nodes(
            [
                (node_id, kill_ranks, (run_id, node_id, pids))
                for node_id, pids in _by_node(ranks).items()
            ]
        )

    def kill_node(self, node_id: str) -> None:
        _on_nodes([(node_id, kill_raylet, (node_id,))], ends_node=True)

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Drain a node like ``ray drain-node``. The reason is preemption, which Ray cannot
        refuse."""
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + deadline_s) * 1000)
        try:
            client = GcsClient(address=ray.get_runtime_context().gcs_address)
            accepted, problem = client.drain_node(
                node_id, reason, "an Everstep drill", deadline_ms, timeout=_ON_NODE_S
            )
        except (RayError, RuntimeError) as exc:
            raise DrillRefused(f"the request to drain node {node_id} failed: {exc}") from exc
        if not accepted:
            raise DrillRefused(f"Ray refuses to drain node {node_id}: {problem}")

    def kill_driver(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _by_node(ranks: Sequence[RankPlace]) -> dict[str, tuple[int, ...]]:
    """Return the process ids of ranks by node id."""
    nodes = dict.fromkeys(place.node_id for place in ranks)
    return {
        node_id: tuple(place.pid for place in ranks if place.node_id == node_id)
        for node_id in nodes
    }


def _on_nodes(calls: Sequence[NodeCall], *, ends_node: bool = False) -> None:
    """Call functions on nodes in parallel, each in its own process there. Raise DrillRefused with
    the first problem.

    With ``ends_node`` a function also ends its own process, so that no answer comes.
    """
    refs = []
    for node_id, function, arguments in calls:
        # A task, not an actor: it uses one of the node's worker processes and returns it.
        task = ray.remote(num_cpus=0, max_retries=0)(function)
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        refs.append(task.options(scheduling_strategy=where).remote(*arguments))
    for ref in refs:
        try:
            problem = ray.get(ref, timeout=_ON_NODE_S)
        except RayError as exc:
            if ends_node and not isinstance(exc, RayTaskError | TaskUnschedulableError):
                return
            raise DrillRefused(f"a node could not carry out the drill: {exc}") from exc
        if problem is not None:
            raise DrillRefused(problem)
