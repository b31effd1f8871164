"""What a protected loop trains with in an attempt, built whole before its first step."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn import own_loop
from train_fn.checkpoints.fork import Origin
from train_fn.checks.check import Checks
from train_fn.checks.order import (
    CallOrder,
    GradientsUsed,
    SameOnAllRanks,
    require_same_order,
)
from train_fn.checks.ranks import StatelessHooks
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, StepNotWhole
from train_fn.node.device import keep_if_broken
from train_fn.own_loop import Left, LoopProtection
from train_fn.protect.arguments import Torn
from train_fn.protect.boundary import Boundary
from train_fn.protect.changes import SharedBuffers
from train_fn.protect.commits import Agreement, Commits, Updates
from train_fn.protect.loop_state import LoopState
from train_fn.recovery.evidence import RankError, describe_error
from train_fn.recovery.settings import why_torch_ends_it
from train_fn.session.session import Leaver, Session, not_copied
from train_fn.session.session import leave as leave_attempt
from train_fn.snapshots.forgotten import sweep_forgotten
from train_fn.snapshots.keeper import Remains
from train_fn.standalone.rank import (
    CLOSE_S,
    LocalPlace,
    begin_attempt,
    launch_of,
    place_alone,
    report_end,
    save_left,
    say_line,
    stop_on_signals,
)
from train_fn.standalone.start import NO_ARCHIVE, present_program
from train_fn.state.run_state import StateCopies
from train_fn.step.nccl import backend_of, fails_by_itself, group_backend
from train_fn.step.peers import Peers


@dataclass(frozen=True, slots=True, eq=False)
class LoopTraining:
    """Everything that the steps of one rank use. None of it is replaced between steps."""

    ctx: WorkerContext
    session: Session
    state: LoopState
    peers: Peers
    buffers: SharedBuffers
    checks: Checks
    boundary: Boundary
    commits: Commits
    copies: StateCopies | None
    """Only with ``torn='shadow'``."""
    order: CallOrder | None
    """Only of a sharded model."""

    def arrive(self) -> None:
        """Meet the other ranks of a sharded model before anything else is exchanged, in the first
        two steps. Raises BadTask if they call the model meanwhile."""
        if self.order is not None:
            self.order.arrive()
            if self.commits.updates.num > 1:
                self.order.source = None

    def report_safe_steps(self) -> None:
        """Meet the other ranks of a sharded model, before the optimizer steps or the loop ends.
        Raises BadTask if they do not gather and sum the same."""
        own = 0 if self.order is None else self.order.take()
        of_ranks = self.session.report_safe_steps(own)
        require_same_order(of_ranks, "the loop", f"since step {self.state.step}")


def prepare(ctx: WorkerContext, state: LoopState, torn: Torn) -> LoopTraining:
    """Restore the state that the ranks agree on, and build what a step uses. A collective."""
    sweep_forgotten(ctx)
    session = Session(ctx, state, heirs=state.parts.heirs)
    session.restore(_adopted)
    session.announce()
    parts, peers = state.parts, session.peers
    agreement, updates = Agreement(peers), Updates(may_skip=parts.has_scaler)
    copies = StateCopies(state) if torn == "shadow" else None
    training = LoopTraining(
        ctx=ctx,
        session=session,
        state=state,
        peers=peers,
        buffers=SharedBuffers(parts.wrapped, peers),
        checks=Checks(
            [
                StatelessHooks(parts.wrapped),
                GradientsUsed(state, updates),
                SameOnAllRanks(state, peers),
            ]
        ),
        boundary=Boundary(state, copies.renew if copies is not None else lambda: None),
        commits=Commits(session, state, agreement, updates),
        copies=copies,
        order=CallOrder(parts.modules(), peers, "the loop") if parts.piece is not None else None,
    )
    session.open(exchange=agreement.exchange)  # it starts threads: what may fail has come before
    return training


def _adopted(state: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return another run's state as the initial one of this run. Its data may be another, and so
    may be the weights that are trained."""
    kept = {name: value for name, value in state["own_loop"].items() if name in _OF_A_FORK}
    loaders = {
        name: {**each, "marks": None} if isinstance(each, dict) and "marks" in each else each
        for name, each in state["loaders"].items()
    }
    changed = {"best": None, "parent": origin.name, "tail": "[]", "contents": None}
    return {**state, **changed, "loaders": loaders, "own_loop": kept}


