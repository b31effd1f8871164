"""The actor of a rank: Ray Train's worker with Everstep's launch and orderly end."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import psutil
import ray
import torch

from train_fn.context import WorkerContext
from train_fn.errors import AsksForPeers, BuiltByHalves, CannotBuild
from train_fn.journal.rank_log import listen
from train_fn.journal.server import LocalJournal
from train_fn.node.memory import look_for_oom, oom_kills, wait_for_free_memory
from train_fn.node.network import interface_problem
from train_fn.node.node_check import versions
from train_fn.node.node_dir import own_temporary_dir
from train_fn.node.preflight import (
    NodeFigures,
    check_in_new_process,
    check_node,
    pass_time,
    take_in,
)
from train_fn.node.probe import accepts_connection
from train_fn.node.secrets import process_redactor, secrets_set
from train_fn.node.usage import set_threads
from train_fn.ray_train import rank_process
from train_fn.ray_train.rank import loop_of
from train_fn.ray_train.ray_internals import (
    RayTrainWorker,
    TrainContext,
    get_train_context,
)
from train_fn.recovery.hang import CollectiveCounts
from train_fn.recovery.launch import RankJob, RankLaunch
from train_fn.snapshots import store
from train_fn.step.nccl import collective_counts
from train_fn.step.place_watch import watch
from train_fn.storage_proof import prove_ahead

WATCH = "watch"
"""Concurrency group of ``watch``, which waits while other calls run."""
KEPT = "kept"
"""Concurrency group of the calls about the state that the process keeps. They must be answered
while the start of a group hangs in this process, one of them while another writes the state."""
_LOOK_S = 0.005
_TELLS_A_PLACE = (
    "get_world_rank",
    "get_world_size",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
)
"""Methods of Ray's context that tell a rank its place."""


@dataclass(frozen=True)
class RankEnd:
    """Describe the state of a rank's training function: ``ended``, with its exception if it raised
    one, or still running, with its ``stack``."""

    ended: bool
    error: BaseException | None
    stack: str | None = None
    kept_step: int | None = None
    """Step whose state is already on the node while the training function still runs."""
    state_bytes: int = 0
    """Size of the state that the rank writes on its node."""
    stays_at: int | None = None
    """Step of the state that the rank keeps in its process."""


@dataclass(frozen=True)
class RankReady:
    """Describe a prepared rank: the versions on its node, and the start of its process as Unix time
    in seconds."""

    versions: dict[str, str]
    born_at: float
    oom_kills: int | None
    """Processes that the OOM killer had ended on the node by then; None if unknown."""
    problem: str | None = None
    """Why ranks on the node cannot reach their peers, if this is known before they try."""


