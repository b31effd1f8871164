"""How a run stands now: which failures it would survive and at what cost, what a rehearsal of one
showed, who is slow, how far it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from everstep.code import rehearse_command
from everstep.spec.plain_text import printable
from everstep.spec.run_spec import RunSpec
from everstep.wire import (
    EpochSamples,
    GpuUse,
    Loss,
    NodeTimes,
    Protection,
    RankTimes,
    RunStatus,
    SampleOrigin,
    Samples,
    Straggler,
    StragglerReport,
)
from everstep.wire.drills import REHEARSAL_TAG, RunRehearsal
from everstep.wire.events import EventKind
from service.model.operator_rules import Prices
from service.model.rows import EventRow, to_time
from service.model.run_rows import CodeInSpec, ListedRun, RunRow, RunSummary
from service.projections.goodput import WorkLedger

_LOSSES: Final[Mapping[str | None, tuple[Loss, Loss, str]]] = MappingProxyType(
    {
        "survivors": (
            "no_steps",
            "no_steps",
            "The loss of a rank or a node costs no step: ranks on other nodes keep the state.",
        ),
        "every_n": (
            "no_steps",
            "few_steps",
            "The loss of a rank costs no step. The loss of a node costs the steps since its ranks' "
            "rows were last copied to other nodes, fewer than the number in train.heirs.",
        ),
        "own_node": (
            "no_steps",
            "checkpoint",
            "The loss of a rank costs no step. The loss of a node costs the steps since the last "
            "durable checkpoint: nothing is copied to other nodes (train.heirs is false).",
        ),
        "published": (
            "few_steps",
            "checkpoint",
            "All ranks run on one node, which keeps the state of a recent step. The loss of "
            "processes costs the few steps since then, the loss of the node those since the last "
            "durable checkpoint.",
        ),
        None: (
            "checkpoint",
            "checkpoint",
            "The loss of a rank or a node costs the steps since the last durable checkpoint: no "
            "node keeps the state.",
        ),
    }
)
"""The cost of losing processes and of losing a node, by how nodes keep snapshots."""
ENDED: Final = Protection(survives=(), worst_case_steps_lost=0, message="The run has ended.")


def protection(run: RunRow | ListedRun) -> Protection:
    """Return what may fail now without ending the run.

    After the loss of a rank, a node or the driver, the run resumes from the newest snapshot on its
    nodes, else from its newest durable checkpoint, else from its first step. The worst case counts
    durable checkpoints only, because a new driver may find no snapshot.

    The head is never listed: it holds the driver and Ray's own state, and a run survives its loss
    only if an operator restarts it.
    """
    if run.status.terminal:
        return ENDED
    begun_at = int(run.resume_from.step) if run.resume_from else 0
    if run.replay_of is not None:
        begun_at = int(run.replay_of["from_step"])
    durable = run.latest_checkpoint["step"] if run.latest_checkpoint else begun_at
    since = max(0, run.step - durable)
    if run.max_system_failures == 0:
        message = "The loss of a rank or a node ends the run: recovery.max_system_failures is 0."
        return Protection(survives=("driver",), worst_case_steps_lost=since, message=message)
    process_loss: Loss | None = None
    node_loss: Loss | None = None
    message = "No rank trains now."
    if run.workers:
        process_loss, node_loss, message = _LOSSES.get(run.snapshots, _LOSSES[None])
    return Protection(
        survives=("rank", "node", "driver"),
        worst_case_steps_lost=since,
        process_loss=process_loss,
        node_loss=node_loss,
        message=message,
    )


# ---------------------------------------------------------------- stragglers

# Fold a run's history into its stragglers: ranks that slow their peers down.

GPU_EVENTS: Final = 512
"""Number of newest ``gpu_use`` events that are searched: two for each rank of a large run."""
STRAGGLER_KINDS: Final = frozenset(
    {EventKind.STRAGGLER, EventKind.ATTEMPT_STARTED, EventKind.ATTEMPT_ENDED}
)


def stragglers(events: Sequence[EventRow]) -> StragglerReport:
    """Return every rank that was found slow, oldest first, and the last reported step times.

    Args:
        events: The history, only kinds in STRAGGLER_KINDS; then the last ``rank_times`` event, if
            there is one, and the last ``gpu_use`` events, newest first.
    """
    found: list[dict[str, Any]] = []
    open_ones: dict[int, dict[str, Any]] = {}
    newest: EventRow | None = None
    for event in events:
        if event.kind == EventKind.RANK_TIMES:
            newest = event
        elif event.kind == EventKind.GPU_USE:
            continue
        elif event.kind != EventKind.STRAGGLER:
            _end(open_ones.values(), event.at)
            open_ones.clear()
        elif event.data["slow"]:
            open_ones[event.data["rank"]] = {
                **event.data,
                "at": to_time(event.at),
                "attempt": event.attempt,
                "ended_at": None,
            }
            found.append(open_ones[event.data["rank"]])
        else:
            _end([open_ones.pop(event.data["rank"], {})], event.at)
    data: Mapping[str, Any] = {} if newest is None else newest.data
    ranks = tuple(RankTimes.model_validate(rank) for rank in data.get("ranks", ()))
    return StragglerReport(
        at=None if newest is None else to_time(newest.at),
        attempt=None if newest is None else newest.attempt,
        step=data.get("step"),
        step_s=data.get("step_s"),
        ranks=ranks,
        nodes=_by_node(ranks),
        stragglers=tuple(Straggler.model_validate(each) for each in found),
        gpus=_gpus(event for event in events if event.kind == EventKind.GPU_USE),
    )


def _end(open_ones: Iterable[dict[str, Any]], at: float) -> None:
    for each in open_ones:
        if each:
            each["ended_at"] = max(to_time(at), each["at"])


def _gpus(newest_first: Iterable[EventRow]) -> tuple[GpuUse, ...]:
    """Return the last report of each rank of the newest attempt."""
    found: dict[int, GpuUse] = {}
    attempt = None
    for event in newest_first:
        attempt = event.attempt if attempt is None else attempt
        if event.attempt == attempt and event.data["rank"] not in found:
            found[event.data["rank"]] = GpuUse.model_validate(
                {**event.data, "at": to_time(event.at)}
            )
    return tuple(found[rank] for rank in sorted(found))


def _by_node(ranks: Iterable[RankTimes]) -> tuple[NodeTimes, ...]:
    """Return the means over each node's ranks, in the order of their first rank."""
    nodes: dict[str, list[RankTimes]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node_id, []).append(rank)
    return tuple(
        NodeTimes(
            node_id=node_id,
            ranks=tuple(rank.rank for rank in found),
            own_s=sum(rank.own_s for rank in found) / len(found),
            wait_s=sum(rank.wait_s for rank in found) / len(found),
            skew=sum(rank.skew for rank in found) / len(found),
        )
        for node_id, found in nodes.items()
    )


