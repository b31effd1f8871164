"""One rank of a run without Ray, from its start to its exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.errors import EverstepError, UsageError
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.claims import successor
from storage.errors import StorageError
from storage.run_dir import RunDir
from train_fn.checkpoints.cadence import committed_data
from train_fn.context import WorkerContext
from train_fn.journal.server import LocalJournal, Say, open_local_journal
from train_fn.loop import attempt
from train_fn.node import children
from train_fn.node.memory import keep_memory
from train_fn.node.network import interface_problem, take_debug_level
from train_fn.node.usage import set_threads
from train_fn.recovery.evidence import StepFailed
from train_fn.recovery.launch import Left
from train_fn.recovery.settings import device_env, take_environment
from train_fn.snapshots.last_save import save_own
from train_fn.snapshots.store import snapshot_store
from train_fn.standalone.start import LocalStart, begin_run
from train_fn.step.nccl import abort_collectives, fails_by_itself, group_backend
from train_fn.step.peers import Peers

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 75
CLOSE_S = 30.0

logger = logging.getLogger(__name__)


def say_line(line: str) -> None:
    """Print a line for people, at once."""
    print(line, flush=True)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    """The process's exit code."""
    step: int
    """Steps done, as rank 0 knows it."""
    metrics: dict[str, float]
    """Of the last evaluation."""
    checkpoints: str
    """Where they are."""


