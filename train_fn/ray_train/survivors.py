"""The processes of ranks that outlive their attempt: kept for the next one, or ended so that no
state in them is lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from train_fn.ray_train.group_shutdown import hold_for
from train_fn.ray_train.placement import Bundle
from train_fn.recovery.hang import SILENT_S

NO_STATE = -1
"""Step of a process that has no state yet."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survivor:
    """A rank's process that can serve another attempt."""

    actor: Any
    bundle: Bundle
    pid: int
    step: int
    """Step of the state that its rank left, in the process or on its node; NO_STATE for a recruit.
    """


class Survivors:
    """Processes between two attempts of one run.

    Args:
        hold_s: longest time in seconds for one to write its state before it is ended; longer for
            large states.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: list[Survivor] = []

    def hold(self, survivors: Sequence[Survivor]) -> None:
        """Hold processes for the next attempt."""
        self._held += survivors

    def take(self) -> list[Survivor]:
        """Return the processes that are held, newest state first. They are no longer held then."""
        taken, self._held = sorted(self._held, key=lambda one: -one.step), []
        return taken

    def end(self) -> None:
        """End the processes that are held, since no attempt follows that could use them."""
        end_processes([one.actor for one in self.take()], self._hold_s)


def kept_steps_of(actors: Sequence[Any]) -> dict[int, int]:
    """Return the step of the state that each process keeps, by its number in ``actors``. Those that
    keep none, or do not answer within ``SILENT_S``, are left out."""
    asked = {actor.kept_state.remote(): number for number, actor in enumerate(actors)}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SILENT_S)
    steps = {}
    for ref in answered:
        with contextlib.suppress(RayError):  # it is gone
            step, _ = ray.get(ref)
            if step is not None:
                steps[asked[ref]] = step
    return steps


def end_processes(actors: Sequence[Any], hold_s: float) -> None:
    """End ranks' processes. Each first writes the state that it keeps, if any, as a snapshot.

    Processes that do not answer within ``SILENT_S`` are ended at once. Never raises. May be called
    from any thread.
    """
    if not actors:
        return
    try:
        asked = {actor.kept_state.remote(): actor for actor in actors}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SILENT_S)
        keeping, state_bytes = [], 0
        for ref in answered:
            with contextlib.suppress(RayError):  # it is gone
                step, num_bytes = ray.get(ref)
                if step is not None:
                    keeping.append(asked[ref].leave_kept_state.remote())
                    state_bytes = max(state_bytes, num_bytes)
        left, late = (
            ray.wait(keeping, num_returns=len(keeping), timeout=hold_for(hold_s, state_bytes))
            if keeping
            else ([], [])
        )
        for ref in left:
            with contextlib.suppress(RayError):
                if problem := ray.get(ref):
                    logger.warning("a process could not write the state it kept: %s", problem)
        if late:
            logger.warning("%d processes did not write the states they kept in time", len(late))
    except Exception as exc:
        logger.warning("processes are ended without their states: %s", exc)
    for actor in actors:
        ray.kill(actor)
