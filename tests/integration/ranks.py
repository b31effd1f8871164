"""Plain ranks on this machine, without Ray: real processes, a real run directory, a journal
that collects into a list."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from everstep.spec.run_spec import RunSpec
from everstep.wire.drills import DrillKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_control import DrillOrder, ProfileOrder, Stop
from storage.run_dir import RunDir
from tests.support.own_loops import die_while_moving, die_while_sending
from tests.support.rank_processes import run_id_for, run_to_end
from tests.support.service_process import wait_for
from tests.support.silent_backend import SilentOptions
from train_fn.recovery.launch import Left

if TYPE_CHECKING:
    from train_fn.context import WorkerContext

Place = Literal[
    "forward", "backward", "gate", "update", "torn", "committed", "copying", "evaluation", "moving"
]
_LOST = "lost"
"""A file beside the ranks' results: one of them has died, or raised."""


@dataclass(frozen=True)
class Job:
    """One attempt of one run. ``killed`` and ``stopped`` happen in the middle of the step that
    follows so many steps done."""

    run_dir: RunDir
    spec: RunSpec
    world_size: int
    attempt: int = 1
    submission: int = 1
    killed: tuple[int, int] | None = None
    """(rank, steps done): that rank ends itself with SIGKILL while its peers wait for its
    gradients, in that step or the first later one that comes there."""
    killed_after: int | None = None
    """Steps of a checkpoint that is committed before that rank ends itself: how soon one is written
    is the disk's matter."""
    killed_telling: int | None = None
    """Steps done: rank 0 ends itself with SIGKILL when it is about to tell that their checkpoint is
    committed."""
    place: Place = "backward"
    """Where in that step."""
    with_it: tuple[int, ...] = ()
    """Ranks that it takes along."""
    by: int = signal.SIGKILL
    """The signal."""
    nodes: tuple[str, ...] = ()
    """Node of each rank; by default, each is on its own."""
    abandon: tuple[int, int] | None = None
    """(rank, steps done): that rank hears that the attempt was given up, while its peers live."""
    stopped: tuple[Stop, int] | None = None
    """(stop, steps done): rank 0 hears of a stop then."""
    one_node: bool = False
    """All ranks on one node instead of one each."""
    profiled: ProfileOrder | None = None
    """A profile that every rank has heard of from the start."""
    flipped: tuple[DrillKind, int, int] | None = None
    """(kind, rank, steps done): every rank hears then of a drill that flips a bit in that rank."""
    setup: str | None = None
    """``module:Class``, the task that the run trains; or ``module:function``, called in every rank
    before training, to change what it trains."""
    hands_over: bool = False
    """Ranks that are ``stopped`` leave their states on their nodes: another group follows."""
    silent: SilentOptions | None = None
    """Collectives fail as NCCL's do; ranks are let go once one of them has died, or raised."""
    remembered: tuple[Mapping[str, Any], ...] = ()
    """What each rank's host knows from an earlier attempt."""
    device: str = "cpu"
    """What all ranks train on; ``cuda:0`` for a GPU that they share, over NCCL."""

    def dies(self, rank: int, step: int, place: Place) -> bool:
        """Return whether a rank ends itself there."""
        if self.killed is None or self.place != place:
            return False
        return rank == self.killed[0] and step >= self.killed[1]

    @property
    def hangs_without_peers(self) -> bool:
        """Return whether collectives wait for a peer that is gone."""
        return self.silent is not None or self.device != "cpu"


@dataclass
class Outcome:
    """How one rank ended. ``error`` is what train raised; ``exit_code`` is negative for a
    signal."""

    exit_code: int | None
    stop: Left | None = None
    error: BaseException | None = None
    events: list[tuple[EventKind, dict[str, Any]]] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    remembered: dict[str, Any] = field(default_factory=dict)
    """What the host would know in a later attempt."""
    device_bytes: int = 0
    """Memory of a GPU that the process holds afterwards."""

    def of_kind(self, kind: EventKind) -> list[dict[str, Any]]:
        return [data for found, data in self.events if found is kind]

    @property
    def losses(self) -> dict[int, float]:
        """Loss of every step by steps done."""
        points = [point for data in self.of_kind(EventKind.METRICS) for point in data["points"]]
        return {point["step"]: point["values"]["loss"] for point in points}


