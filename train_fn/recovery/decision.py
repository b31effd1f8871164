"""Decide what follows a verdict: restart now, restart later, pause, or fail the run.

Pure functions: ``verdict.judge`` makes the verdict, ``history`` reads the earlier failures from the
run's journals, and the controller carries the decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from everstep.spec.sections import CheckpointSpec, RecoverySpec
from everstep.wire import ErrorKind, ReasonCode, Verdict
from everstep.wire.events import GPU_FAULTY
from train_fn.errors import FOUND_WITHIN, Miscomputed, NumericsChanged
from train_fn.recovery.links import (
    ENDED_AFTER,
    WHAT_TO_CHECK,
    Pairs,
    node_to_move,
    times_in_a_row,
    words,
)
from train_fn.recovery.verdict import ALL_DIED, Judgement

_FIRST_BACKOFF_S = 0.5
"""Pause before the restart after the third failure in a row; it doubles with each further one."""
_MOST_DOUBLINGS = 16
OUTSIDE_LIMIT = 1000
"""So many failures in a row without a new step end a run whose cause lies outside of it: it has
waited for eight hours."""
_OF_A_NODE = frozenset({Verdict.HARDWARE, Verdict.SILENT_CORRUPTION})
"""Verdicts after which the run moves away from the node, if it can."""


@dataclass(frozen=True)
class Decision:
    """``restart`` after ``backoff_s``, or end the submission for ``reason``: the run fails, or is
    paused if ``pause`` is set."""

    restart: bool
    budget: str | None
    action: str
    backoff_s: float = 0.0
    reason: ReasonCode | None = None
    message: str | None = None
    pause: bool = False
    leave_out: str | None = None
    """Node that gives way to another one for a while."""
    micro_batch_size: int | None = None
    """Samples per forward pass from here on; None changes nothing."""


def decide(
    judgement: Judgement,
    past: Sequence[PastFailure],
    spec: RecoverySpec,
    *,
    backoff_max_s: float,
    checkpoint: CheckpointSpec | None = None,
    dispensable: Callable[[], Collection[str]] = tuple,
    micro_batch_size: int | None = None,
) -> Decision:
    """Decide whether the run goes on after ``judgement``.

    Args:
        judgement: The newest failure.
        past: Earlier failures of the run, oldest first.
        spec: The run's budgets.
        backoff_max_s: Longest pause before a restart, in seconds.
        checkpoint: Says whether storage failures pause the run, and after how many. None: never.
        dispensable: Returns the nodes without which the run would still have enough room. Called
            only for an error of a device, and if two nodes do not hear each other.
        micro_batch_size: Samples per forward pass of the attempt, if want of memory may halve them.
    """
    verdict = judgement.verdict
    if verdict is Verdict.USER_ERROR:
        return _after_user_error(judgement, past, spec, dispensable)
    smaller = with_smaller_batches(judgement, micro_batch_size)
    if smaller is not None:
        return smaller
    in_a_row = failures_in_a_row(judgement, past)
    if verdict is Verdict.PREEMPTION and in_a_row < OUTSIDE_LIMIT:
        return Decision(True, budget_of(verdict), "restart on the remaining nodes")
    end = (
        storage_is_not_shared(judgement)
        or memory_is_too_small(judgement, past)
        or device_error_follows(judgement, past)
        or ranks_part_again(judgement, past)
        or code_exits_again(judgement, past)
        or all_ranks_die_again(judgement, past)
    )
    if end is not None:
        return _stop(judgement, end)
    moved = _node_to_move(judgement, past, dispensable)
    if moved is None and (end := nodes_cannot_meet(judgement, past)) is not None:
        return _stop(judgement, end)
    backoff_s = backoff(in_a_row, backoff_max_s)
    if verdict is Verdict.STORAGE:
        return _after_storage_failure(judgement, in_a_row, backoff_s, checkpoint)
    if end := budget_is_spent(judgement, in_a_row, spec):
        return _stop(judgement, end)
    action = _restart(verdict, backoff_s, moved)
    if (times := deaths_of_all(judgement, past)) > 1:
        action = f"{action}; all ranks died {times} times in a row, so their code may be the cause"
    return Decision(True, budget_of(verdict), action, backoff_s, leave_out=moved)


def backoff(in_a_row: int, longest_s: float) -> float:
    """Return the pause before a restart in seconds: none after the first two failures in a row,
    then one that doubles with each."""
    if in_a_row <= 2:
        return 0.0
    return min(longest_s, _FIRST_BACKOFF_S * 2.0 ** min(in_a_row - 3, _MOST_DOUBLINGS))


def _stop(judgement: Judgement, end: RunEnd) -> Decision:
    budget = budget_of(judgement.verdict)
    return Decision(False, budget, "stop", reason=end.reason, message=end.message)


def _after_user_error(
    judgement: Judgement,
    past: Sequence[PastFailure],
    spec: RecoverySpec,
    dispensable: Callable[[], Collection[str]],
) -> Decision:
    """Restart within the budget of user errors, unless the same error came before. Leave out a node
    on which one rank alone cannot build the task."""
    num_earlier = sum(failure.verdict is Verdict.USER_ERROR for failure in past)
    end = same_user_error(judgement, past) or too_many_user_errors(num_earlier, judgement, spec)
    if end is not None:
        return _stop(judgement, end)
    action = f"restart, user error {num_earlier + 1} of at most {spec.max_user_errors}"
    ranks, node = judgement.detail.get("ranks", ()), judgement.node_id
    num_raised = sum(each["state"] == "raised" for each in ranks)
    num_raised += judgement.detail.get("more_ranks", {}).get("raised", 0)
    is_alone = judgement.detail.get("phase") == "start" and num_raised == 1 < len(ranks)
    left_out = node if is_alone and node in dispensable() else None
    return Decision(True, budget_of(judgement.verdict), action, leave_out=left_out)


def with_smaller_batches(judgement: Judgement, micro_batch_size: int | None) -> Decision | None:
    """Restart with micro-batches of half the size if a rank ran out of memory while it trained. End
    the run if a single sample is too much. Return None for other failures.

    A rank that was killed says not what it did, and at a single sample others may fill its node.
    """
    was_killed = judgement.kind is None
    if (
        micro_batch_size is None
        or judgement.verdict is not Verdict.OUT_OF_MEMORY
        or not (was_killed or judgement.detail.get("phase") in _TRAINING_PHASES)
        or (was_killed and micro_batch_size == 1)
    ):
        return None
    if micro_batch_size == 1:
        message = (
            f"out of memory {judgement.place} with micro-batches of a single sample, and "
            "train.on_out_of_memory: smaller cannot halve them. Set train.precision to bf16 or "
            "train.sharding to full, or take a smaller model, shorter samples or nodes with more "
            f"memory: {judgement.exception}"
        )
        return _stop(judgement, RunEnd(ReasonCode.USER_ERROR, message))
    half = micro_batch_size // 2
    action = f"restart at once with micro-batches of {half} in place of {micro_batch_size}"
    return Decision(True, None, action, micro_batch_size=half)


def _after_storage_failure(
    judgement: Judgement, in_a_row: int, backoff_s: float, checkpoint: CheckpointSpec | None
) -> Decision:
    """Wait for the storage, or pause: early if the spec prefers that. The run never fails for it:
    nothing of its own is wrong."""
    budget, limit, why = budget_of(judgement.verdict), OUTSIDE_LIMIT, ""
    if checkpoint is not None and checkpoint.on_failed_saves == "pause":
        limit, why = checkpoint.max_failed_saves, " (checkpoint.on_failed_saves is pause)"
    if in_a_row >= limit:
        message = (
            f"paused after {in_a_row} storage failures in a row {judgement.place}{why}; "
            f"repair the storage, then resume the run. The last failure: {judgement.exception}"
        )
        reason = ReasonCode.STORAGE_UNAVAILABLE
        return Decision(False, budget, "pause", reason=reason, message=message, pause=True)
    action = f"wait for the storage, restart {_when(backoff_s)} (failure {in_a_row} in a row)"
    return Decision(True, budget, action, backoff_s)


def _node_to_move(
    judgement: Judgement,
    past: Sequence[PastFailure],
    dispensable: Callable[[], Collection[str]],
) -> str | None:
    """Return the node that gives way: that of a device that failed, or one of two that repeatedly
    do not hear each other.

    None if the run cannot do without it, and for a failed start, since the check that found a pair
    excludes one of the two itself.
    """
    if judgement.verdict in _OF_A_NODE:
        return judgement.node_id if judgement.node_id in dispensable() else None
    if not judgement.pairs or judgement.verdict is Verdict.CONTROL_PLANE:
        return None
    return node_to_move(judgement.pairs, [failure.pairs for failure in past], dispensable())


def _restart(verdict: Verdict, backoff_s: float, moved: str | None) -> str:
    """Return a phrase for a restart, and for the node that it avoids."""
    when = _when(backoff_s)
    if moved is None:
        return f"restart {when}" if backoff_s else f"restart {when} on what is alive"
    where = "elsewhere" if verdict in _OF_A_NODE else f"without node {moved[:8]}"
    return f"restart {when} {where}"


def _when(backoff_s: float) -> str:
    return f"after {backoff_s:g} s" if backoff_s else "at once"


# ---------------------------------------------------------------- unrecoverable

# Failures that no restart repairs: each rule returns why the run ends, or None.

_START_PHASES = frozenset({"start", "restore", "first_pass"})
_TRAINING_PHASES = frozenset({"first_pass", "data", "step", "evaluation"})
"""Phases in which a rank holds micro-batches."""
_TOO_SMALL_STARTS = 3
"""So many starts in a row that ran out of a GPU's memory, and one more, are the model's doing."""


_WHOSE_MEMORY = {ErrorKind.DEVICE_MEMORY: "the GPU", ErrorKind.OUT_OF_MEMORY: "the host"}
_DEATHS_OF_ALL, _AT_ONE_STEP = 6, 3
"""So many deaths of all ranks in a row, the last of them at one step, are the doing of what they
run. The first may differ: a rank that dies has not reported its last steps."""


@dataclass(frozen=True)
class RunEnd:
    """Why a run ends."""

    reason: ReasonCode
    message: str | None


def storage_is_not_shared(judgement: Judgement) -> RunEnd | None:
    """End a run whose nodes never shared its storage. After the first step it means that a node
    lost its mount, which is worth waiting for."""
    if judgement.kind is not ErrorKind.STORAGE_NOT_SHARED or judgement.step:
        return None
    return RunEnd(ReasonCode.STORAGE_UNAVAILABLE, judgement.exception)


def same_user_error(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run whose code raised the same error at the same step before."""
    if made_progress(judgement):
        return None
    if not any(failure.is_like(judgement) and not made_progress(failure) for failure in past):
        return None
    message = f"the same error {judgement.place} twice: {judgement.exception}"
    return RunEnd(ReasonCode.USER_ERROR, message)


