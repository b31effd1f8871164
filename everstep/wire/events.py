"""The kinds of events in a run's history, and the ``data`` of each.

``train_fn`` reports to ``service`` through the journal (docs/event-log.md). The service adds
``run_created``, ``status``, ``stop_requested``, ``workers_limited``, ``drill_requested``,
``profile_requested``, ``stacks_requested`` and ``checkpoint_corrupt``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from everstep.wire.base import Answer, Open, Time

UNFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""Raised by code that reads an event's data where that is not as ``EventKind`` says. User code can
write anything into the journal of its run."""


class EventKind(StrEnum):
    RUN_CREATED = "run_created"
    """By the service. data: name, project."""
    STATUS = "status"
    """By the service, on every transition. data: from, to, reason {code, message} | null."""
    STOP_REQUESTED = "stop_requested"
    """By the service. data: stop ("cancel" | "pause")."""
    WORKERS_LIMITED = "workers_limited"
    """By the service. The run makes room for another one, or no longer has to. data: limit (most
    ranks; null: as many as its spec asks for), by (id of the run that needs the room) | null."""
    DRILL_REQUESTED = "drill_requested"
    """By the service. data: id, kind, rank."""
    PROFILE_REQUESTED = "profile_requested"
    """By the service. data: id, rank, steps."""
    STACKS_REQUESTED = "stacks_requested"
    """By the service. data: id."""
    SUBMISSION_STARTED = "submission_started"
    """First event of a journal. data: ray_job_id, driver_pid, driver_node_id, versions {everstep,
    ray, torch, python}."""
    WAITING = "waiting"
    """The worker group waits for resources. data: code, message, missing {resource: amount}."""
    ATTEMPT_STARTED = "attempt_started"
    """A worker group started. data: world_size, workers [{rank, node_id, node_ip, pid}],
    built_apart {node_id: why its ranks build for themselves; the others begin with what their node
    has built once}."""
    RESTORED = "restored"
    """Ranks agreed on the state to continue from. data: step, epoch, source ("fresh" | "checkpoint"
    | "snapshot" | "process": a rank had kept it in its memory | "fork" | "own_files" of a script
    that starts again), checkpoint | null (RUN_ID/NAME for a fork), rejected [{name, problem}],
    best {metric, value, step} | null (the best evaluation of the restored state), origin {run_id,
    checkpoint, step, epoch, samples, digest} of a fork."""
    TRAINING_STARTED = "training_started"
    """Once an attempt, before its first step. data: total_steps, steps_per_epoch, num_samples,
    num_parameters, micro_batch_size, device, backend, snapshots ("published" by rank 0 of a group
    on one node, left by "survivors", or "none"; "every_n" or "own_node" if copies of a sharded
    model travel after some steps or never), guarantee (how samples are used over restarts, in
    words) | null if unchanged, warnings [sentences about the task]. For a user's own loop only
    device, backend, snapshots and guarantee are set."""
    SNAPSHOTS = "snapshots"
    """Nodes started or stopped keeping snapshots. data: step, snapshots ("published" | "survivors"
    | "every_n" | "own_node" | "none"), problem | null."""
    NUMERICS_CHANGED = "numerics_changed"
    """Ranks compute other bits of the run's first micro-batch than before, or than rank 0. With
    ``train.exactness: elastic`` the attempt is refused. data: step, reference ("the state" | "rank
    0"), ranks [{rank, node_id, differs ["the loss", "the gradients"], kernels [what is known to be
    different]}]."""
    METRICS = "metrics"
    """A batch of steps. data: points [{step, at (unix seconds), values {name: float | null}, proof
    {chain, gradient, weights (hexadecimal digests; no gradient if a task makes its own steps)};
    none for a user's own loop}]; ``step`` counts steps done."""
    EVALUATED = "evaluated"
    """data: step, epoch, metrics {name: float}, rests (the task's ``on_epoch_end`` comes before the
    next step)."""
    EPOCH_COMPLETED = "epoch_completed"
    """data: epoch, samples, used_once, duplicates, missing, digest, seconds, rests (an evaluation
    or the task's ``on_epoch_end`` comes before the next step), skipped_steps (with fp16: of the run
    so far)."""
    EPOCH_HOOK_DONE = "epoch_hook_done"
    """The task's ``on_epoch_end`` has returned on all ranks. data: epoch, seconds."""
    RANK_TIMES = "rank_times"
    """Every rank's typical recent step. data: step, step_s, ranks [{rank, node_id, micro_batches,
    own_s, wait_s, skew}]."""
    STRAGGLER = "straggler"
    """A rank has slowed its peers down for a while, or no longer does. data: rank, node_id, step,
    slow, own_s, peers_s, skew."""
    STRAGGLER_MOVED = "straggler_moved"
    """The ranks of a slow rank's node leave it, and later whether that helped. data: rank, node_id
    (the one that is left), skew, stays (whether the slowness stayed with the node; null at the
    move)."""
    GPU_USE = "gpu_use"
    """A rank's recent GPU use. data: rank, node_id, name, busy (0 to 1: share of the time in which
    kernels ran) | null, used_bytes, total_bytes (of the whole GPU), allocated_bytes (peak of the
    rank's own tensors), power_w (mean) | null, celsius (most) | null, seconds (over which ``busy``
    is a mean)."""
    RANK_USE = "rank_use"
    """What a rank took of its host recently. data: rank, node_id, cpu_cores (mean processor time of
    its process), rss_bytes, net_in_bytes_per_s, net_out_bytes_per_s (of the host), seconds (over
    which they are means)."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    """data: step, epoch, name, size_bytes, digest, metrics, stall_s, write_s."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """A save failed; training continues. data: step, error, failed_in_a_row, max_failed_saves (of
    the spec), retry_s (until the next try)."""
    CHECKPOINT_CADENCE = "checkpoint_cadence"
    """In runs of earlier versions: ``checkpoint.every_steps: auto`` chose another interval. data:
    interval_s, reason (in words)."""
    CHECKPOINT_DELETED = "checkpoint_deleted"
    """By retention. data: step, name."""
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    """By the service, after reading a checkpoint back. data: step, name, problem, found_by ("scrub"
    | "verify")."""
    JOURNAL_DAMAGED = "journal_damaged"
    """Lines of a journal are damaged: events are lost. Reported by the process that reads past
    them, and by the next driver. data: file, lines, problem."""
    STORAGE_ADOPTED = "storage_adopted"
    """By the service: an operator adopted another storage. data: storage_id,
    submission_before, submission (the newest in the storage, if that is later), lost (whether the
    storage lacks something that was known about the run)."""
    FAILURE = "failure"
    """An attempt failed. data: ``wire.Failure.event_data()``."""
    EVIDENCE = "evidence"
    """Evidence found after a failure was reported. data: rank, node_id, pid, oom_line |
    null, oom_kills | null."""
    RECOVERED = "recovered"
    """First step after a failure, or the start of a script that never reported one. data: detect_s,
    recovery_s, steps_lost (null if unknown, as for a script), world_size_before,
    world_size_after, phases {name: seconds}, rung ("in_process" | "snapshot" | "checkpoint") |
    null."""
    FELL_BACK = "fell_back"
    """Of earlier versions: an attempt did not come to a step in the processes of earlier ranks, and
    one in fresh processes follows. data: rung ("in_process"), reason (in words)."""
    DRILL_STARTED = "drill_started"
    """A fault is injected; the event is durable before that. data: id, kind, rank, node_id | null,
    pid | null, checkpoint | null."""
    DRILL_FAILED = "drill_failed"
    """A drill's fault could not be injected. data: id, kind, rank, problem."""
    PROFILE_ORDERED = "profile_ordered"
    """The driver received a request for a profile; the journal's replies pass it to the ranks.
    data: id, rank, steps."""
    PROFILE_STARTED = "profile_started"
    """The rank started recording. data: id, rank, step (the first one in the trace)."""
    PROFILE_DONE = "profile_done"
    """The trace is saved. data: id, rank, steps, step_s, size_bytes, all_reduces [{bucket | null,
    size_bytes, count, mean_s, max_s}]."""
    PROFILE_FAILED = "profile_failed"
    """data: id, rank, problem."""
    STACKS_ORDERED = "stacks_ordered"
    """The driver received a request for the ranks' stacks; the journal's replies pass it to the
    controller. data: id."""
    STACKS = "stacks"
    """What the ranks do now: because somebody asked, or because nothing has moved for a while.
    data: id (of the request) | null, quiet_s (without progress), step | null, summary (in words),
    ranks [{rank, node_id, does (in words), stack | null (the rank does not answer)}]."""
    REHEARSAL = "rehearsal"
    """By drivers of earlier versions, which rehearsed a restart on the run's code. data: state
    ("running" | "made" | "not_made"), text (in words)."""
    REPLAY_COMPARED = "replay_compared"
    """By the driver of a replay, once its ranks have ended. data: ``wire.replays.Replay``."""
    ATTEMPT_ENDED = "attempt_ended"
    """data: cause ("finished" | "stopped" | "resized" | "fell_back" | verdict), last_step."""
    FINISHED = "finished"
    """Last event of a journal. data: outcome ("succeeded" | "failed" | "stopped"), reason {code,
    message} | null, step."""


