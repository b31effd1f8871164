"""The host of a rank: Ray Train's worker, which runs no code of the user's and imports no torch.

It stays from one attempt to the next, and has a process forked for each of them
(``train_fn/ranks``). A function or script of the user's that calls Ray's API runs in the host
itself, whose process then serves one attempt.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from train_fn.errors import CannotBuild, RankDied
from train_fn.node.memory import look_for_oom, oom_kills
from train_fn.node.network import accepts_connection, interface_problem, pass_time, take_in
from train_fn.ranks.fork import Zygotes
from train_fn.ranks.line import BuildOrder, RankFacts
from train_fn.ranks.zygote import streams_of_this
from train_fn.ray_train.journal_actor import deliver_to
from train_fn.ray_train.ray_checkpoints import CheckpointReports
from train_fn.ray_train.ray_internals import RayTrainWorker, get_train_context
from train_fn.recovery.launch import Meeting, Position, RankJob, RankLaunch

WATCH = "watch"
"""Concurrency group of ``watch``, which waits while other calls run."""
KEPT = "kept"
"""Concurrency group of the calls that end a rank and ask for its state. They must be answered while
a call to a rank that is stopped waits."""
_LOOK_S = 0.005
_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_REPORTS_TAKEN_S = 30.0
"""Longest wait for Ray Train to take a rank's last reports."""

logger = logging.getLogger(__name__)


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
    """Size of the state that the rank leaves on its node."""


@dataclass(frozen=True)
class RankReady:
    """Describe a prepared rank and its node."""

    versions: dict[str, str]
    host_pid: int
    oom_kills: int | None
    """Processes that the OOM killer had ended on the node by then; None if unknown."""
    problem: str | None = None
    """Why ranks on the node cannot reach their peers, if this is known before they try."""
    built_apart: str | None = None
    """Why the rank builds for itself; None if it begins with what the node has built once."""