class _LastingOutput(io.FileIO):
    """Standard output that a program outlives: once its reader is gone, it leads nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_reader() -> None:
    """Let training go on when whoever reads its output goes away, as ``head`` does."""
    output = sys.stdout
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file, but a test's text
        if stat.S_ISFIFO(os.fstat(output.fileno()).st_mode):
            lasting = io.BufferedWriter(_LastingOutput(output.fileno(), "w", closefd=False))
            output.flush()
            sys.stdout = io.TextIOWrapper(
                lasting, output.encoding, output.errors, line_buffering=True
            )


def run_rank(
    spec: RunSpec,
    run_dir: RunDir,
    place: LocalPlace,
    *,
    fresh: bool | None,
    stopping: threading.Event,
    say: Say = say_line,
    train: Callable[[WorkerContext], Left | None] = attempt.train,
) -> Ended:
    """Train one rank to its end. The process group exists.

    Args:
        fresh: as for ``begin_run``.
        stopping: is set when all ranks are to save and leave.
        say: tells people how it goes.
        train: the loop. Only its StepFailed is handled here.
    """
    if spec.train.on_out_of_memory == "smaller":
        raise UsageError(
            "train.on_out_of_memory is smaller, and without a service nobody starts the ranks "
            "again with smaller micro-batches. Set it to fail and lower train.micro_batch_size, "
            "or `everstep submit` the spec"
        )
    device = device_of(spec, place)
    ctx, journal, watch, _ = begin_attempt(spec, run_dir, place, device, fresh, stopping, say)
    where = f"{run_dir.local_path or run_dir.uri}/checkpoints"
    try:
        stop = train(ctx)
        watch.end()
        report_end(journal, stop)
    except StepFailed as exc:
        error = exc.error
        logger.error(
            "rank %d stopped at step %s (%s): %s\n%s",
            place.rank,
            error.step,
            error.phase,
            error.summary,
            error.traceback,
        )
        if place.rank == 0:
            save_left(ctx, say)
        step = journal.step if error.step is None else error.step
        return Ended(EXIT_FAILED, step, journal.metrics, where)
    finally:
        watch.close()
        journal.close(CLOSE_S)
    if place.rank == 0:
        say(f"{'paused' if stop else 'done'} at step {journal.step}; checkpoints are in {where}")
    return Ended(EXIT_STOPPED if stop else 0, journal.step, journal.metrics, where)


def begin_attempt(
    spec: RunSpec,
    run_dir: RunDir,
    place: LocalPlace,
    device: torch.device,
    fresh: bool | None,
    stopping: threading.Event,
    say: Say,
) -> tuple[WorkerContext, LocalJournal, PeerWatch, bool]:
    """Let rank 0 choose the numbers of this attempt, and tell the journal of it. Watch the ranks of
    this host. Return whether the run had made all its steps before, too. A collective."""
    peers = Peers(place.rank, place.world_size, device)
    start: LocalStart | EverstepError | StorageError | None = None
    if place.rank == 0:
        try:
            start = begin_run(run_dir, spec, place.launch, fresh=fresh)
        except (EverstepError, StorageError) as exc:
            start = exc
    start = peers.share(start, 0)
    if isinstance(start, Exception):
        raise start
    assert start is not None
    if place.rank == 0 and start.note is not None:
        say(start.note)
    nodes = peers.gather(
        {"rank": place.rank, "node_id": place.node, "node_ip": "", "pid": os.getpid()}
    )
    watch = PeerWatch(peers)
    journal = open_local_journal(
        run_dir, start.submission, start.attempt, place.rank, stopping, say
    )
    replaced = threading.Event()

    def end_replaced(why: str) -> None:
        logger.error("%s; this process ends. Start each training once", why)
        replaced.set()

    origin = start.submission, start.attempt
    ctx = WorkerContext(
        spec=spec,
        run_dir=run_dir,
        submission=start.submission,
        attempt=start.attempt,
        world_rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_id=place.node,
        num_nodes=len({node["node_id"] for node in nodes}),
        device=device,
        journal=journal,
        report_checkpoint=lambda name, metrics: None,
        holds_lease=lambda timeout_s: successor(run_dir, origin) is None,
        is_abandoned=replaced.is_set,
        on_replaced=end_replaced,
    )
    journal.emit(
        EventKind.ATTEMPT_STARTED,
        {"world_size": place.world_size, "workers": nodes, "launch": place.launch},
    )
    # The next attempt takes a number after this one, so the journal must know of it before it can
    # leave a state.
    journal.flush(CLOSE_S)
    return ctx, journal, watch, start.was_done


def report_end(journal: LocalJournal, stop: Left | None) -> None:
    """Report that all steps are done, or that the ranks agreed to stop."""
    cause = "stopped" if stop else "finished"
    journal.emit(EventKind.ATTEMPT_ENDED, {"cause": cause, "last_step": journal.step})
    journal.emit(
        EventKind.FINISHED,
        {"outcome": "stopped" if stop else "succeeded", "reason": None, "step": journal.step},
    )


def save_left(ctx: WorkerContext, say: Say) -> None:
    """Commit what rank 0 left on its node, since nobody knows here whether torchrun starts these
    processes again."""
    saved = save_own(ctx.run_dir, ctx.spec, snapshot_store(ctx), ctx.world_size)
    if saved is None:
        return
    if saved.manifest is not None:
        ctx.journal.emit(EventKind.CHECKPOINT_COMMITTED, committed_data(saved.manifest))
    say(f"stopped by an error; {saved.summary}")


# ---------------------------------------------------------------- peers


class PeerWatch:
    """Abort the collectives of this rank when another one of its host dies. A collective to make.

    NCCL does not notice such a death, and without a service there is no controller. Does nothing
    where collectives fail by themselves, or the system tells of no other process (``pidfd_open``).
    """

    def __init__(self, peers: Peers) -> None:
        self._peers, self._ends = peers, select.poll()
        self._ranks: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        if fails_by_itself():
            return
        gone = None
        for rank, (where, pid) in enumerate(peers.gather((_machine(), os.getpid()))):
            if rank != peers.rank and where == _machine() != "":
                try:
                    self._ranks[os.pidfd_open(pid)] = rank
                except ProcessLookupError:
                    gone = rank
                except (OSError, AttributeError):
                    pass  # forbidden, or not known to this system
        self._asked, self._ask = os.pipe()
        for end in (*self._ranks, self._asked):
            self._ends.register(end, select.POLLIN)
        self._thread = threading.Thread(
            target=self._run, args=(gone,), name="peer-watch", daemon=True
        )
        self._thread.start()

    def _run(self, gone: int | None) -> None:
        """Wait for an end, unless a rank has ended already."""
        if gone is None:
            [(end, _), *_] = self._ends.poll()
            gone = self._ranks.get(end)
        if gone is not None:
            logger.error("rank %d has died; this rank leaves with its state", gone)
            abort_collectives()

    def end(self) -> None:
        """Cease to watch, at once on all ranks: then any of them may end. A collective."""
        was_open = self._thread is not None
        self.close()
        if was_open:
            self._peers.gather(None)

    def close(self) -> None:
        """Cease to watch."""
        if self._thread is not None:
            os.write(self._ask, b"x")
            self._thread.join()
            self._thread = None
            for each in (*self._ranks, self._asked, self._ask):
                os.close(each)


@cache
def _machine() -> str:
    """Return what processes have in common that can name each other by their ids: the boot of the
    machine, and the namespace. Empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


