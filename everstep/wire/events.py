"""The kinds of events in a run's history, and the ``data`` of each.

``train_fn`` reports to ``service`` through the journal (docs/event-log.md). The service adds
``run_created``, ``status``, ``stop_requested``, ``workers_limited``, ``drill_requested``,
``profile_requested``, ``stacks_requested`` and ``checkpoint_corrupt``.
"""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    RUN_CREATED = "run_created"
    """By the service. data: name, project, sweep_id (of a run of a sweep)."""
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
    """A worker group started. data: world_size, workers [{rank, node_id, node_ip, pid}]."""
    RESTORED = "restored"
    """Ranks agreed on the state to continue from. data: step, epoch, source ("fresh" | "checkpoint"
    | "snapshot" | "process": a rank had kept it in its memory | "fork" | "own_files" of a script
    that starts again), checkpoint | null (RUN_ID/NAME for a fork), rejected [{name, problem}],
    best {metric, value, step} | null (the best evaluation of the restored state), origin {run_id,
    checkpoint, step, epoch, samples, digest} of a fork."""
    TRAINING_STARTED = "training_started"
    """Once an attempt, before its first step. data: total_steps, steps_per_epoch, num_samples,
    num_parameters, micro_batch_size, device, backend, snapshots ("published" by rank 0 of a group
    on one node, left by "survivors", or "none"), guarantee (how samples are used over restarts, in
    words) | null if unchanged, warnings [sentences about the task]. For a user's own loop only
    device, backend, snapshots and guarantee are set."""
    SNAPSHOTS = "snapshots"
    """Nodes started or stopped keeping snapshots. data: step, snapshots ("published" | "survivors"
    | "none"), problem | null."""
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
    """``checkpoint.every_steps: auto`` chose another interval. data: step, interval_s, cost_s
    (stall_s + slowdown_s), stall_s, slowdown_s, write_s, mtbf_s, mtbf_source ("given" |
    "observed"), num_failures, bound ("write" | "min_interval_s" | "max_interval_s") | null, reason
    (in words)."""
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
    """An attempt did not come to a step in the processes of earlier ranks, and one in fresh
    processes follows. data: rung ("in_process"), reason (in words)."""
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
    REPLAY_COMPARED = "replay_compared"
    """By the driver of a replay, once its ranks have ended. data: ``wire.replays.Replay``."""
    ATTEMPT_ENDED = "attempt_ended"
    """data: cause ("finished" | "stopped" | "resized" | "fell_back" | verdict), last_step."""
    FINISHED = "finished"
    """Last event of a journal. data: outcome ("succeeded" | "failed" | "stopped"), reason {code,
    message} | null, step."""


class Rung(StrEnum):
    """Where a recovery found processes and state, best first."""

    IN_PROCESS = "in_process"
    """Survivors kept their processes."""
    SNAPSHOT = "snapshot"
    """Fresh processes read the state that survivors left in a node's memory."""
    CHECKPOINT = "checkpoint"
    """Fresh processes read a checkpoint."""


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