class Rung(StrEnum):
    """Where a recovery found the state, best first."""

    IN_PROCESS = "in_process"
    """Of earlier versions: survivors kept their processes."""
    SNAPSHOT = "snapshot"
    """The ranks read what survivors left in a node's memory."""
    CHECKPOINT = "checkpoint"
    """The ranks read a checkpoint."""


NODE_UNFIT = "NodeUnfit"
"""Exception type in the failure of a node that did not pass the preflight checks."""

WRONG_BITS = "may hold wrong bits"
"""In the problem of a state that is rejected because ranks went apart; their failure says the
rest."""

GPU_FAULTY = "its GPU is faulty: "
"""In the message of a failure of kind ``device``, if the node shows a fault of the hardware. The
faults follow."""

OWN_FILES = "own_files"
"""Source of a ``restored`` event of a script that goes on from files that it wrote itself."""
REPORTS = "reports"
"""In a ``restored`` and a ``recovered`` event: a step is a report of the user's function or
script."""
BEGINNINGS = frozenset({"fresh", "fork"})
"""Sources of a ``restored`` event that do not depend on older submissions of the run."""


# ---------------------------------------------------------------- history

# The history of a run: events, attempts, log lines, checkpoints and code.


class Event(Answer):
    """One event of a run. docs/event-log.md lists the kinds and their data."""

    seq: int
    """Position in the run's history, from 1, without gaps."""
    at: Time
    """When it happened, by the clock of the machine where it happened."""
    kind: str
    submission: int
    attempt: int
    """Attempt that it belongs to; 0 for none."""
    data: dict[str, Any]


