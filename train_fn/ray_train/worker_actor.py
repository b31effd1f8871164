"""The actor that a rank lives in: Ray Train's worker with a launch before it and a settled end
after it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch

from train_fn.node.link_time import pass_time, take_in
from train_fn.node.network_settings import interface_problem
from train_fn.node.node_dir import own_temporary_dir
from train_fn.node.out_of_memory import look_for_oom, oom_kills
from train_fn.node.preflight import Figures, look_at_this_node, look_from_outside
from train_fn.node.probe import accepts_connection
from train_fn.ray_train import rank_process as worker
from train_fn.ray_train.ray_internals import RayTrainWorker, get_train_context
from train_fn.recovery.launch import RankLaunch

WATCH = "watch"
"""Concurrency group of the one call that waits beside all others."""
_LOOK_S = 0.005


@dataclass(frozen=True)
class RankEnd:
    """How a rank's training function stands: ``ended`` with the exception it raised, if it did;
    else ``stack`` says where it is."""

    ended: bool
    error: BaseException | None
    stack: str | None = None
    kept_step: int | None = None
    """Step whose state is on its node already, though the training function has not ended."""
    state_bytes: int = 0
    """How large the state is that the rank leaves on its node."""


@dataclass(frozen=True)
class RankReady:
    """A prepared rank: the versions that its node runs, and when its process began, in unix
    seconds."""

    versions: dict[str, str]
    born_at: float
    oom_kills: int | None
    """Processes that its node's kernel had killed for want of memory by then; None where that is
    not known."""
    problem: str | None = None
    """Why its ranks could not reach their peers, as far as that is known before they try."""


class EverstepTrainWorker(RayTrainWorker):  # type: ignore[misc]
    """Created without a runtime_env, so that a forked or idle process with torch imported can
    become it.

    Its environment comes by ``prepare``.
    """

    _meets_to_report = True

    def prepare(self, launch: RankLaunch) -> RankReady:
        """Set the rank's environment before anything reads it."""
        worker.prepare(launch)
        self._meets_to_report = launch.meets_to_report
        problem = interface_problem(os.environ, nccl=bool(ray.get_gpu_ids()))
        return RankReady(worker.versions(), psutil.Process().create_time(), oom_kills(), problem)

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        """Ray's; a rank that meets nobody to report calls its checkpoint as it is told to."""
        super().init_train_context(*args, **kwargs)
        if not self._meets_to_report:
            get_train_context()._sync_checkpoint_dir_name_across_ranks = _as_told

    def run_train_fn(self, *args: Any, **kwargs: Any) -> None:
        """Ray's: starts the training thread, whose end is told from here on."""
        super().run_train_fn(*args, **kwargs)
        runner: Any = get_train_context().execution_context.training_thread_runner
        worker.tell_end_of(runner._thread)

    def reach(self, addresses: list[tuple[str, int]], timeout_s: float) -> list[bool]:
        """Which of the other nodes' raylets accept a connection from this one."""
        return accepts_connection(addresses, timeout_s)

    def look_at_node(self, number: int) -> Figures:
        """What its node computes, holds and writes, told as that of ``number``."""
        if ray.get_gpu_ids():
            return look_from_outside(number, "cuda", own_temporary_dir())
        return look_at_this_node(number, torch.device("cpu"), own_temporary_dir())

    def take_in(self, ip: str, timeout_s: float) -> tuple[str, int]:
        """Where its node takes in what another one sends to time a link."""
        return take_in(ip, timeout_s)

    def pass_time(self, address: tuple[str, int], timeout_s: float) -> float | None:
        """Seconds of a block to another node; None where it does not arrive."""
        return pass_time(address, timeout_s)

    def ask_to_yield(self) -> None:
        """Ask the training function to save and leave at the next agreed step."""
        worker.ask_to_yield()

    def let_go(self) -> None:
        """A peer is gone, or is taken for gone: have the training function leave its step."""
        worker.let_go()

    def stack(self) -> str:
        """The Python stacks of this rank, the training thread's last."""
        return worker.stack()

    def look_for_oom(self, pid: int, kills_before: int | None) -> dict[str, Any] | None:
        """What says that another process of this node was killed for want of memory; None where
        nothing does."""
        return look_for_oom(pid, kills_before)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def watch(self) -> bool:
        """Return once a poll would find something: a report, or, True, that the rank is to be asked
        often, since it has trained and waits until its reports are taken, or has ended."""
        return worker.wait_for_news()

    def wait_for_end(self, bound_s: float) -> RankEnd:
        """Wait until the training function has ended, at most ``bound_s``.

        Its result queue is drained meanwhile, since a rank that reports would otherwise wait for a
        controller that no longer takes reports.
        """
        runner: Any = get_train_context().execution_context.training_thread_runner
        deadline = time.monotonic() + bound_s
        while runner.is_running() and time.monotonic() < deadline:
            self.clear_result_queue()
            time.sleep(_LOOK_S)
        running = runner.is_running()
        error = runner.get_error()
        return RankEnd(
            not running,
            getattr(error, "_base_exc", error),
            worker.stack() if running else None,
            worker.kept_step,
            worker.state_bytes,
        )


def _as_told(checkpoint_dir_name: str) -> str:
    return checkpoint_dir_name
