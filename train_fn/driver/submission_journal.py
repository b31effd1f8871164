"""The journal of one submission: opened, read so far, and closed with the run's end."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import ray

from everstep.spec.run_spec import WANDB_KEY, RunSpec
from everstep.wire.events import EventKind
from storage.claims import newest_attempt
from storage.run_dir import RunDir
from train_fn.errors import SecretMissing
from train_fn.journal.client import ActorJournalClient
from train_fn.node.secrets import read_secrets
from train_fn.ray_train.journal_actor import deliver_to, start_journal
from train_fn.recovery.history import History, read_history
from train_fn.recovery.launch import ControllerOutcome
from train_fn.recovery.marks import DriverProcess

BEAT_S = 5.0
"""How often a driver without events calls the journal, from which it needs nothing."""
FINAL_FLUSH_S = 120.0
"""Longest wait for the last events to become durable. After that the driver fails, and the service
submits the run again."""

logger = logging.getLogger(__name__)


def open_journal(
    run_dir: RunDir, submission: int, history: History
) -> tuple[Any, ActorJournalClient]:
    """Start the submission's journal, and report that the submission has started. Return the
    journal's actor, and the driver's client of it."""
    node_id = ray.get_runtime_context().get_node_id()
    actor = start_journal(run_dir, submission, DriverProcess.own(), node_id, history.last_step)
    interval_s = max(0.1, run_dir.storage.batch_s)
    client = ActorJournalClient(
        deliver_to(actor), "driver", history.last_attempt, interval_s=interval_s, beat_s=BEAT_S
    )
    client.emit(EventKind.SUBMISSION_STARTED, _facts())
    for damage in history.damage:
        logger.error("a journal is damaged, and an event of it is lost: %s", damage)
        client.emit(EventKind.JOURNAL_DAMAGED, damage)
    return actor, client


def history_so_far(run_dir: RunDir, submission: int, client: ActorJournalClient) -> History:
    """Return the run's history, with what this submission has reported."""
    client.flush(FINAL_FLUSH_S)
    history = read_history(run_dir)
    last_attempt = newest_attempt(run_dir, submission, history.last_attempt)
    return dataclasses.replace(history, last_attempt=last_attempt)


def close_journal(
    client: ActorJournalClient, outcome: ControllerOutcome, name: str, reason: dict[str, Any] | None
) -> None:
    """Write ``finished``, the journal's last event. Raise RuntimeError if it did not become
    durable.

    Args:
        name: the outcome's name in the event.
        reason: code and message of a run that did not succeed.
    """
    client.emit(EventKind.FINISHED, {"outcome": name, "reason": reason, "step": outcome.last_step})
    logger.info(
        "the run ended: %s%s", name, f", {reason['code']}: {reason['message']}" if reason else ""
    )
    if not client.close(FINAL_FLUSH_S):
        raise RuntimeError(
            f"the journal did not take the last events within {FINAL_FLUSH_S:g} s; is the "
            "storage writable?"
        )


def _facts() -> dict[str, Any]:
    from train_fn.node.node_check import versions

    context = ray.get_runtime_context()
    return {
        "ray_job_id": context.get_job_id(),
        "driver_pid": os.getpid(),
        "driver_node_id": context.get_node_id(),
        "versions": versions(),
    }


# ---------------------------------------------------------------- wandb recorder

# The process beside the driver that records the run at Weights & Biases.


class WandbRecorder:
    """Starts the process, and ends it with the driver."""

    def __init__(
        self, run_dir: RunDir, submission: int, spec: RunSpec, environ: Mapping[str, str]
    ) -> None:
        self._arguments = [run_dir.storage.uri, run_dir.run_id, str(submission)]
        self._environ = recorder_environment(spec, environ)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "train_fn.journal.wandb_tracking", *self._arguments]
        self._process = subprocess.Popen(command, env=self._environ, stdin=subprocess.PIPE)

    def close(self, timeout_s: float) -> None:
        """Let it record the remaining events, but end it after ``timeout_s`` seconds."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("wandb: not complete after %g s; `wandb sync` sends the rest", timeout_s)
            process.kill()
            process.wait()


def recorder_environment(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process: the driver's, the run's variables for W&B, and the
    key. Without the key's file on this node it records offline."""
    found = {name: value for name, value in environ.items() if not name.startswith("WANDB_")}
    found |= {name: value for name, value in spec.env.items() if name.startswith("WANDB_")}
    if WANDB_KEY in spec.secrets:
        alone = spec.model_copy(update={"secrets": {WANDB_KEY: spec.secrets[WANDB_KEY]}})
        try:
            found |= read_secrets(alone, environ)
        except SecretMissing as exc:
            logger.warning("wandb: no key on the driver's node: %s", exc)
    return found