class WorkerInfo(Answer):
    rank: int
    node_id: str
    node_ip: str
    pid: int


class Attempt(Answer):
    """The lifetime of one worker group."""

    attempt: int
    submission: int
    world_size: int
    workers: tuple[WorkerInfo, ...]
    built_apart: dict[str, str] = Field(default_factory=dict)
    """Why ranks build for themselves, in words, by node. The others begin with what their node has
    built once, before there were ranks."""
    started_at: Time
    ended_at: Time | None
    first_step: int | None
    """Steps done when it began."""
    last_step: int | None
    """Steps done when it ended, as far as reported."""
    restored_from: str | None
    """Name of the checkpoint that it began from, `RUN_ID/NAME` for another run's; null for a fresh
    start."""
    cause: str | None
    """Why it ended: ``finished``, ``stopped``, ``resized``, ``fell_back`` (fresh processes follow,
    see ``recovery.in_process``), or a verdict."""


class LogLine(Answer):
    seq: int
    """Position in the answer; pass it as ``after`` to read on."""
    at: Time
    submission: int
    attempt: int
    rank: int | None
    """Null for the driver."""
    level: str
    message: str


class Checkpoint(Answer):
    step: int
    """Optimizer steps done in it; names it in paths, as `latest` and `best` do."""
    name: str
    """Directory below ``checkpoints/``."""
    epoch: int
    submission: int
    state: Open[Literal["committed", "corrupt", "deleted"]]
    size_bytes: int
    digest: str
    """SHA-256 over the manifest, which lists every file's digest."""
    metrics: dict[str, float]
    committed_at: Time
    verified_at: Time | None
    """When its files were last read back and verified."""
    problem: str | None = None
    """What was wrong with it then; null if every file had its size and digest."""


