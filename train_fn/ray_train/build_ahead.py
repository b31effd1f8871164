"""Build what a rank will train in a process that has no rank yet."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ray
import torch

from train_fn.context import WorkerContext
from train_fn.journal.local_journal import LocalJournal
from train_fn.journal.process_output import listen
from train_fn.node.cpu_threads import set_threads
from train_fn.node.gpu_memory import wait_for_free_memory
from train_fn.node.secrets import process_redactor, secrets_set
from train_fn.ray_train.rank_training import loop_of
from train_fn.recovery.launch import RankJob, RankLaunch


def build_ahead(job: RankJob, launch: RankLaunch) -> None:
    """Import the training loop, and let it build what needs no peers, if it can.

    What it prints goes into the rank's log. Raises what the build raises: the process has run code
    of the user's by halves then, and must be ended. A new one fails in the same way, and reports
    it, once it has its rank.
    """
    redactor = process_redactor()
    listen(redactor)
    try:
        with secrets_set(job.spec, redactor):
            set_threads(job.spec)
            module, _ = loop_of(job)
            build: Callable[[WorkerContext], None] | None = getattr(module, "build_ahead", None)
            if build is not None:
                context = _context(job, launch)
                wait_for_free_memory(context.device)
                build(context)
    except Exception as exc:
        raise RuntimeError(f"nothing could be built ahead: {exc}") from None


def _context(job: RankJob, launch: RankLaunch) -> WorkerContext:
    """Return a place alone. The one that the process gets has peers, and a journal."""
    return WorkerContext(
        spec=job.spec,
        run_dir=job.run_dir,
        submission=job.submission,
        attempt=launch.attempt,
        world_rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_id=ray.get_runtime_context().get_node_id(),
        num_nodes=1,
        device=torch.device("cuda", 0) if job.use_gpu else torch.device("cpu"),
        journal=LocalJournal(None, threading.Event(), lambda line: None),
        report_checkpoint=lambda name, metrics: None,
        in_process=True,
    )