class ListJournal:
    """A journal client that keeps what it is given, and brings about the deaths and stops that a
    job asks for."""

    def __init__(self, job: Job, rank: int, outcome: Outcome, base: str | None = None) -> None:
        """``base``: directory that keeps what a rank has told when it dies."""
        self._job, self._rank, self._outcome, self._base = job, rank, outcome, base
        self._asked = 0
        self.step = 0
        self.steps_done: Callable[[], int] = lambda: 0

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.CHECKPOINT_COMMITTED and data["step"] == self._job.killed_telling:
            os.kill(os.getpid(), signal.SIGKILL)
        # Pickled at once, as a real client would: a later change of ``data`` must not show.
        told = pickle.dumps((kind, data))
        self._outcome.events.append(pickle.loads(told))
        if self._base is not None:
            with Path(self._base, f"{self._rank}.events").open("ab") as file:
                file.write(told)

    def die(self) -> None:
        """End this rank, and those that it takes along."""
        assert self._base is not None
        for rank in (*self._job.with_it, self._rank):
            os.kill(int(Path(self._base, f"{rank}.pid").read_text()), self._job.by)

    @property
    def stop_requested(self) -> Stop | None:
        """The loop asks once a step on every rank, before its last backward."""
        step, self._asked = self.first_step() + self._asked, self._asked + 1
        if self._job.hangs_without_peers and self._base is not None:
            Path(self._base, f"{self._rank}.asked-{step}").touch()
        if self._job.dies(self._rank, step, "backward"):
            if self._job.hangs_without_peers:
                wait_for(lambda: self._have_asked(step), 60, f"the peers in the step after {step}")
            if self._job.killed_after is not None:
                wait_for(self._is_committed, 60, f"the checkpoint of step {self._job.killed_after}")
            self.die()
        if self._job.stopped is not None and self._rank == 0 and step >= self._job.stopped[1]:
            return self._job.stopped[0]
        return None

    def _have_asked(self, step: int) -> bool:
        """Return whether all ranks are in that step. One that is let go before it has the result of
        the step before it rightly falls back by a step."""
        assert self._base is not None
        ranks = range(self._job.world_size)
        return all(Path(self._base, f"{rank}.asked-{step}").exists() for rank in ranks)

    def _is_committed(self) -> bool:
        return any(
            manifest.step == self._job.killed_after
            for manifest in CheckpointStore(self._job.run_dir).list()
        )

    def first_step(self) -> int:
        return self.step

    def is_abandoned(self) -> bool:
        """The loop asks once a step, before it asks whether to stop."""
        return self._job.abandon == (self._rank, self.first_step() + self._asked)

    def flip_ordered(self) -> DrillOrder | None:
        flipped = self._job.flipped
        if flipped is None or self.steps_done() < flipped[2]:
            return None
        return DrillOrder("flip", flipped[0], flipped[1], self._job.attempt)

    def flush(self, timeout_s: float) -> bool:
        return True


def make_run_dir(tmp_path: Path, name: str = "run_test") -> RunDir:
    """A run of its own; what a failed one leaves in shared memory is removed when the tests end."""
    return RunDir(open_storage(str(tmp_path / "storage")), run_id_for(tmp_path, name))


