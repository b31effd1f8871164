"""The training loop without Ray and without the service: under torchrun, or as one process that a
debugger can step through.

    torchrun --nproc-per-node 2 -m train_fn.standalone SPEC.yaml \\
        --storage /mnt/shared/everstep --run-id digits
    torchrun --nproc-per-node 2 -m train_fn.standalone SPEC.yaml --code . --task my_pkg.task:MyTask
    everstep run SPEC.yaml --local

The loop, the data order, the checkpoints and the journal are those of a run under the service. The
same command again goes on from where the run was: processes that torchrun itself restarts from the
newest state on their nodes, others from the newest checkpoint.

Exit codes: 0 when all steps are done, 1 when training failed, 2 for a wrong request, 75 when it was
asked to stop and can go on.
"""

from __future__ import annotations

from everstep.spec.hash_seed import fix_hash_seed

if __name__ == "__main__":
    fix_hash_seed()  # before torch is imported: the program may begin again

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.code.source import with_code
from everstep.errors import EverstepError, UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.spec.yaml_file import read_spec
from everstep.wire.events import EventKind
from storage.claims import claim_submission, newest_attempt, succeed_submission
from storage.code.store import CodeStore
from storage.errors import AlreadyClaimed, StorageError, StorageNotFound
from storage.filesystem import Storage, open_storage
from storage.logs.journal import read_journal
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.checkpoints.save_events import committed_data
from train_fn.context import WorkerContext
from train_fn.journal.local_journal import LocalJournal, Say, open_local_journal
from train_fn.loop.attempt import train, train_openly
from train_fn.loop.departure import save_last
from train_fn.loop.training import Progress
from train_fn.node.cpu_threads import set_threads
from train_fn.node.debug_level import take_debug_level
from train_fn.node.host_memory import keep_memory
from train_fn.node.network_settings import interface_problem
from train_fn.recovery.environment import device_env, take_environment
from train_fn.recovery.history import READ_BATCH, read_history
from train_fn.recovery.rank_error import StepFailed
from train_fn.recovery.settings import RecoverySettings
from train_fn.snapshots.last_save import save_own
from train_fn.snapshots.store import snapshot_store
from train_fn.step.nccl import group_backend
from train_fn.step.peers import Peers, end_process_group
from train_fn.user_code.modules import work_on

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 75
CLOSE_S = 30.0
MAY_CHANGE = frozenset(
    {"name", "project", "priority", "tags", "scaling", "checkpoint", "recovery", "env"}
)
"""Fields of a spec that another start of the same run may change: they have no say in what is
computed."""

logger = logging.getLogger(__name__)


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Place:
    """One process among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    launch: str
    """The same for processes of which one takes the other's place: those that one agent of torchrun
    started."""


@dataclass(frozen=True)
class Start:
    """What rank 0 found out about the run's past, for all ranks."""

    submission: int
    attempt: int


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
    """Where they lie."""


def place_from_env(env: Mapping[str, str]) -> Place:
    """Where torchrun put this process. Raises UsageError where it did not."""
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
    return Place(
        rank, world_size, local_rank, local_world_size, os.uname().nodename, _launch(agent)
    )


def _launch(process: psutil.Process) -> str:
    return f"{os.uname().nodename}/{process.pid}/{process.create_time():.2f}"


def begin_run(run_dir: RunDir, spec: RunSpec, launch: str, *, fresh: bool) -> Start:
    """Make the run's directory, or go on with what is there; rank 0 alone. Raises UsageError where
    another run lies there."""
    if fresh:
        run_dir.delete()
    try:
        kept = run_dir.read_spec()
    except StorageNotFound:
        kept = spec
    differing = _differences(kept, spec)
    if differing:
        raise UsageError(
            f"{run_dir.uri} holds a run of another spec ({', '.join(differing)} differ); choose "
            "another --run-id, or begin anew "
            "by --fresh, which deletes it"
        )
    run_dir.write_spec(spec)
    submissions = run_dir.submissions()
    last_attempt = read_history(run_dir).last_attempt
    newest = submissions[-1] if submissions else 0
    same = newest > 0 and _launched_by(run_dir, newest) == launch
    if not same:
        newest = _claim_next(run_dir, newest)
    return Start(newest, newest_attempt(run_dir, newest, last_attempt) + 1)


def _claim_next(run_dir: RunDir, newest: int) -> int:
    """The first submission behind ``newest`` that nobody has begun: two starts at the same time
    have one each."""
    number = newest + 1
    while True:
        try:
            claim_submission(run_dir, number)
        except AlreadyClaimed:
            number += 1
        else:
            succeed_submission(run_dir, number)
            return number