_OF_A_FORK = frozenset({"data", "epoch_began"})
"""What a fork takes over of what belongs to a loop alone."""


# ---------------------------------------------------------------- guarantees

# What holds for the states and samples of a protected loop, as its run reports it.

EXACT = (
    "State and samples are exact: every sample of an epoch is used exactly once, whatever dies and "
    "at any world size; a count of all of them proves it."
)
UP_TO_LOADER = "The state is exact; which samples a step sees after a restart is up to your loader."
LOADER_RESTORED = (
    "The state is exact, and your loader goes on at the very batch at the same number of ranks; "
    "what its data set draws by itself is up to it."
)


def report_training(session: Session, state: LoopState, total_steps: int | None) -> None:
    """Report what is trained, and what holds for it.

    Args:
        total_steps: None if only the loop knows.
    """
    if session.ctx.world_rank == 0:
        facts = training_facts(session, state, total_steps)
        session.ctx.journal.emit(EventKind.TRAINING_STARTED, facts)


def training_facts(
    session: Session, state: LoopState, total_steps: int | None
) -> dict[str, object]:
    """Return the data of the event that training begins."""
    ctx, sampler = session.ctx, state.sampler
    return {
        "total_steps": total_steps,
        "steps_per_epoch": sampler.steps_per_epoch if sampler else None,
        "num_samples": sampler.num_samples if sampler else None,
        "num_parameters": sum(value.numel() for value in state.parts.parameters()),
        "micro_batch_size": None,
        "snapshots": session.keeper.snapshots,
        "guarantee": guarantee(state),
        "device": str(ctx.device),
        "backend": group_backend(ctx.device),
    }


def guarantee(state: LoopState) -> str:
    """Return what holds for the samples of a loop with this data."""
    if state.data is not None:
        return EXACT
    return LOADER_RESTORED if state.parts.loaders else UP_TO_LOADER


# ---------------------------------------------------------------- leaving

# What a rank keeps of a protected loop that an error ended.

_TORN = (
    "the rank was between two states: an optimizer had stepped, and state.step() had not been "
    "called. Call it right after the optimizer's step, or pass torn='shadow'"
)


class _Leaving(Leaver):
    """What a protected loop does when its attempt broke (``Leaver``)."""

    def __init__(self, ctx: WorkerContext, training: LoopTraining | None) -> None:
        self._ctx, self._training, self._is_known = ctx, training, False
        self._error: RankError | None = None
        self.fault: StepNotWhole | None = None
        """How the ranks differ, as their last words show."""

    def let_go(self, cause: BaseException, error: RankError) -> None:
        keep_if_broken(self._ctx.device, cause, self._training)
        self._error = error
        if self._training is not None:
            self._is_known, self.fault = self._training.commits.settle()

    def keep(self) -> Remains:
        training = self._training
        if training is None:
            return Remains(None, "the rank had no state yet")
        assert self._error is not None
        last_committed = partial(state_to_keep, training, self._is_known)
        return training.session.keeper.leave(self._error, last_committed)


def leave(
    ctx: WorkerContext, training: LoopTraining | None, cause: BaseException
) -> tuple[Left, StepNotWhole | None]:
    """Leave a loop that an error ended (``session.leave``). Return how it was left, and the fault
    that the ranks' last words show.

    Args:
        training: None if the error came before it was built.
    """
    leaving = _Leaving(ctx, training)
    session = None if training is None else training.session
    error, problem = leave_attempt(ctx, session, cause, leaving)
    if leaving.fault is not None:
        said = describe_error(leaving.fault, ctx.world_rank)
        error = dataclasses.replace(said, step=error.step, snapshot_step=error.snapshot_step)
    return Left(dataclasses.replace(error, phase="protect"), problem), leaving.fault