def run_ranks(
    job: Job, tmp_path: Path, meanwhile: Callable[[list[Any]], None] = lambda ranks: None
) -> list[Outcome]:
    """Run an attempt to its end, whatever that is. Every rank is a process of its own;
    ``meanwhile`` is given these."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["train_fn.loop.attempt", "torch._dynamo", "tests.integration.ranks"]
    )
    base = tmp_path / f"{job.run_dir.run_id}-s{job.submission}-a{job.attempt}-{time.monotonic_ns()}"
    base.mkdir(parents=True)
    processes = [
        context.Process(target=_rank_main, args=(job, rank, str(base)))
        for rank in range(job.world_size)
    ]

    def watch(processes: list[Any]) -> None:
        if job.hangs_without_peers:
            threading.Thread(target=_notice_death, args=(processes, base), daemon=True).start()
        meanwhile(processes)

    run_to_end(processes, watch)
    return [
        _outcome(base / f"{rank}.pickle", process.exitcode)
        for rank, process in enumerate(processes)
    ]


def train_to_end(job: Job, tmp_path: Path) -> Outcome:
    """Run an attempt that must succeed; rank 0's outcome."""
    outcomes = run_ranks(job, tmp_path)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.exit_code == 0
    return outcomes[0]


def _notice_death(processes: list[Any], base: Path) -> None:
    """Say so once a rank has died, as the controller would."""
    while not any(process.exitcode for process in processes):
        time.sleep(0.05)
    (base / _LOST).touch()


def _abandon_when_lost(lost: Path, ended: threading.Event) -> None:
    from train_fn.step.nccl import abort_collectives

    while not lost.exists():
        if ended.wait(0.02):
            return
    abort_collectives()


def _outcome(path: Path, exit_code: int | None) -> Outcome:
    if not path.is_file():
        return dead(path.with_suffix(".events"), exit_code)
    outcome: Outcome = pickle.loads(path.read_bytes())
    outcome.exit_code = exit_code
    return outcome


def dead(path: Path, exit_code: int | None) -> Outcome:
    """Return the outcome of a rank that died, with the events that it told before."""
    outcome = Outcome(exit_code)
    with contextlib.suppress(FileNotFoundError, EOFError), path.open("rb") as file:
        while True:
            outcome.events.append(pickle.load(file))
    return outcome


def _rank_main(job: Job, rank: int, base: str) -> None:
    prepare_process(job)
    outcome = run_attempt(job, rank, base)
    draft = Path(base, f"{rank}.draft")
    draft.write_bytes(pickle.dumps(outcome))
    draft.replace(Path(base, f"{rank}.pickle"))