def _differences(kept: RunSpec, spec: RunSpec) -> list[str]:
    """Names of what differs between two specs, of that which decides what is computed."""
    before, after = kept.model_dump(), spec.model_dump()
    names = [
        name
        for name in after
        if name not in MAY_CHANGE and name != "train" and before.get(name) != after[name]
    ]
    names += [
        f"train.{name}"
        for name in after["train"]
        if name != "loader" and before["train"].get(name) != after["train"][name]
    ]
    return names + (
        ["the resolved micro_batch_size"] if kept.micro_batch_size != spec.micro_batch_size else []
    )


def _launched_by(run_dir: RunDir, submission: int) -> str | None:
    """Whose processes ran the last attempt of a submission."""
    launch, cursor = None, None
    while True:
        events, cursor = read_journal(run_dir, submission, cursor, READ_BATCH, past_damage=True)
        for event in events:
            if event.kind is EventKind.ATTEMPT_STARTED:
                launch = event.data.get("launch")
        if not events:
            return launch


def run_rank(
    spec: RunSpec,
    run_dir: RunDir,
    place: Place,
    *,
    fresh: bool,
    stopping: threading.Event,
    say: Say = _say,
    debug: bool = False,
) -> Ended:
    """Train one rank to its end. The process group exists.

    With ``debug``, which is for one rank alone, an exception of the training reaches the caller
    with its frames.
    """
    device = _device(spec, place)
    peers = Peers(place.rank, place.world_size, device)
    start: Start | EverstepError | StorageError | None = None
    if place.rank == 0:
        try:
            start = begin_run(run_dir, spec, place.launch, fresh=fresh)
        except (EverstepError, StorageError) as exc:
            start = exc
    start = peers.share(start, 0)
    if isinstance(start, Exception):
        raise start
    assert start is not None
    nodes = peers.gather(
        {"rank": place.rank, "node_id": place.node, "node_ip": "", "pid": os.getpid()}
    )
    journal = open_local_journal(
        run_dir, start.submission, start.attempt, place.rank, stopping, say
    )
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
    )
    journal.emit(
        EventKind.ATTEMPT_STARTED,
        {"world_size": place.world_size, "workers": nodes, "launch": place.launch},
    )
    # an attempt that leaves a state must be known: the next one takes a number after it
    journal.flush(CLOSE_S)
    where = f"{run_dir.local_path or run_dir.uri}/checkpoints"
    try:
        stop = _train_in_the_open(ctx) if debug else train(ctx)
        _finish(journal, stop)
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
            _save_last(ctx, say)
        return Ended(
            EXIT_FAILED, journal.step if error.step is None else error.step, journal.metrics, where
        )
    finally:
        journal.close(CLOSE_S)
    if place.rank == 0:
        say(f"{'paused' if stop else 'done'} at step {journal.step}; checkpoints are in {where}")
    return Ended(EXIT_STOPPED if stop else 0, journal.step, journal.metrics, where)


def _train_in_the_open(ctx: WorkerContext) -> Stop | None:
    """As ``loop.train``, but nobody waits for this rank, and an exception keeps its frames."""
    progress = Progress()
    try:
        return train_openly(ctx, progress)
    except Exception:
        save_last(ctx, progress)
        raise
    finally:
        snapshot_store(ctx).remove_all()


def _save_last(ctx: WorkerContext, say: Say) -> None:
    """Commit what rank 0 left on its node: whether torchrun starts these processes again is not
    known here."""
    saved = save_own(ctx.run_dir, ctx.spec, snapshot_store(ctx), ctx.world_size)
    if saved is None:
        return
    if saved.manifest is not None:
        ctx.journal.emit(EventKind.CHECKPOINT_COMMITTED, committed_data(saved.manifest))
    say(f"stopped by an error; {saved.summary}")


def _finish(journal: LocalJournal, stop: Stop | None) -> None:
    cause = "stopped" if stop else "finished"
    journal.emit(EventKind.ATTEMPT_ENDED, {"cause": cause, "last_step": journal.step})
    journal.emit(
        EventKind.FINISHED,
        {"outcome": "stopped" if stop else "succeeded", "reason": None, "step": journal.step},
    )


def _device(spec: RunSpec, place: Place) -> torch.device:
    """This rank's GPU where the spec has it and there is one, else the CPU. Raises UsageError."""
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


def _join(spec: RunSpec, place: Place, timeout_s: float) -> None:
    """The process group, by the address that torchrun gave; of one process alone without any
    network."""
    device = _device(spec, place)
    problem = interface_problem(os.environ, nccl=device.type == "cuda")
    if problem is not None and place.world_size > 1:
        raise UsageError(problem)
    backend, timeout = group_backend(device), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    take_debug_level(over_nccl=backend != "gloo")
    if place.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