# ---------------------------------------------------------------- progress

# How far a run is and what it has cost, as the API shows it.


def progress_of(run: RunSummary, now: float) -> dict[str, Any]:
    """Return the JSON of ``wire.Progress`` at ``now`` (unix seconds)."""
    total, pace = run.total_steps, None
    if run.status is RunStatus.RUNNING and run.work_ledger is not None:
        pace = WorkLedger.load(run.work_ledger).steps_per_s(now)
    return {
        "fraction": min(1.0, run.step / total) if total else None,
        "steps_per_s": pace,
        "eta_s": max(0, total - run.step) / pace if total and pace else None,
        "elapsed_s": max(
            0.0, (now if run.finished_at is None else run.finished_at) - run.created_at
        ),
    }


def usage_of(run: RunSummary, now: float, prices: Prices) -> dict[str, Any]:
    """Return the JSON of ``wire.Usage`` at ``now`` (unix seconds)."""
    if run.work_ledger is None:
        return {"gpu_h": None, "cpu_h": None, "cost": None, "currency": None}
    gpu_h, cpu_h = WorkLedger.load(run.work_ledger).hours(now)
    cost = gpu_h * (prices.gpu_hour or 0.0) + cpu_h * (prices.cpu_hour or 0.0)
    return {
        "gpu_h": gpu_h,
        "cpu_h": cpu_h,
        "cost": cost if prices.any else None,
        "currency": prices.currency if prices.any else None,
    }


# ---------------------------------------------------------------- samples

# Fold a run's history into its sample counts, epoch by epoch, over the committed lineage.

SAMPLE_KINDS: Final = frozenset({EventKind.EPOCH_COMPLETED, EventKind.RESTORED})


def samples(events: Iterable[EventRow]) -> Samples:
    """Return the counts of each completed epoch. A restore before its end removes them: the epoch
    will end again."""
    ended: dict[int, EpochSamples] = {}
    origin: SampleOrigin | None = None
    for event in events:
        if event.kind == EventKind.EPOCH_COMPLETED:
            counts = EpochSamples.model_validate(event.data)
            ended[counts.epoch] = counts
        elif event.kind == EventKind.RESTORED:
            ended = {
                epoch: counts for epoch, counts in ended.items() if epoch < event.data["epoch"]
            }
            if event.data.get("origin"):
                origin = SampleOrigin.model_validate(event.data["origin"])
    return Samples(epochs=tuple(ended[epoch] for epoch in sorted(ended)), origin=origin)


# ---------------------------------------------------------------- rehearsals

# Whether a restart was rehearsed on a run's code, and what that showed.


def run_rehearsal(run: RunRow) -> RunRehearsal:
    """Return what is known: what a rehearsal before the submission showed."""
    before, code = _known_before(run), run.stored_spec.code
    if before is not None:
        return RunRehearsal(state="made", text=before, at=to_time(run.created_at))
    text = _NOTHING_TO_REHEARSE if code is None else _NOT_REHEARSED.format(_command(code))
    return RunRehearsal(state="none", text=text)


def _known_before(run: RunRow) -> str | None:
    """Return what a rehearsal before the submission showed; None if there was none. A tag that was
    copied with a spec may be about other code."""
    outcome, _, rest = run.tags.get(REHEARSAL_TAG, "").partition(" ")
    digest, _, words = rest.partition(" ")
    code = run.stored_spec.code
    if outcome not in _BEFORE or len(digest) < 32 or code is None:
        return None
    try:
        is_same = RunSpec.model_validate(run.spec).trained_digest.startswith(digest)
    except ValidationError:  # of another version
        is_same = False
    return _BEFORE[outcome].format(printable(words), _command(code)) if is_same else None


def _command(code: CodeInSpec) -> str:
    return rehearse_command(code.model_dump(), before=["SPEC.yaml"] if code.task else [])


_BEFORE: Final = {
    "equal": "Rehearsed, as its submitter says: equal in every bit ({0}).",
    "different": "Rehearsed, as its submitter says: a restart changes what this code trains ({0})."
    " `{1}` says what to write instead.",
}
_NOTHING_TO_REHEARSE: Final = "A built-in task has nothing that a restart could change."
_NOT_REHEARSED: Final = (
    "Not rehearsed. `{}` shows on any machine, within minutes, whether a restart changes what this "
    "code trains."
)