class CodeArchive(Answer):
    """Answer of ``POST /v1/code``."""

    digest: str
    """``sha256:`` and 64 hex digits over the archive's bytes; ``code.archive`` of a spec."""
    size_bytes: int
    modules: tuple[str, ...]
    """Dotted names of the modules in it."""


class EventFileInfo(Answer):
    """A file of TensorBoard."""

    name: str


# ---------------------------------------------------------------- metric names

# Names of metrics. An evaluation's ``accuracy`` is the series ``val_accuracy``, next to the
# training's own ``accuracy``.

PREFIX = "val_"
MAX_NAMES = 200
"""Most metric names of a run. Each is a series, and part of every answer about the run."""
MAX_STEP_NAMES = 150
"""Most names that steps may use, so that evaluations find room."""
_SMALLER_IS_BETTER = re.compile(
    r"(loss|perplexity|error|error_rate|mse|mae|nll|bits_per_\w+)$|(^|[^a-z])(err|ppl|wer|cer|eer|ter|mape|smape|fid|ece|brier)$"
)


SYSTEM_FIGURES = (
    "cpu_cores",
    "rss_bytes",
    "net_in_bytes_per_s",
    "net_out_bytes_per_s",
    "gpu_busy_percent",
    "gpu_used_bytes",
    "gpu_power_w",
    "gpu_celsius",
)
"""What ranks report about their hosts and GPUs. Each rank has a series of each."""
MOST_SYSTEM_RANKS = 64
"""Ranks from this one on have no such series."""
_SYSTEM = re.compile(rf"system\.({'|'.join(SYSTEM_FIGURES)})\.rank(\d{{1,6}})")


def system_name(figure: str, rank: int) -> str:
    """Return the name of a rank's series of a figure, such as ``system.cpu_cores.rank0``."""
    return f"system.{figure}.rank{rank}"


def system_figure(name: str) -> tuple[str, int] | None:
    """Return the figure and the rank of such a series; None for another name."""
    found = _SYSTEM.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def mode_of(metric: str | None) -> Literal["min", "max"]:
    """Return whether smaller or larger values of a metric are better, by its name: ``min`` for
    names that end in loss, error and the like.

    >>> mode_of("val_loss"), mode_of("wer"), mode_of("accuracy"), mode_of("power")
    ('min', 'min', 'max', 'max')
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric or "").lower()
    # scikit-learn's prefix for errors with the sign changed
    negated = name.removeprefix(PREFIX).startswith(("neg_", "negative_"))
    return "min" if _SMALLER_IS_BETTER.search(name) and not negated else "max"


def validation_name(name: str) -> str:
    """Return the name of the series for an evaluation's metric."""
    return name if name.startswith(PREFIX) else PREFIX + name


class NameLimit:
    """Admits metric names in order of arrival, up to a limit."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known = set(known)

    def refused(
        self, names: Iterable[str], most: int = MAX_NAMES, always: Collection[str] = ()
    ) -> list[str]:
        """Return the names that are not admitted; remember the others.

        Args:
            names: In order of admission.
            most: Limit on all names, including these.
            always: Names that are admitted beyond the limit.
        """
        refused = []
        for name in names:
            if name in self.known or name in always or len(self.known) < most:
                self.known.add(name)
            else:
                refused.append(name)
        return refused


def lookup(values: Mapping[str, float | None], metric: str) -> float | None:
    """Return the value of a validation metric, with or without ``val_`` on either side; None if
    missing."""
    short = metric.removeprefix(PREFIX)
    value = values.get(short)
    return value if value is not None else values.get(PREFIX + short)