class Rank(Protocol):
    """A rank's process, as its host uses it."""

    pid: int

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a function of ``train_fn/ranks/main.py`` in the rank. Raises RankDied."""

    def kill(self) -> None:
        """End the process at once."""

    def close(self) -> None:
        """End the process, and forget it."""


class _Told:
    """What a rank has told its host in one attempt."""

    def __init__(self) -> None:
        self.news = threading.Event()
        """A report waits to be taken, or ``trained`` is set."""
        self.trained = threading.Event()
        self.state_bytes = 0
        self.kept: int | None = None
        """Step whose state was left on this node before the training thread was freed."""
        self.raised: BaseException | None = None
        """An error that the training function cannot raise itself."""

    def over(self) -> None:
        self.trained.set()
        self.news.set()


_IMPORTS_RAY = "its code imports Ray, so it runs in Ray's own workers"
_present: EverstepTrainWorker | None = None


class EverstepTrainWorker(RayTrainWorker):  # type: ignore[misc]
    """Host a rank. The actor has no runtime_env, so that any idle process can run it."""

    def __init__(self) -> None:
        global _present
        super().__init__()
        _present = self
        self._zygotes = Zygotes(ray.get_runtime_context().get_node_id())
        self._calls_ray = False
        self._figures: Any = None
        self._versions: dict[str, str] | None = None
        self._launch: RankLaunch | None = None
        self._rank: Rank | None = None
        self._remembered: dict[str, Any] = {}
        self._told = _Told()
        self._journal: Callable[..., Any] | None = None
        self._reports: CheckpointReports | None = None

    # -- start

    def build(self, launch: RankLaunch, job: RankJob) -> float:
        """Have the run's task built on this node, unless it is. Return the seconds that it took."""
        if job.calls_ray or self._zygotes.has_built:
            return 0.0
        return self._zygotes.build(lambda path: _order(path, launch, job), job)

    def get_ready(self, launch: RankLaunch, job: RankJob, *, checks_node: bool) -> int:
        """Check this node if ``checks_node``, and have the task built here, for a rank that comes.
        Return this host's process id. Raises CannotBuild."""
        if checks_node:
            self.check_node(0)
        self.build(launch, job)
        if self._zygotes.failed is not None:
            raise CannotBuild(self._zygotes.failed)
        return os.getpid()

    def prepare(self, launch: RankLaunch, job: RankJob) -> RankReady:
        """Begin an attempt: with a new process, unless the rank runs in this one."""
        self._launch, self._told = launch, _Told()
        self._calls_ray = job.calls_ray
        use_gpu = bool(ray.get_gpu_ids())
        problem = interface_problem({**os.environ, **launch.env}, nccl=use_gpu)
        last, self._rank = self._rank, None
        if last is not None:
            last.close()
        if job.calls_ray:
            from train_fn.ray_train.user_function import OwnProcess

            self._rank = OwnProcess(launch, ray.util.get_node_ip_address(), self._serve)
        else:
            facts = RankFacts(
                launch,
                dict(os.environ),
                ray.get_runtime_context().get_node_id(),
                ray.util.get_node_ip_address(),
                use_gpu,
                streams_of_this(),
                dict(self._remembered),
            )
            self._rank = self._zygotes.fork(facts, self._serve)
        if self._versions is None:
            self._versions = self._call_elsewhere("train_fn.node.node_check:versions")
        return RankReady(
            self._versions,
            os.getpid(),
            oom_kills(),
            problem,
            _IMPORTS_RAY if job.calls_ray else self._zygotes.why_not,
        )

    def get_metadata(self) -> Any:
        """Return where the rank runs; before there is one, where this host does."""
        found = super().get_metadata()
        return found if self._rank is None else dataclasses.replace(found, pid=self._rank.pid)

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        """Initialise Ray's train context. Ranks that do not synchronise on reports use the given
        checkpoint name."""
        super().init_train_context(*args, **kwargs)
        if not self._calls_ray:
            get_train_context()._sync_checkpoint_dir_name_across_ranks = lambda name: name

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Let the rank listen for the others. Return the address and the port."""
        ip = ray.util.get_node_ip_address()
        return ip, self._of_rank().call("open_store", ip, timeout_s)

    def join(self, meeting: Meeting) -> None:
        """Let the rank meet the others in a process group."""
        visible = os.environ.get(_GPU_VARIABLE, "")
        env = {_GPU_VARIABLE: visible} if visible else {}
        ids = [str(each) for each in ray.get_gpu_ids()]
        device = visible.split(",").index(ids[0]) if ids and ids[0] in visible.split(",") else 0
        self._of_rank().call("join", _place(), meeting, device if ids else None, env)

    def run_train_fn(self, *args: Any, **kwargs: Any) -> None:
        """Start Ray's training thread, whose end is reported from here on."""
        super().run_train_fn(*args, **kwargs)
        runner: Any = get_train_context().execution_context.training_thread_runner
        told = self._told

        def join() -> None:
            runner._thread.join()
            told.over()

        threading.Thread(target=join, name="join-training", daemon=True).start()

    def train(self, job: RankJob) -> str | None:
        """Let the rank train to its end. Called by Ray's training thread."""
        self._journal = deliver_to(job.journal)
        self._reports = CheckpointReports(job.run_dir, self._told.news.set)
        self._reports.start()
        told = self._told
        stop = self._of_rank().call("train", dataclasses.replace(job, journal=None), _place())
        if told.raised is not None:
            raise told.raised
        return stop  # type: ignore[no-any-return]

    def _of_rank(self) -> Rank:
        assert self._rank is not None, "a rank is called before its attempt"
        return self._rank

    # -- calls of the rank

    def _serve(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "deliver":
            assert self._journal is not None
            return self._journal(*arguments)
        if name == "report":
            assert self._reports is not None
            return self._reports.add(*arguments)
        if name == "close_reports":
            assert self._reports is not None
            return self._reports.close(_REPORTS_TAKEN_S)
        what, told = arguments
        return self._note(what, *told)

    def _note(self, what: str, *facts: Any) -> None:
        """Note what a rank tells."""
        told = self._told
        if what == "trained":
            told.over()
        elif what == "kept":
            told.kept = facts[0]
        elif what == "state_bytes":
            told.state_bytes = facts[0]
        elif what == "remember":
            name, value = facts
            self._remembered[name] = value
        else:
            told.raised = facts[0]
            runner: Any = get_train_context().execution_context.training_thread_runner
            runner.get_exception_queue().put(facts[0])
            told.over()

    # -- checks of the node

    def reach(self, addresses: list[tuple[str, int]], timeout_s: float) -> list[bool]:
        """Return, for each raylet address, whether it accepts a connection from this node."""
        return accepts_connection(addresses, timeout_s)

    def check_node(self, number: int) -> Any:
        """Check computation, memory and storage of this node, and return the figures as those of
        ``number``. A host measures once, before its rank trains: training would slow the node."""
        if self._figures is None:
            self._figures = self._call_elsewhere(
                "train_fn.node.preflight:check_own", number, bool(ray.get_gpu_ids())
            )
        figures = copy.deepcopy(self._figures)  # who compares nodes adds to it
        figures.rank = number
        return figures

    def _call_elsewhere(self, name: str, *arguments: Any) -> Any:
        """Call a function that needs torch: in a process that has it."""
        return self._zygotes.call(_called, name, *arguments)

    def take_in(self, ip: str, timeout_s: float) -> tuple[str, int]:
        """Listen for a block that another node sends to time a link. Return the address."""
        return take_in(ip, timeout_s)

    def pass_time(self, address: tuple[str, int], timeout_s: float) -> float | None:
        """Return the seconds to send a block to another node; None if it does not arrive."""
        return pass_time(address, timeout_s)

    # -- while it trains

    def ask_to_yield(self, number: int, hands_over: bool) -> None:
        """Ask the training function to exit at the next step that all ranks agree on, with a final
        checkpoint unless it hands over to a group that follows at once."""
        self._of_rank().call("ask_to_yield", number, hands_over)

    def abandon(self) -> None:
        """Make the training function leave its step, since a peer is gone or assumed to be."""
        self._of_rank().call("abandon")

    def stack(self) -> str:
        """Return the Python stacks of this rank, with the training thread's last, and without
        values of secrets."""
        found: str = self._of_rank().call("stack")
        return found

    def collective_counts(self) -> Any:
        """Return how far this rank is in its collectives."""
        return self._of_rank().call("collective_counts")

    def look_for_oom(self, pid: int, kills_before: int | None) -> dict[str, Any] | None:
        """Return evidence that the OOM killer ended another process of this node; None if there is
        none."""
        return look_for_oom(pid, kills_before)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def watch(self) -> bool:
        """Return once a poll would find something. Return True if the rank should be polled often,
        because it has finished training and waits for its reports to be taken, or has ended."""
        told = self._told
        told.news.wait()
        told.news.clear()
        return told.trained.is_set()

    def poll_status(self) -> Any:
        """Return what Ray polls for, once the rank answers: a stopped one answers nothing."""
        if not self._told.trained.is_set():
            with contextlib.suppress(RankDied):  # its training thread says so
                self._of_rank().call("ping")
        return super().poll_status()

    def wait_for_end(self, bound_s: float) -> RankEnd:
        """Wait until the training function has ended, at most ``bound_s``.

        Its result queue is drained meanwhile, since a rank that reports would otherwise wait for a
        controller that no longer takes reports. A rank that is stopped does not answer, and neither
        does this call.
        """
        runner: Any = get_train_context().execution_context.training_thread_runner
        deadline = time.monotonic() + bound_s

        def is_running() -> bool:  # one that has called os._exit waits for its end
            return runner.is_running() and runner.get_error() is None

        while is_running() and time.monotonic() < deadline:
            self.clear_result_queue()
            time.sleep(_LOOK_S)
        stack = None
        if is_running():
            try:
                stack = self.stack()
            except RankDied:
                runner._thread.join()
        running, error = is_running(), runner.get_error()
        return RankEnd(
            not running,
            getattr(error, "_base_exc", error),
            stack if running else None,
            self._told.kept,
            self._told.state_bytes,
        )

    # -- end

    @ray.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def end_rank(self) -> None:
        """End the rank's process at once, also a stopped one."""
        if self._rank is not None:
            self._rank.kill()

    @ray.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def ping_rank(self) -> None:
        """Return if the rank answers. Raises RankDied."""
        if self._rank is not None:
            self._rank.call("ping")

    @ray.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def release(self) -> int:
        """End the rank. Return this host's process id: it can serve another attempt."""
        if self._rank is not None:
            self._rank.close()
        return os.getpid()


def run_rank(config: dict[str, RankJob]) -> str | None:
    """Train. Ray Train calls this on every host."""
    assert _present is not None
    return _present.train(config["job"])


def _place() -> Position:
    """Return the rank's place in its attempt."""
    place = get_train_context()
    return Position(
        place.get_world_rank(),
        place.get_world_size(),
        place.get_local_rank(),
        place.get_local_world_size(),
        place.get_node_rank(),
        ray.get_runtime_context().get_node_id(),
    )


def _order(path: Path, launch: RankLaunch, job: RankJob) -> BuildOrder:
    return BuildOrder(
        dataclasses.replace(job, journal=None),
        path,
        dict(os.environ),
        launch.env,
        streams_of_this(),
    )


def _called(name: str, *arguments: Any) -> Any:
    """Call ``module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*arguments)