def state_to_keep(training: LoopTraining, is_known: bool) -> dict[str, Any] | str:
    """Return the state of the newest commit that may be left, or why there is none.

    Args:
        is_known: whether all ranks are known to have made the newest commit.
    """
    commits, copies, state = training.commits, training.copies, training.state
    updates = commits.updates
    if commits.fault is not None:
        if copies is not None and copies.older is not None:
            return copies.older  # the ranks agreed on that one
        return f"the ranks did not make the same step: {commits.fault}"
    if not is_known and not updates.is_regular:
        return (
            f"step {state.step} made {updates.of_commit} optimizer steps instead of "
            f"{updates.usual}, and a peer that died did not say whether it did, too"
        )
    if state.complete and (problem := training.boundary.problem()) is not None:
        return problem if copies is None or copies.older is None else copies.older
    if copies is not None:
        return copies.newest or _TORN
    if not state.complete:
        return _TORN
    found = state.last_committed()
    return not_copied(found) if isinstance(found, list) else found


# ---------------------------------------------------------------- place

# Where a protected loop runs: in a run of the service, or on its own under torchrun or as one
# process.

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnItsOwn:
    """Settings of a loop that no service runs. In a service, the run's spec takes their place."""

    storage: str
    run_id: str | None
    """None for a name after the program (``Program.run_name``)."""
    checkpoint: Mapping[str, Any]
    """The section ``checkpoint`` of a spec. By default, ``every_steps`` is ``auto``: how large the
    model is and how long its steps are is not known."""
    fresh: bool | None
    """Delete what an earlier run of this id left, or, if False, go on with it in any case."""


class Home(Protocol):
    """The run that a loop belongs to."""

    @property
    def ctx(self) -> WorkerContext: ...

    @property
    def why_alike(self) -> str | None:
        """Return why only the loop that began this run may go on; None if any may."""

    def finished(self, stop: Stop | None) -> None:
        """The loop has ended, and its state is saved."""

    def failed(self, left: Left) -> None:
        """An error ended the loop."""


def find_home(protection: LoopProtection, settings: OnItsOwn, device: torch.device) -> Home:
    """Return the run of this process. A collective outside of a service. Raises BadTask."""
    present = own_loop.present
    if present is None:
        return _own_home(settings, device)
    if present.protection is not None:
        raise BadTask(
            "es.protect was entered twice: a run has one state. Pass what trains together as lists "
            "to one call, and submit a run for each of several trainings, as those of folds"
        )
    if present.has_begun:
        # The run has heard that it continues from what the function reported, or begins anew.
        raise BadTask(
            "`with state:` comes after the function's beginning was reported: enter it before the "
            "first ray.train.report, and import everstep.train in a file of the archive"
        )
    present.protection = protection
    return _ServiceHome(present)


@dataclass(frozen=True)
class _ServiceHome:
    """A run of the service, whose Ray layer called the loop."""

    present: own_loop.OwnLoop
    why_alike: None = None

    @property
    def ctx(self) -> WorkerContext:
        return self.present.ctx

    def finished(self, stop: Stop | None) -> None:
        self.present.stop = stop

    def failed(self, left: Left) -> None:
        pass