def prepare_process(job: Job) -> None:
    """Make this process one that ranks of the job may run in."""
    import torch

    from tests.gpu.shared_gpu import share_gpu
    from tests.support.silent_backend import claim_cpu
    from train_fn.loop import build
    from train_fn.recovery.settings import device_env, take_environment

    # As in Ray's workers: a loader process is a child of its rank, and dies with it.
    multiprocessing.set_start_method("fork", force=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job.setup is not None:
        module, _, name = job.setup.partition(":")
        given = getattr(importlib.import_module(module), name)
        if isinstance(given, type):
            build.build_task = lambda spec: given()
        else:
            given()
    if job.silent is not None:
        os.environ.update(job.silent.env())
        claim_cpu()
    if job.device != "cpu":
        share_gpu()
        take_environment(device_env(job.spec))
        torch.cuda.set_device(torch.device(job.device))


def run_attempt(job: Job, rank: int, base: str) -> Outcome:
    """Run one rank of an attempt to its end in this process, which ``prepare_process`` prepared."""
    import torch
    import torch.distributed as dist

    from train_fn.loop.attempt import train
    from train_fn.node.usage import set_threads
    from train_fn.step.nccl import begin_attempt, group_backend

    begin_attempt()
    set_threads(job.spec)
    ended = threading.Event()
    if job.hangs_without_peers:
        lost = Path(base, _LOST)
        threading.Thread(target=_abandon_when_lost, args=(lost, ended), daemon=True).start()
    Path(base, f"{rank}.pid").write_text(str(os.getpid()))
    dist.init_process_group(
        group_backend(torch.device(job.device)),
        init_method=f"file://{base}/rendezvous",
        rank=rank,
        world_size=job.world_size,
    )
    outcome = Outcome(exit_code=None)
    journal = ListJournal(job, rank, outcome, base)
    context = context_of(job, rank, journal, outcome)
    _follow_restores(journal)
    if job.killed is not None and job.killed[0] == rank and job.place != "backward":
        _die_at(job, rank, journal)
    try:
        outcome.stop = train(context)
    except Exception as exc:
        outcome.error = exc
        Path(base, _LOST).touch()
    ended.set()
    if dist.is_initialized():
        dist.destroy_process_group()
    outcome.device_bytes = torch.cuda.memory_allocated() if job.device != "cpu" else 0
    return outcome


def context_of(job: Job, rank: int, journal: ListJournal, outcome: Outcome) -> WorkerContext:
    """Return the place of a rank in an attempt."""
    import torch

    from train_fn.context import WorkerContext

    nodes = job.nodes or (
        ("node",) * job.world_size
        if job.one_node
        else tuple(f"node{each}" for each in range(job.world_size))
    )
    return WorkerContext(
        spec=job.spec,
        run_dir=job.run_dir,
        submission=job.submission,
        attempt=job.attempt,
        world_rank=rank,
        world_size=job.world_size,
        local_rank=nodes[:rank].count(nodes[rank]),
        local_world_size=nodes.count(nodes[rank]),
        node_id=nodes[rank],
        num_nodes=len({*nodes}),
        device=torch.device(job.device),
        journal=journal,
        report_checkpoint=lambda name, metrics: outcome.reported.append(name),
        profile_ordered=lambda: job.profiled,
        is_abandoned=journal.is_abandoned,
        hands_over=lambda: job.hands_over and job.stopped is not None,
        flip_ordered=journal.flip_ordered,
        remembered=job.remembered[rank] if job.remembered else {},
        remember=outcome.remembered.__setitem__,
    )


def _die_at(job: Job, rank: int, journal: ListJournal) -> None:
    """Let this rank end itself where the job says."""
    from train_fn.loop import commit, epoch_end
    from train_fn.loop.build import Parts
    from train_fn.loop.passes import Passes
    from train_fn.session.session import Session

    def at(place: Place, step: int | None = None) -> None:
        if job.dies(rank, journal.steps_done() if step is None else step, place):
            journal.die()

    report_safe_steps, keep, evaluate = Session.report_safe_steps, Session.keep, epoch_end.evaluate
    forward, update = Passes.forward, commit._update_weights

    def forward_or_die(passes: Passes, batch: Any) -> Any:
        at("forward")
        return forward(passes, batch)

    def report_or_die(session: Session) -> None:
        at("gate")
        report_safe_steps(session)

    def update_or_die(parts: Parts) -> bool:
        at("update")
        was_skipped = update(parts)
        at("torn")
        return was_skipped

    def keep_or_die(session: Session, **options: Any) -> None:
        at("committed", journal.steps_done() - 1)
        keep(session, **options)

    def evaluate_or_die(*arguments: Any) -> Any:
        at("evaluation", journal.steps_done() - 1)
        return evaluate(*arguments)

    Passes.forward = forward_or_die  # type: ignore[method-assign]
    Session.report_safe_steps = report_or_die  # type: ignore[method-assign]
    Session.keep = keep_or_die  # type: ignore[method-assign]
    epoch_end.evaluate = evaluate_or_die
    commit._update_weights = update_or_die
    if job.killed is not None and job.place == "copying":
        die_while_sending(job.killed[1], journal.die)
    if job.place == "moving":
        die_while_moving(journal.die)


def _follow_restores(journal: ListJournal) -> None:
    """Let the journal know at which step its rank began, which only the loop knows."""
    from train_fn.loop import attempt
    from train_fn.loop.training import RankProgress, Training

    prepare = getattr(attempt.prepare, "unfollowed", attempt.prepare)

    def prepare_and_tell(ctx: WorkerContext, progress: RankProgress) -> Training:
        training = prepare(ctx, progress)
        state = training.replica.state
        journal.step, journal.steps_done = state.step, lambda: state.step
        return training

    prepare_and_tell.unfollowed = prepare  # type: ignore[attr-defined]
    attempt.prepare = prepare_and_tell
