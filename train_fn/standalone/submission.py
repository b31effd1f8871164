"""How a start of these processes becomes a submission and an attempt of the run."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.claims import claim_submission, newest_attempt, succeed_submission
from storage.errors import AlreadyClaimed, StorageNotFound
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn.recovery.history import READ_BATCH, read_history

MAY_CHANGE = frozenset(
    {"name", "project", "priority", "tags", "scaling", "checkpoint", "recovery", "env"}
)
"""Fields of a spec that another start of the same run may change: none of them changes what is
computed."""


@dataclass(frozen=True)
class Start:
    """The numbers that rank 0 chose for this start, for all ranks."""

    submission: int
    attempt: int


def begin_run(run_dir: RunDir, spec: RunSpec, launch: str, *, fresh: bool) -> Start:
    """Create the run's directory, or continue the run that is there. Called by rank 0 alone.

    Raises UsageError if the directory holds a run of another spec.
    """
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
    """Claim the first submission after ``newest`` that nobody has begun. Two starts at the same
    time get one each."""
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
    """Return the names of the fields that differ between two specs and change what is computed."""
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
    """Return who started the processes of a submission's last attempt."""
    launch, cursor = None, None
    while True:
        events, cursor = read_journal(run_dir, submission, cursor, READ_BATCH, past_damage=True)
        for event in events:
            if event.kind is EventKind.ATTEMPT_STARTED:
                launch = event.data.get("launch")
        if not events:
            return launch