class _OwnHome:
    """A run without a service. Rank 0 writes its journal; signals ask it to stop."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        place: LocalPlace,
        device: torch.device,
        begun: _Begun,
        *,
        fresh: bool | None,
    ) -> None:
        self._begun = begun
        self._handlers: dict[int, Any] = {}
        stopping = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            stopping = stop_on_signals()
        self._where = f"{run_dir.local_path or run_dir.uri}/checkpoints"
        self.ctx, self._journal, self._watch, was_done = begin_attempt(
            spec, run_dir, place, device, fresh, stopping, say_line
        )
        left = f"run {spec.name} was left in this process" if begun.is_left else None
        done = f"run {spec.name} was finished before" if was_done and fresh is None else left
        self.why_alike = done
        begun.is_open = True

    def finished(self, stop: Stop | None) -> None:
        self._begun.num_finished += stop is None
        self._begun.is_left = stop is not None
        self._watch.end()
        report_end(self._journal, stop)
        self._close()
        if self.ctx.world_rank == 0:
            how = "paused" if stop else "done"
            say_line(f"{how} at step {self._journal.step}; checkpoints are in {self._where}")

    def failed(self, left: Left) -> None:
        error = left.error
        self._begun.is_left = True
        logger.error(
            "rank %d stopped at step %s: %s; %s",
            error.rank,
            error.step,
            error.summary,
            left.problem or "its state is kept on this node",
        )
        if self.ctx.world_rank == 0:
            save_left(self.ctx, say_line)
        self._close()

    def _close(self) -> None:
        self._begun.is_open = False
        self._watch.close()
        self._journal.close(CLOSE_S)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


@dataclass
class _Begun:
    """The trainings of one name that this process has begun, one after the other. Each is a run of
    its own, so that a restart finds it again: that of the second has a name with ``.2``."""

    num_finished: int = 0
    is_open: bool = False
    is_left: bool = False
    """Whether an error or a stop ended the newest one: a loop that tries again goes on with it."""


_begun: dict[tuple[str, str], _Begun] = {}


def _own_home(settings: OnItsOwn, device: torch.device) -> _OwnHome:
    program = present_program()
    if settings.run_id is None and program is None:
        raise BadTask(
            "es.protect(run_id=…) is missing: a notebook has no file to name its run after. Pass a "
            "name, another one for each training"
        )
    place = _place(os.environ)
    given = program.run_name(settings.storage) if program is not None else None
    name = Peers(place.rank, place.world_size, device).share(settings.run_id or given, 0)
    assert name is not None
    if any(each.is_open for each in _begun.values()):
        raise BadTask(
            "es.protect: `with state:` was entered within another one, which a restart would not "
            "find again. Pass what trains together as lists to one call, and end one training "
            "before the next begins"
        )
    begun = _begun.setdefault((settings.storage, name), _Begun())
    number = 1 + begun.num_finished
    run_id = name if number == 1 else f"{name}.{number}"
    run_dir = RunDir(open_storage(settings.storage), run_id)
    facts = program.facts(run_dir) if program is not None else {}
    spec = _spec(run_id, settings.checkpoint, facts)
    warn_of_lost_state(place.world_size)
    if number > 1 and place.rank == 0:
        say_line(f"training {number} of this process is run {run_id}")
    return _OwnHome(run_dir, spec, place, device, begun, fresh=settings.fresh)


def warn_of_lost_state(world_size: int) -> None:
    """Warn if torch may end this process, and its state, when a peer dies."""
    if world_size > 1 and not fails_by_itself() and (problem := why_torch_ends_it(os.environ)):
        logger.warning("%s", problem)


def _spec(run_id: str, checkpoint: Mapping[str, Any], program: Mapping[str, Any]) -> RunSpec:
    raw = {
        "name": run_id,
        "code": {"archive": NO_ARCHIVE, "train_fn": "script:main", "config": program},
        "checkpoint": {"every_steps": "auto", **checkpoint},
    }
    try:
        return parse_spec(raw)
    except InvalidSpec as exc:
        raise BadTask(f"es.protect(run_id=…, checkpoint=…): {exc}") from exc


def _place(env: Mapping[str, str]) -> LocalPlace:
    """Return this process's place among its peers. A collective if there are some. Raises
    BadTask."""
    if not dist.is_initialized():
        if int(env.get("WORLD_SIZE", "1")) > 1:
            raise BadTask(
                f"es.protect: WORLD_SIZE is {env['WORLD_SIZE']}, but there is no process group; "
                "call torch.distributed.init_process_group() before `with state:`"
            )
        return place_alone()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node = os.uname().nodename
    device = torch.device("cuda" if backend_of(dist.group.WORLD) == "nccl" else "cpu")
    nodes = Peers(rank, world_size, device).gather(node)
    agent = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid())
    local_rank = nodes[:rank].count(node)
    return LocalPlace(rank, world_size, local_rank, nodes.count(node), node, launch_of(agent))