@dataclass(frozen=True)
class OwnCode:
    """A user's code that was not uploaded anywhere."""

    archive: bytes
    path: Path
    """What it was packed from."""


def bring_code(spec: RunSpec, storage: Storage, code: OwnCode | None) -> None:
    """Make a spec's code importable in this process. Raises UsageError where it cannot run here, or
    is not given."""
    if spec.code is None:
        return
    if spec.code.train_fn is not None:
        raise UsageError(
            "code.train_fn runs under Ray Train alone; `everstep submit` gives it to the service"
        )
    if code is None:
        raise UsageError(
            "the spec names code of its own by a digest; give --code DIRECTORY, the code itself"
        )
    if code.path.is_dir():
        work_on(code.archive, code.path)
    else:
        CodeStore(storage).put(code.archive)


def run_local(
    spec: RunSpec, storage: str, run_id: str | None, say: Say = _say, code: OwnCode | None = None
) -> Ended:
    """Train in this process, alone: what raises, raises here. Loader processes are left out, so
    that breakpoints in data sets hold.

    Without ``run_id`` it is a new run each time.
    """
    bring_code(spec, open_storage(storage), code)
    loader = spec.train.loader.model_copy(update={"num_workers": 0})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"loader": loader})})
    place = Place(0, 1, 0, 1, os.uname().nodename, _launch(psutil.Process()))
    run_dir = RunDir(
        open_storage(storage), run_id or f"{run_id_of(spec)}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    _set_up(spec)
    _join(spec, place, RecoverySettings().collective_timeout_s)
    try:
        return run_rank(
            spec, run_dir, place, fresh=False, stopping=threading.Event(), say=say, debug=True
        )
    finally:
        end_process_group()


def _set_up(spec: RunSpec) -> None:
    """This process as a rank's: its environment before anything reads it, its memory and
    threads."""
    take_environment(device_env(spec) | spec.env)
    keep_memory()
    set_threads(spec)


def run_id_of(spec: RunSpec) -> str:
    """The run's directory where none was named: its name, as a file may be called."""
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-"
        for letter in spec.name
    )


def _stop_on_signals() -> threading.Event:
    """SIGTERM, SIGHUP and the first Ctrl-C ask all ranks to save at one step and leave; the second
    Ctrl-C ends the process."""
    stopping = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        stopping.set()
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ask)
    return stopping


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m train_fn.standalone", description="Train a spec under torchrun."
    )
    parser.add_argument(
        "spec", nargs="?", metavar="SPEC.yaml", help="file with the spec, on every host"
    )
    parser.add_argument(
        "--code",
        metavar="DIRECTORY",
        help="code of your own, the same on every host, in place of the spec's task",
    )
    parser.add_argument("--task", metavar="MODULE:CLASS", help="task in that code")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the spec",
    )
    parser.add_argument(
        "--storage",
        default="out/standalone",
        metavar="URI",
        help="directory or s3://…; rank 0 reads and writes it",
    )
    parser.add_argument(
        "--run-id",
        default=None,
        metavar="ID",
        help="the run's directory below it; by default the spec's name",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete what an earlier run left there, and begin anew"
    )
    parser.add_argument(
        "--collective-timeout-s",
        type=float,
        default=RecoverySettings().collective_timeout_s,
        metavar="S",
        help="longest wait of a rank for its peers in a collective",
    )
    return parser.parse_args(argv)


def _checked(action: Callable[[], int]) -> int:
    """``action``'s exit code; of a wrong request 2, with one line about it."""
    try:
        return action()
    except EverstepError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except StorageError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank as torchrun's environment says; returns its exit code."""
    arguments = _arguments(argv)

    def one_rank() -> int:
        raw = None if arguments.spec is None else read_spec(arguments.spec)
        raw, archive = with_code(raw, arguments.code, arguments.task, None)
        spec = parse_spec(apply_overrides(raw, arguments.set))
        place = place_from_env(os.environ)
        storage = open_storage(arguments.storage)
        bring_code(
            spec, storage, None if archive is None else OwnCode(archive, Path(arguments.code))
        )
        run_dir = RunDir(storage, arguments.run_id or run_id_of(spec))
        _set_up(spec)
        level = logging.INFO if place.rank == 0 else logging.WARNING
        logging.basicConfig(
            level=level, format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s"
        )
        stopping = _stop_on_signals()
        _join(spec, place, arguments.collective_timeout_s)
        try:
            return run_rank(spec, run_dir, place, fresh=arguments.fresh, stopping=stopping).code
        finally:
            end_process_group()

    return _checked(one_rank)


if __name__ == "__main__":
    sys.exit(main())
