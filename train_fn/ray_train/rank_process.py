"""One rank: what Ray Train runs on each worker around the training loop."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.errors import StorageUnavailable
from storage.run_control import ProfileOrder, Stop
from storage.run_names import CheckpointName
from train_fn import clock as head_clock
from train_fn.context import WorkerContext
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.rank_logging import RankLog
from train_fn.node.cpu_threads import set_threads
from train_fn.node.debug_level import take_debug_level
from train_fn.node.device_evidence import with_device_evidence
from train_fn.node.gpu_memory import wait_for_free_memory
from train_fn.node.gpu_use import GpuWatch
from train_fn.node.host_memory import keep_memory
from train_fn.node.network_settings import meet_on_the_clusters_network
from train_fn.node.secrets import Redactor, read_secrets
from train_fn.node.silent_peers import watch_peers
from train_fn.ray_train.checkpoint_reports import CheckpointReports
from train_fn.ray_train.journal_actor import deliver_to
from train_fn.recovery.environment import take_environment
from train_fn.recovery.launch import YIELDED, RankJob, RankLaunch
from train_fn.recovery.rank_error import StepFailed, describe_error
from train_fn.step.nccl import abort_collectives, begin_attempt
from train_fn.step.peers import Peers
from train_fn.storage_proof import prove_storage

TRAINING_THREAD = "TrainingThread"
"""How Ray Train names the thread that runs the training function."""

RANK_NICENESS = -10
"""Ranks run before what only keeps the cluster and the run in order: a rank that waits for a core
makes all its peers wait."""

NODE_CORES_VARIABLE = "EVERSTEP_NODE_CORES"
"""Numbers of the cores that are this node's own, with commas between: the embedded cluster's nodes
have such (its keeper)."""

BEAT_S, OTHERS_BEAT_S = 0.5, 2.0
"""How often a rank without news asks the journal for some. A stop that rank 0 has heard of all hear
of with the next step, so that the others ask for what is theirs alone: a profile, or that a newer
attempt has begun."""

ASK_S = 5.0
"""Longest wait for an answer of the journal's."""

FLUSH_S = 10.0
"""Longest wait for its last events to become durable of a rank that leaves by a failure; the
controller's hold is longer."""

LAST_FLUSH_S = 600.0
"""The same of a rank that is done or was asked to stop: what it tells is what its run did, and the
head may be away for minutes."""

REPORT_S = 30.0
"""Longest wait at a rank's end until Ray Train knows of its last checkpoints."""

logger = logging.getLogger(__name__)

_launch: RankLaunch | None = None
_yield_asked = threading.Event()
state_bytes = 0
"""How large the state is that the rank would leave on its node."""
kept_step: int | None = None
"""Step whose state was left on this node before the training thread was freed; None for none."""
_let_go = threading.Event()
_news = threading.Event()
"""A report waits to be taken, or ``_trained``."""
_trained = threading.Event()


def prepare(launch: RankLaunch) -> None:
    """Take an attempt's launch: its environment is set before anything of the attempt reads it."""
    global _launch, kept_step, state_bytes
    _launch, kept_step, state_bytes = launch, None, 0
    take_environment(launch.env)
    take_debug_level(over_nccl=bool(ray.get_gpu_ids()))
    keep_memory()
    ip = ray.util.get_node_ip_address()
    meet_on_the_clusters_network(ip)
    watch_peers(ip, launch.silent_peer_s)
    begin_attempt()
    _yield_asked.clear()
    _let_go.clear()
    _news.clear()
    _trained.clear()
    take_precedence()


def take_precedence() -> None:
    """Raise the priority of this process, where the system permits it (root, or CAP_SYS_NICE), and
    keep to its node's own cores, where it has such."""
    cores = [int(core) for core in os.environ.get(NODE_CORES_VARIABLE, "").split(",") if core]
    threads = Path("/proc/self/task")
    for thread in [int(entry.name) for entry in threads.iterdir()] if threads.exists() else [0]:
        with contextlib.suppress(OSError):  # not permitted, or a thread that has just ended
            os.setpriority(os.PRIO_PROCESS, thread, RANK_NICENESS)
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


def ask_to_yield() -> None:
    """Make the loop believe in a pause, so that it saves and leaves at an agreed step; ``run_rank``
    knows better."""
    _yield_asked.set()


def let_go() -> None:
    """Make the loop leave: a peer is gone, or is taken for gone.

    Collectives of NCCL are aborted. Those of gloo fail by themselves where a peer has died; where
    it lives, and was only cut off from the head, the loop leaves at its next step. Return at once:
    an abort may take long, and the process is to answer meanwhile.
    """
    _let_go.set()
    threading.Thread(target=abort_collectives, name="let-go", daemon=True).start()


