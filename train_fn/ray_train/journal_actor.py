"""Run the run's journal as a Ray actor on the driver's node."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.journal.delivery import Deliver, Reply, SourceEvent
from train_fn.journal.server import JournalServer
from train_fn.recovery.driver_process import DriverProcess

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
