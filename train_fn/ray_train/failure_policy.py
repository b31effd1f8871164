"""Decide what Ray does about an error: gather evidence from all ranks, judge it, decide, and report
all of this.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.wire import Verdict
from train_fn import clock as head_clock
from train_fn.node.memory import look_for_oom
from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.group.factory import GroupFactory
from train_fn.ray_train.group.worker_group import EverstepWorkerGroup
from train_fn.ray_train.ray_internals import (
    ControllerError,
    FailureDecision,
    FailurePolicy,
    WorkerGroupError,
    WorkerGroupStartupTimeoutError,
)
from train_fn.ray_train.scaling import LiveNodes, LiveScalingPolicy
from train_fn.recovery.decision import Decision, budget_of, decide, micro_batch_size_after
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.launch import Engine
from train_fn.recovery.verdict import Judgement, judge

logger = logging.getLogger(__name__)

_RELEASE_S = 0.3
"""Seconds until the GCS shows the resources that a failed start has freed."""
_EVIDENCE_S = 3.0
"""Timeout in seconds for evidence from a dead rank's node if the failure ends the run."""

_OF_A_PATH = frozenset({Verdict.UNKNOWN, Verdict.HANG, Verdict.CONTROL_PLANE})
"""Verdicts of failures that a broken path between two nodes may have caused, if no rank is to
blame."""