def too_many_user_errors(
    num_earlier: int, judgement: Judgement, spec: RecoverySpec
) -> RunEnd | None:
    """End a run whose code has raised more often than its budget allows."""
    if num_earlier < spec.max_user_errors:
        return None
    return RunEnd(
        ReasonCode.USER_ERROR,
        f"user code raised {num_earlier + 1} times, recovery.max_user_errors is "
        f"{spec.max_user_errors}: {judgement.exception}",
    )


def memory_is_too_small(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run that ran out of memory at the same place before.

    A host's memory is shared with other processes and may suffice the next time; a GPU's is not.
    Only while an attempt starts, a dead rank may still hold it. There, and on a host, it takes
    several in a row.
    """
    if judgement.kind not in (ErrorKind.DEVICE_MEMORY, ErrorKind.OUT_OF_MEMORY):
        return None
    same = [failure.is_like(judgement) for failure in past]
    is_start = judgement.detail.get("phase") in _START_PHASES
    may_pass = is_start or judgement.kind is ErrorKind.OUT_OF_MEMORY
    repeats = (
        len(same) >= _TOO_SMALL_STARTS and all(same[-_TOO_SMALL_STARTS:]) if may_pass else any(same)
    )
    if not repeats:
        return None
    return RunEnd(
        ReasonCode.USER_ERROR,
        f"{_WHOSE_MEMORY[judgement.kind]} ran out of memory again {judgement.place}; lower "
        "train.micro_batch_size, which changes no result "
        "but BatchNorm's, let train.on_out_of_memory: smaller lower it while the run trains, or "
        f"set train.precision to bf16: {judgement.exception}",
    )


def device_error_follows(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run whose error of the device followed it to another node: a broken GPU does not."""
    if judgement.verdict is not Verdict.HARDWARE or GPU_FAULTY in (judgement.exception or ""):
        return None
    if not any(
        failure.is_like(judgement) and failure.node_id != judgement.node_id for failure in past
    ):
        return None
    if (judgement.exception or "").startswith(NumericsChanged.__name__):
        return RunEnd(ReasonCode.INFEASIBLE, f"on two nodes in turn: {judgement.exception}")
    return RunEnd(
        ReasonCode.USER_ERROR,
        f"the same error of the device {judgement.place} on two nodes, and neither shows a "
        f"fault of its hardware; look for a kernel that reads or writes where it must not, "
        f"with CUDA_LAUNCH_BLOCKING=1 in env: {judgement.exception}",
    )


def ranks_part_again(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run whose ranks went apart again at about the same step, and not by one node alone. A
    node that computes wrongly does so at any step; code that changes weights differently on each
    rank does so at the same one.

    Audits that cannot be decided may be far apart: two of them end the run.
    """
    if judgement.verdict is not Verdict.SILENT_CORRUPTION:
        return None
    is_undecided = judgement.node_id is None and _is_of_audit(judgement)
    again = (
        failure.verdict is Verdict.SILENT_CORRUPTION
        and (
            abs((failure.step or 0) - (judgement.step or 0)) <= FOUND_WITHIN
            or (is_undecided and failure.node_id is None and _is_of_audit(failure))
        )
        and (failure.node_id is None or failure.node_id != judgement.node_id)
        for failure in past
    )
    if not any(again):
        return None
    if is_undecided:
        message = f"two audits could not be decided: {judgement.exception}"
    else:
        message = (
            f"the ranks went apart twice {judgement.place} or near it, and not by one node: let "
            "only the optimizer, after_step and on_epoch_end change the weights, and draw random "
            "numbers from a generator with a fixed seed. If no code of yours does it, one of the "
            f"nodes computes wrongly: {judgement.exception}"
        )
    return RunEnd(ReasonCode.USER_ERROR, message)


def _is_of_audit(failure: Judgement | PastFailure) -> bool:
    """Return whether an audit found it."""
    return (failure.signature or "").startswith(f"{Miscomputed.__name__}|")


def code_exits_again(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run whose code ended its own process at the same step before."""
    if judgement.kind is not ErrorKind.EXITED:
        return None
    return same_user_error(judgement, past)


def all_ranks_die_again(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run whose ranks all die together, again and again at one step. What ends processes from
    outside does not wait for a step."""
    times = deaths_of_all(judgement, past)
    newest = past[-_AT_ONE_STEP + 1 :]
    if times < _DEATHS_OF_ALL or not all(failure.is_like(judgement) for failure in newest):
        return None
    return RunEnd(
        ReasonCode.NO_PROGRESS,
        f"{ALL_DIED} {times} times in a row without an error, the last {_AT_ONE_STEP} times "
        f"{judgement.place}, and their nodes live: either their code ends its process there (it "
        "sends itself a signal, or native code crashes), or it needs more memory than the nodes "
        "have. Read the last log lines in `everstep why`, mend the code, and start a run from the "
        "newest checkpoint",
    )


def deaths_of_all(judgement: Judgement, past: Sequence[PastFailure]) -> int:
    """Return how many failures in a row were the deaths of all ranks, this one included."""
    signatures = [*(failure.signature for failure in past), judgement.signature]
    return sum(1 for _ in takewhile(lambda each: each == ALL_DIED, reversed(signatures)))


def nodes_cannot_meet(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run whose nodes repeatedly do not hear each other."""
    if not judgement.pairs:
        return None
    earlier = [(failure.pairs, failure.step) for failure in past]
    times = times_in_a_row(judgement.pairs, earlier, judgement.step)
    if times < ENDED_AFTER:
        return None
    return RunEnd(
        ReasonCode.NO_PROGRESS,
        f"{words(judgement.pairs)}: {times} attempts in a row failed for it, and no other node has "
        f"room. {WHAT_TO_CHECK}",
    )


def budget_is_spent(judgement: Judgement, in_a_row: int, spec: RecoverySpec) -> RunEnd | None:
    """End a run with too many failures in a row that are not its code's."""
    is_system = budget_of(judgement.verdict) == SYSTEM
    if is_system and in_a_row > spec.max_system_failures:
        return RunEnd(
            ReasonCode.SYSTEM_FAILURES_EXHAUSTED,
            f"{in_a_row} system failures in a row without progress exceed "
            "recovery.max_system_failures "
            f"{spec.max_system_failures}; the last was {_last(judgement)}",
        )
    if not is_system and in_a_row >= OUTSIDE_LIMIT:
        return RunEnd(
            ReasonCode.NO_PROGRESS,
            f"{in_a_row} attempts in a row failed before one new step; the last failure was "
            f"{_last(judgement)}",
        )
    return None


def _last(judgement: Judgement) -> str:
    """Return the verdict, and what to do about one that the run's own code may have caused."""
    if judgement.verdict is Verdict.WORKER_LOST:
        why = judgement.exception or "a process ended without an error"
        return f"{judgement.verdict}: {why}; read its last log lines in `everstep why`"
    if judgement.verdict is Verdict.OUT_OF_MEMORY:
        why = judgement.exception or "a process was killed for it"
        way_out = "lower train.micro_batch_size, or set train.on_out_of_memory to smaller"
        return f"{judgement.verdict}: {why}; {way_out}"
    is_explained = judgement.verdict in (Verdict.HANG, Verdict.SILENT_CORRUPTION)
    if is_explained and judgement.exception:
        return f"{judgement.verdict}: {judgement.exception}"
    return f"{judgement.verdict}"


# ---------------------------------------------------------------- past failures

# The earlier failures of a run: which budget each is charged to, and how many in a row came
# without progress.

SYSTEM = "system_failures"
BUDGET_OF = {
    Verdict.USER_ERROR: "user_errors",
    Verdict.PREEMPTION: "preemptions",
    Verdict.CONTROL_PLANE: "control_plane",
    Verdict.STORAGE: "storage",
}
"""The budget that each verdict is charged to; all others are charged to ``SYSTEM``.

A preemption, or trouble of the control plane or the storage, is not the run's fault: it is retried
``OUTSIDE_LIMIT`` times."""

MICRO_BATCH_SIZE = "next_micro_batch_size"
"""In the evidence of a failure: samples per forward pass after it, if they became fewer."""
SCRIPT_PROGRESS_S = 300.0
"""A script that reports no steps is taken to make progress once it has run for so many seconds."""


@dataclass(frozen=True)
class PastFailure:
    """The part of an earlier failure that later decisions need."""

    verdict: Verdict
    step: int | None
    signature: str | None = None
    node_id: str | None = None
    pairs: Pairs = frozenset()
    worked_s: float | None = None
    """How long a script that reports no steps had been running; None for other runs."""
    micro_batch_size: int | None = None
    """Samples per forward pass after it, if they became fewer."""

    def is_like(self, judgement: Judgement) -> bool:
        """Return whether the same thing failed at the same step as now."""
        return (self.verdict, self.step, self.signature) == (
            judgement.verdict,
            judgement.step,
            judgement.signature,
        )


def micro_batch_size_after(failures: Sequence[PastFailure]) -> int | None:
    """Return the samples per forward pass that the run has memory for; None for its spec's."""
    sizes = (failure.micro_batch_size for failure in reversed(failures))
    return next((size for size in sizes if size is not None), None)


def budget_of(verdict: Verdict) -> str:
    """Return the budget that a failure with this verdict is charged to."""
    return BUDGET_OF.get(verdict, SYSTEM)


def made_progress(failure: PastFailure | Judgement) -> bool:
    """Return whether a script that reports no steps ran for long enough to have moved on."""
    return failure.worked_s is not None and failure.worked_s >= SCRIPT_PROGRESS_S


def failures_in_a_row(judgement: Judgement, past: Sequence[PastFailure]) -> int:
    """Return how many failures of this budget came without progress: this one, and those before it
    down to the last one at a smaller step. Where steps are lost and made again, those since the
    newest step, or the newest since that, that got no further than the failure before them count.

    A failure that micro-batches of half the size answered does not count.

    A failure whose step is unknown counts at the step of the failure before it: as step 0 it would
    look like a step back. A script that reports no steps moves on by running for long.
    """
    count, again = 1, 0
    if made_progress(judgement):
        return count
    steps: list[int] = []
    for known in (*(failure.step for failure in past), judgement.step):
        steps.append(known if known is not None else steps[-1] if steps else 0)
    moved = [at for at, failure in enumerate(past) if made_progress(failure)]
    newest = steps.index(max(steps))
    if again_made := steps[newest + 1 :]:
        newest += 1 + again_made.index(max(again_made))
    newest, is_in_a_row = max([newest, *moved]), True
    for at, failure in reversed([*enumerate(past)]):
        is_of_budget = budget_of(failure.verdict) == budget_of(judgement.verdict)
        if failure.micro_batch_size is not None or not is_of_budget:
            continue
        again += at >= newest and steps[at + 1] <= steps[at]
        is_in_a_row = is_in_a_row and steps[-1] <= steps[at]
        count += is_in_a_row
        is_in_a_row = is_in_a_row and not made_progress(failure)
    return max(count, again)