def _tell_kept(step: int) -> None:
    global kept_step
    kept_step = step


def _tell_state_bytes(num_bytes: int) -> None:
    global state_bytes
    state_bytes = num_bytes


def tell_end_of(training: threading.Thread) -> None:
    """Have ``wait_for_news`` return once the thread has ended, however that was."""

    def join() -> None:
        training.join()
        _tell_trained()

    threading.Thread(target=join, name="join-training", daemon=True).start()


def wait_for_news() -> bool:
    """Return once Ray Train would find something: False where that is a report, True where the loop
    has made its last step, or its thread has ended."""
    _news.wait()
    _news.clear()
    return _trained.is_set()


def _tell_trained() -> None:
    _trained.set()
    _news.set()


def stack() -> str:
    """The Python stacks of this process, the training thread's last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = sorted(
        (
            names.get(ident, "?").startswith(TRAINING_THREAD),
            f"Thread {names.get(ident, '?')}\n{''.join(traceback.format_stack(frame))}",
        )
        for ident, frame in sys._current_frames().items()
    )
    return "\n".join(text for _, text in texts)


def versions() -> dict[str, str]:
    """Versions that must be the same on every node."""
    return {
        "everstep": importlib.metadata.version("everstep"),
        "ray": ray.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **_cuda_versions(),
    }


def _cuda_versions() -> dict[str, str]:
    """What torch was built with, where it was built for GPUs; a GPU is not needed to tell."""
    if torch.version.cuda is None:
        return {}
    return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]


class RankJournal:
    """The loop's way to the journal: adds what a yield asks for, and completes the story of a
    recovery with its first step."""

    def __init__(
        self, client: ActorJournalClient, launch: RankLaunch, world_rank: int, world_size: int
    ) -> None:
        self._client = client
        self._launch = launch
        self._world_size = world_size
        self._recovering = launch.recovery is not None and world_rank == 0
        self._entered = self._restored = time.monotonic()
        self._restored_step: int | None = None
        self._rejected_step = 0

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        if self._recovering:
            self._note(kind, data)
        self._client.emit(kind, data)

    @property
    def stop_requested(self) -> Stop | None:
        return self._client.stop_requested or ("pause" if _yield_asked.is_set() else None)

    def profile_ordered(self) -> ProfileOrder | None:
        return self._client.profile_ordered

    def flush(self, timeout_s: float) -> bool:
        return self._client.flush(timeout_s)

    def hears(self, timeout_s: float) -> bool:
        return self._client.hears(timeout_s)

    def told_step(self) -> float:
        return self._client.last_step or 0

    def _note(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.RESTORED:
            self._restored = time.monotonic()
            self._restored_step = data.get("step")
            self._rejected_step = _rejected_step(data, self._launch.attempt - 1)
        if kind is EventKind.METRICS and data["points"]:
            self._recovering = False
            self._client.emit(EventKind.RECOVERED, self._recovered(float(data["points"][0]["at"])))

    def _recovered(self, first_step_at: float) -> dict[str, Any]:
        note = self._launch.recovery
        assert note is not None
        entered_at, restored_at = (
            head_clock.time_of(self._entered),
            head_clock.time_of(self._restored),
        )
        # where no step was left, what is told is of one before the failure
        first_step_at = max(first_step_at, restored_at)
        lost = None
        if self._restored_step is not None:
            # without a last step nobody knows of any
            done = max(note.last_step or 0, self._rejected_step)
            lost = max(0, done - self._restored_step)
        return {
            "detect_s": note.detect_s,
            "recovery_s": round(first_step_at - note.noticed_at, 3),
            "steps_lost": lost,
            "world_size_before": note.world_size_before,
            "world_size_after": self._world_size,
            "phases": {
                "leave": round(note.left_at - note.noticed_at, 3),
                "decide": round(self._launch.started_at - note.left_at, 3),
                "start": round(entered_at - self._launch.started_at, 3),
                "restore": round(restored_at - entered_at, 3),
                "first_step": round(first_step_at - restored_at, 3),
            },
        }


def _rejected_step(restored: dict[str, Any], attempt: int) -> int:
    """Return the highest step of the checkpoints that ``attempt`` wrote and a restore rejected.

    The ranks may have died before their journal could report those steps. Checkpoints of other
    attempts do not count: their steps were lost before.
    """
    names = [CheckpointName.parse(str(each["name"])) for each in restored.get("rejected") or ()]
    return max((name.step for name in names if name and name.attempt == attempt), default=0)


def run_rank(config: dict[str, RankJob]) -> str | None:
    """The training function that Ray Train calls: None when all steps are done, the stop, or
    ``YIELDED``.

    Raises StepFailed, whatever happened: its content survives pickling, also where an exception's
    class does not.
    """
    job, launch = config["job"], _launch
    assert launch is not None, "a rank runs without its launch"
    place = ray.train.get_context()
    rank = place.get_world_rank()
    log = RankLog(job.run_dir, job.submission, launch.attempt, rank)
    redactor = log.redact = Redactor()
    log.start()
    client = ActorJournalClient(
        deliver_to(job.journal),
        f"rank-{rank}.a{launch.attempt:03d}",
        launch.attempt,
        interval_s=max(0.5, job.run_dir.storage.batch_s),
        beat_s=BEAT_S if rank == 0 else OTHERS_BEAT_S,
        on_superseded=_leave_at_once,
    )
    try:
        secrets = read_secrets(job.spec, os.environ)
        redactor.learn(secrets.values())
        os.environ.update(secrets)
        stop = _train(job, launch, RankJournal(client, launch, rank, place.get_world_size()))
        if not client.flush(LAST_FLUSH_S):
            raise StorageUnavailable(
                f"the journal did not take this rank's last events within {LAST_FLUSH_S:g} s"
            )
        if stop is None or not _yield_asked.is_set():
            return stop
        client.ask(ASK_S)  # rank 0 may have heard before this one of what the user wants
        return stop if client.stop_requested is not None else YIELDED
    except BaseException as exc:
        error = describe_error(exc, rank)
        if error.kind is ErrorKind.DEVICE:
            error = with_device_evidence(error, _device(job.use_gpu))
        error = redactor.error(error)
        logger.error(
            "rank %d stopped at step %s (%s): %s\n%s",
            rank,
            error.step,
            error.kind,
            error.summary,
            error.traceback,
        )
        raise StepFailed(error) from None
    finally:
        for variable in job.spec.secrets:
            os.environ.pop(variable, None)
        client.close(FLUSH_S)
        log.close()


def _train(job: RankJob, launch: RankLaunch, journal: RankJournal) -> Stop | None:
    place = ray.train.get_context()
    set_threads(job.spec)
    reports = CheckpointReports(job.run_dir, _news.set)
    reports.start()
    context = WorkerContext(
        spec=job.spec,
        run_dir=job.run_dir,
        submission=job.submission,
        attempt=launch.attempt,
        world_rank=place.get_world_rank(),
        world_size=place.get_world_size(),
        local_rank=place.get_local_rank(),
        local_world_size=place.get_local_world_size(),
        node_id=ray.get_runtime_context().get_node_id(),
        num_nodes=launch.num_nodes,
        device=_device(job.use_gpu),
        journal=journal,
        report_checkpoint=reports.add,
        profile_ordered=journal.profile_ordered,
        hears_journal=journal.hears,
        told_step=journal.told_step,
        tell_state_bytes=_tell_state_bytes,
        tell_kept=_tell_kept,
        is_let_go=_let_go.is_set,
        on_replaced=lambda why: _leave_at_once(),
    )
    logger.info(
        "rank %d of %d, attempt %d, on node %s, device %s",
        context.world_rank,
        context.world_size,
        context.attempt,
        context.node_id,
        context.device,
    )
    wait_for_free_memory(context.device)
    prove_storage(context, Peers(context.world_rank, context.world_size, context.device))
    module, _, function = job.train.partition(":")
    train: Callable[[WorkerContext], Stop | None] = getattr(
        importlib.import_module(module), function
    )
    # What the imports made stays: leaving a broken step collects garbage, and should not look
    # through all of torch for it.
    gc.freeze()
    with GpuWatch(journal.emit, context.world_rank, context.node_id, context.device):
        stop = train(context)
    # the controller takes one report at a time, whenever it asks: from here on it is waited for
    _tell_trained()
    if not reports.close(REPORT_S):
        logger.warning("Ray Train has not taken all checkpoints within %g s", REPORT_S)
    return stop


def _device(use_gpu: bool) -> torch.device:
    """The rank's own.

    Ray counts it among those of its node, whose ids it shares between their ranks once these are
    created. A process that had used CUDA by then, as to look at its node, goes on to see its own
    alone.
    """
    if not use_gpu:
        return torch.device("cpu")
    device = ray.train.torch.get_device()
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", 0)


def _leave_at_once() -> None:
    """A newer attempt runs: this process was given up, and must not write one byte more into the
    run."""
    logger.error("a newer attempt has started without this rank; it ends here")
    os._exit(1)