class EvidencePolicy(FailurePolicy):  # type: ignore[misc]
    """Answer Ray's question about each error.

    Args:
        failure_config: Ray's.
        engine: the spec's budgets, and the settings.
        attempt_log: where failures are reported, and the earlier ones.
        sizes: delays the next start.
        nodes: excludes a node whose device failed.
        groups: has the newest group, even if its start failed.
        current_group: returns the controller's group; None without one.
        is_running: returns whether that group trains.
        patience_s: returns how much longer its ranks may take for what they do.
    """

    def __init__(
        self,
        failure_config: Any,
        engine: Engine,
        attempt_log: AttemptLog,
        sizes: LiveScalingPolicy,
        nodes: LiveNodes,
        groups: GroupFactory,
        current_group: Callable[[], EverstepWorkerGroup | None],
        is_running: Callable[[], bool],
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(failure_config)
        self._spec = engine.job.spec
        self._settings = engine.settings
        self._attempt_log = attempt_log
        self._sizes = sizes
        self._nodes = nodes
        self._groups = groups
        self._current_group = current_group
        self._is_running = is_running
        self._patience_s = patience_s
        self._decision: Decision | None = None
        self._num_unjudged = 0

    @property
    def final(self) -> Decision | None:
        """Return the decision that ended the run; None if the last one was to restart."""
        return self._decision if self._decision is not None and not self._decision.restart else None

    def make_decision(self, training_failed_error: Any) -> Any:
        """Return Ray's RETRY or RAISE. Never raises."""
        try:
            decided = self._decide(training_failed_error)
            self._num_unjudged = 0
            return decided
        except Exception:
            logger.exception("the failure could not be judged; restarting from what survives")
            self._num_unjudged += 1
            is_last = self._num_unjudged > self._spec.recovery.max_system_failures
            return FailureDecision.RAISE if is_last else FailureDecision.RETRY

    def note_preemption(self, group: EverstepWorkerGroup, asked_at: float) -> None:
        """Report that the ranks have saved and exited before their node is removed.

        Args:
            group: the ranks.
            asked_at: when they were asked to exit, in Unix seconds.
        """
        draining, self._sizes.draining = self._sizes.draining, frozenset()
        reports = tuple(
            RankReport(
                rank,
                worker.metadata.node_id,
                worker.metadata.pid,
                node_draining=worker.metadata.node_id in draining,
            )
            for rank, worker in enumerate(group.get_workers())
        )
        evidence = Evidence(
            self._attempt_log.attempt, asked_at, reports, self._attempt_log.last_step(reports)
        )
        decision = Decision(True, budget_of(Verdict.PREEMPTION), "moved away before the deadline")
        self._attempt_log.failed(evidence, judge(evidence), decision)

    def _decide(self, error: Any) -> Any:
        noticed_at = head_clock.now()
        if isinstance(error, ControllerError) and isinstance(
            error.controller_failure, WorkerGroupStartupTimeoutError
        ):
            # Resources that looked free were not. The run waits for them; this is no failure.
            self._sizes.back_off(_RELEASE_S)
            return FailureDecision.RETRY
        running = self._is_running()
        reports = self._reports(running)
        evidence = Evidence(
            attempt=self._attempt_log.attempt,
            noticed_at=noticed_at,
            ranks=reports,
            last_step=self._attempt_log.last_step(reports),
            worked_s=self._attempt_log.worked_s(noticed_at),
            control_error=None if isinstance(error, WorkerGroupError) else str(error),
        )
        judgement = judge(evidence)
        self._decision = decide(
            judgement,
            self._attempt_log.failures,
            self._spec.recovery,
            backoff_max_s=self._settings.backoff_max_s,
            checkpoint=self._spec.checkpoint,
            dispensable=self._sizes.dispensable,
            micro_batch_size=self._size_to_halve() if running else None,
        )
        self._attempt_log.failed(evidence, judgement, self._decision)
        if self._decision.leave_out is not None:
            self._nodes.exclude([self._decision.leave_out])
        if reports and judgement.first_rank is None and judgement.verdict in _OF_A_PATH:
            self._groups.links.suspect(judgement.pairs)
        self._ask_for_oom_kill(judgement, self._decision)
        if running:
            self._keep_hosts(reports)
        self._sizes.back_off(max(self._decision.backoff_s, 0.0 if running else _RELEASE_S))
        return FailureDecision.RETRY if self._decision.restart else FailureDecision.RAISE

    def _size_to_halve(self) -> int | None:
        """Return the size of micro-batches; None if none may be smaller, as a replay's bits."""
        if self._spec.train.on_out_of_memory != "smaller" or self._spec.replay is not None:
            return None
        return micro_batch_size_after(self._attempt_log.failures) or self._spec.micro_batch_size

    def _reports(self, running: bool) -> tuple[RankReport, ...]:
        """Return a report on each rank: of the group that trained, or of one whose start failed."""
        group = self._current_group()
        if running and group is not None:
            return group.wait_for_survivors(self._patience_s)
        return self._groups.last.start_reports if self._groups.last is not None else ()

    def _keep_hosts(self, reports: tuple[RankReport, ...]) -> None:
        """Let the hosts of the ranks serve the next attempt."""
        group = self._current_group()
        if group is not None and self._groups.keeps_hosts:
            group.keep_hosts(
                {
                    report.rank: report.left_step
                    for report in reports
                    if report.left_step is not None
                }
            )

    def _ask_for_oom_kill(self, judgement: Judgement, decision: Decision) -> None:
        """Ask the node of a lost rank for the cause, in parallel to the recovery. The answer is
        reported as an event of its own."""
        pid, node_id = judgement.detail.get("pid"), judgement.node_id
        if (
            judgement.verdict is not Verdict.WORKER_LOST
            or pid is None
            or node_id is None
            or self._groups.last is None
        ):
            return
        place = {"rank": judgement.first_rank, "node_id": node_id, "pid": pid}
        report = functools.partial(self._attempt_log.evidence, self._attempt_log.attempt, place)
        kills_before = self._groups.last.oom_kills.get(pid)
        find_rank = functools.partial(self._rank_on, node_id)
        asking = ask_node(
            node_id, pid, kills_before, find_rank, report, DELAY_S if decision.restart else 0.0
        )
        if not decision.restart:
            asking.join(_EVIDENCE_S)

    def _rank_on(self, node_id: str) -> Any | None:
        """Return the actor of one of the current group's ranks on that node; None without one."""
        group = self._current_group()
        workers = group.get_workers() if group is not None and group.has_started() else ()
        return next(
            (worker.actor for worker in workers if worker.metadata.node_id == node_id), None
        )


# ---------------------------------------------------------------- oom probe

# Ask a dead rank's node, in the background of a recovery, whether the kernel's OOM killer ended
# the rank.

DELAY_S = 10.0
"""Delay in seconds, after which the next attempt runs and one of its ranks on that node can be
asked. A Ray task would take an idle worker process that a new rank needs."""
_ANSWER_S = 30.0


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