# ---------------------------------------------------------------- place

# Where a rank runs: its number, its node, its device.


@dataclass(frozen=True)
class LocalPlace:
    """One process among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    launch: str
    """Names who started the process. A process that torchrun starts in place of another one has the
    same."""


def place_from_env(env: Mapping[str, str]) -> LocalPlace:
    """Return where torchrun put this process. Raises UsageError if torchrun did not start it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: start this by torchrun, "
            "`torchrun --nproc-per-node 2 -m train_fn.standalone SPEC.yaml`, or alone, `everstep "
            "run SPEC.yaml --local`"
        )
    rank, world_size, local_rank, local_world_size = (int(env[name]) for name in names[:4])
    agent = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid())
    return LocalPlace(
        rank, world_size, local_rank, local_world_size, os.uname().nodename, launch_of(agent)
    )


def launch_of(process: psutil.Process) -> str:
    """Return a name for ``process`` that no other process has, now or later."""
    return f"{os.uname().nodename}/{process.pid}/{process.create_time():.2f}"


def place_alone() -> LocalPlace:
    """Return the place of this process as the only rank."""
    return LocalPlace(0, 1, 0, 1, os.uname().nodename, launch_of(psutil.Process()))


def device_of(spec: RunSpec, place: LocalPlace) -> torch.device:
    """Return this rank's GPU if the spec wants one and the node has it, else the CPU. Raises
    UsageError."""
    wanted, available = spec.scaling.use_gpu, torch.cuda.device_count()
    if wanted is False or (wanted == "auto" and available < place.local_world_size):
        return torch.device("cpu")
    if available < place.local_world_size:
        raise UsageError(
            f"scaling.use_gpu is true, but {place.node} has {available} GPUs for "
            f"{place.local_world_size} ranks; start fewer, "
            "or set scaling.use_gpu to false"
        )
    return torch.device("cuda", place.local_rank)


# ---------------------------------------------------------------- process

# This process as a rank: its settings, its process group, its signals.


def set_up(spec: RunSpec) -> None:
    """Prepare this process to be a rank: its environment before anything reads it, its output, its
    memory and its threads."""
    take_environment(device_env(spec) | spec.env)
    outlive_reader()
    keep_memory()
    set_threads(spec)


def join(spec: RunSpec, place: LocalPlace, timeout_s: float) -> None:
    """Create the process group at the address that torchrun gave. A process that is alone needs no
    network. Raises UsageError."""
    device = device_of(spec, place)
    problem = interface_problem(os.environ, nccl=device.type == "cuda")
    if problem is not None and place.world_size > 1:
        raise UsageError(problem)
    backend, timeout = group_backend(device), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    take_debug_level(over_nccl=backend != "gloo")
    if place.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    children.begin()
    dist.init_process_group(backend, timeout=timeout)
    children.connected()


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM, SIGHUP and the first Ctrl-C set, for all ranks to save at one
    step and leave. The second Ctrl-C ends the process."""
    stopping = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        stopping.set()
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ask)
    return stopping