class EverstepTrainWorker(RayTrainWorker):  # type: ignore[misc]
    """Run a rank. The actor has no runtime_env, so that a forked or idle process with torch
    imported can run it.

    ``prepare`` sets its environment.
    """

    _meets_to_report = True
    _figures: NodeFigures | None = None

    def prepare(self, launch: RankLaunch) -> RankReady:
        """Set the rank's environment before anything reads it. Raise RuntimeError if something of
        an earlier attempt still runs here."""
        rank_process.prepare(launch)
        watch(TrainContext, _TELLS_A_PLACE)
        self._meets_to_report = launch.meets_to_report
        problem = interface_problem(os.environ, nccl=bool(ray.get_gpu_ids()))
        return RankReady(versions(), psutil.Process().create_time(), oom_kills(), problem)

    def get_ready(self, launch: RankLaunch, job: RankJob, *, checks_node: bool) -> int:
        """Check this node if ``checks_node``, and build what this process will train once it has a
        rank. Return its id."""
        rank_process.prepare(launch)
        if checks_node:
            self.check_node(0)
        build_ahead(job, launch)
        return os.getpid()

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        """Initialise Ray's train context. Ranks that do not synchronise on reports use the given
        checkpoint name."""
        super().init_train_context(*args, **kwargs)
        if not self._meets_to_report:
            get_train_context()._sync_checkpoint_dir_name_across_ranks = lambda name: name

    def run_train_fn(self, *args: Any, **kwargs: Any) -> None:
        """Start Ray's training thread, whose end is reported from here on."""
        super().run_train_fn(*args, **kwargs)
        runner: Any = get_train_context().execution_context.training_thread_runner
        rank_process.report_end_of(runner._thread, runner.get_exception_queue().put)

    def reach(self, addresses: list[tuple[str, int]], timeout_s: float) -> list[bool]:
        """Return, for each raylet address, whether it accepts a connection from this node."""
        return accepts_connection(addresses, timeout_s)

    def check_node(self, number: int) -> NodeFigures:
        """Check computation, memory and storage of this node, and return the figures as those of
        ``number``. A process measures once, before it trains: training would slow the node."""
        if self._figures is None:
            self._figures = (
                check_in_new_process(number, "cuda", own_temporary_dir())
                if ray.get_gpu_ids()
                else check_node(number, torch.device("cpu"), own_temporary_dir())
            )
        figures = copy.deepcopy(self._figures)  # who compares nodes adds to it
        figures.rank = number
        return figures

    def take_in(self, ip: str, timeout_s: float) -> tuple[str, int]:
        """Listen for a block that another node sends to time a link. Return the address."""
        return take_in(ip, timeout_s)

    def pass_time(self, address: tuple[str, int], timeout_s: float) -> float | None:
        """Return the seconds to send a block to another node; None if it does not arrive."""
        return pass_time(address, timeout_s)

    def ask_to_yield(self, number: int, hands_over: bool) -> None:
        """Ask the training function to exit at the next step that all ranks agree on, with a final
        checkpoint unless it hands over to a group in this process."""
        rank_process.ask_to_yield(number, hands_over)

    def abandon(self) -> None:
        """Make the training function leave its step, since a peer is gone or assumed to be."""
        rank_process.abandon()

    def stack(self) -> str:
        """Return the Python stacks of this rank, with the training thread's last, and without
        values of secrets."""
        return process_redactor()(rank_process.stack())

    def collective_counts(self) -> CollectiveCounts | None:
        """Return how far this rank is in its collectives."""
        return collective_counts()

    def look_for_oom(self, pid: int, kills_before: int | None) -> dict[str, Any] | None:
        """Return evidence that the OOM killer ended another process of this node; None if there is
        none."""
        return look_for_oom(pid, kills_before)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def watch(self) -> bool:
        """Return once a poll would find something. Return True if the rank should be polled often,
        because it has finished training and waits for its reports to be taken, or has ended."""
        return rank_process.wait_for_news()

    def wait_for_end(self, bound_s: float) -> RankEnd:
        """Wait until the training function has ended, at most ``bound_s``.

        Its result queue is drained meanwhile, since a rank that reports would otherwise wait for a
        controller that no longer takes reports.
        """
        runner: Any = get_train_context().execution_context.training_thread_runner
        deadline = time.monotonic() + bound_s

        def is_running() -> bool:  # one that has called os._exit waits for its end
            return runner.is_running() and runner.get_error() is None

        while is_running() and time.monotonic() < deadline:
            self.clear_result_queue()
            time.sleep(_LOOK_S)
        running = is_running()
        error = runner.get_error()
        return RankEnd(
            not running,
            getattr(error, "_base_exc", error),
            rank_process.stack() if running else None,
            rank_process.kept_step(),
            rank_process.state_bytes(),
            None if running else store.kept_step(),
        )

    @ray.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def kept_state(self) -> tuple[int | None, int]:
        """Return the step of the state that this process keeps for the next attempt, None without
        one, and its size in bytes."""
        return store.kept_step(), rank_process.state_bytes()

    @ray.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def insure_kept_state(self, most_bytes: float = inf) -> str | None:
        """Write that state as a snapshot, and keep it, unless it is larger than ``most_bytes``.
        Return as ``leave_kept_state``."""
        return store.insure() if rank_process.state_bytes() <= most_bytes else None

    @ray.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def leave_kept_state(self) -> str | None:
        """Write that state as a snapshot, and let go of it. Return why that cannot be done; None if
        it was written, or if there is none."""
        return store.leave_kept_state()


# ---------------------------------------------------------------- build ahead

# Build what a rank will train in a process that has no rank yet.


def build_ahead(job: RankJob, launch: RankLaunch) -> None:
    """Import the training loop, and let it build what needs no peers, if it can.

    What it prints goes into the rank's log. The process must be ended if this raises, since it has
    run code of the user's by halves: CannotBuild for an error of the build, RuntimeError where a
    new process may build once it has its rank.
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
                prove_ahead(context)
                build(context)
    except (AsksForPeers, BuiltByHalves) as exc:
        raise RuntimeError(f"nothing could be built ahead: {exc}") from None
    except Exception as exc:
        raise CannotBuild(f"{type(exc).__name__}: {exc}") from None


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
