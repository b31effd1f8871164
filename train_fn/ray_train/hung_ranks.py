"""Kill the ranks that the others wait for, and explain in the reports why they died."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from train_fn.recovery.collective_trace import find_late
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.hang import SILENT_S, find_stuck, is_known_who_hangs

_LATE = (
    ". It did not enter the collective in which the other ranks wait, as torch's flight recorder "
    "shows"
)


class HungRanks:
    """The ranks of one group that were killed because they hung, with every rank's stack at that
    time.

    Args:
        health_timeout_s: how long a poll may take, for the report on a rank that does not answer.
    """

    def __init__(self, health_timeout_s: float) -> None:
        self._health_timeout_s = health_timeout_s
        self._stacks: dict[int, str | None] = {}
        self._late: list[int] = []
        """Ranks that did not enter the collective in which the others wait."""
        self._ranks: list[int] = []
        self._reason = ""

    def kill(self, workers: Sequence[Any], reason: str) -> list[int]:
        """Read every rank's stack and counts of collectives, kill the ranks that hold up the
        others, and return them. If all stacks wait in a collective, the counts decide.

        Their peers then leave with a failed collective, as after any death. ``explain`` tells the
        difference.

        Args:
            workers: the group's workers, by rank.
            reason: why they are taken for hung.
        """
        self._reason = reason
        self._stacks = answers([worker.actor.stack.remote() for worker in workers])
        is_known = is_known_who_hangs(self._stacks)
        self._late = (
            []
            if is_known
            else find_late(answers([worker.actor.collective_counts.remote() for worker in workers]))
        )
        self._ranks = self._late or find_stuck(self._stacks)
        for rank in self._ranks:
            ray.kill(workers[rank].actor)
        return self._ranks

    def explain(self, report: RankReport) -> RankReport:
        """Return ``report`` with the rank's stack, and with the hang as the cause if it was killed
        for one, or if it does not answer.

        If the node of a killed rank does not answer either, the node is lost: it is unknown whether
        the rank hung, or was killed at all.
        """
        report = dataclasses.replace(report, stack=self._stacks.get(report.rank))
        if report.rank in self._ranks:
            is_lost = not report.node_alive
            return dataclasses.replace(
                report,
                unresponsive=not is_lost,
                is_unproven=not (is_lost or self._late or is_known_who_hangs(self._stacks)),
                died=is_lost,
                death=None,
                still_running=False,
                hang=None if is_lost else self._reason + (_LATE if self._late else ""),
            )
        if report.unresponsive:
            no_answer = (
                "its process does not answer, though its node does: it was stopped, or is busy "
                f"outside of Python. A poll may take {self._health_timeout_s:g} s "
                "(EVERSTEP_RECOVERY_HEALTH_TIMEOUT_S, or recovery.hang_timeout_s if that is "
                "shorter). Increase that if it is busy"
            )
            return dataclasses.replace(report, hang=no_answer)
        return report


def answers(asked: Sequence[Any]) -> dict[int, Any]:
    """Return every rank's answer to the call made on it; None for a rank that does not answer."""
    ranks = {ref: rank for rank, ref in enumerate(asked)}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SILENT_S)
    answers: dict[int, Any] = dict.fromkeys(ranks.values())
    for ref in answered:
        with contextlib.suppress(RayError):
            answers[ranks[ref]] = ray.get(ref)
    return answers
