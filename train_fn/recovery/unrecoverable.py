"""Failures that no restart repairs: each rule returns why the run ends, or None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.spec.sections import RecoverySpec
from everstep.wire import ErrorKind, ReasonCode, Verdict
from everstep.wire.events import GPU_FAULTY
from train_fn.errors import FOUND_WITHIN, Miscomputed, NumericsChanged
from train_fn.recovery.links import ENDED_AFTER, WHAT_TO_CHECK, times_in_a_row, words
from train_fn.recovery.past_failures import PastFailure, made_progress
from train_fn.recovery.verdict import Judgement

_START_PHASES = frozenset({"start", "restore"})
_TOO_SMALL_STARTS = 3
"""So many starts in a row that ran out of a GPU's memory, and one more, are the model's doing."""


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


def gpu_is_too_small(judgement: Judgement, past: Sequence[PastFailure]) -> RunEnd | None:
    """End a run for which a GPU ran out of memory at the same place before.

    A host's memory is shared with other processes and may suffice the next time; a GPU's is not.
    Only while an attempt starts, a dead rank may still hold it: there it takes several in a row.
    """
    if judgement.kind is not ErrorKind.DEVICE_MEMORY:
        return None
    same = [failure.is_like(judgement) for failure in past]
    is_start = judgement.detail.get("phase") in _START_PHASES
    repeats = (
        len(same) >= _TOO_SMALL_STARTS and all(same[-_TOO_SMALL_STARTS:]) if is_start else any(same)
    )
    if not repeats:
        return None
    return RunEnd(
        ReasonCode.USER_ERROR,
        f"the GPU ran out of memory again {judgement.place}; lower "
        "train.micro_batch_size, which changes no result "
        f"but BatchNorm's, or set train.precision to bf16: {judgement.exception}",
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


def budget_is_spent(
    judgement: Judgement, in_a_row: int, spec: RecoverySpec, no_progress_limit: int
) -> RunEnd | None:
    """End a run with too many system failures in a row."""
    if in_a_row > spec.max_system_failures:
        return RunEnd(
            ReasonCode.SYSTEM_FAILURES_EXHAUSTED,
            f"{in_a_row} system failures in a row without progress exceed "
            "recovery.max_system_failures "
            f"{spec.max_system_failures}; the last was {_last(judgement)}",
        )
    if in_a_row >= no_progress_limit:
        return RunEnd(
            ReasonCode.NO_PROGRESS,
            f"{in_a_row} attempts in a row failed before one new step; the last failure was "
            f"{_last(judgement)}",
        )
    return None


def _last(judgement: Judgement) -> str:
    """Return the verdict, and what to do about one that the run's own code may have caused."""
    is_explained = judgement.verdict in (Verdict.HANG, Verdict.SILENT_CORRUPTION)
    if is_explained and judgement.exception:
        return f"{judgement.verdict}: {judgement.exception}"
    return f"{judgement.verdict}"
