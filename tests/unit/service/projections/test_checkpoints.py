"""Checkpoints and samples of the lineage, from the events of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from everstep.wire.events import EventKind
from service.model.rows import CheckpointCheck, EventRow
from service.projections import checkpoints, protection
from service.projections.handlers import project
from tests.support.api_service import NOON
from tests.support.projected_events import committed, event, run_row


def test_checkpoints_of_the_lineage() -> None:
    history = [
        committed(10),
        committed(20),
        committed(30),
        event(EventKind.CHECKPOINT_DELETED, step=10, name="step-000000010.s001.a001"),
        event(EventKind.RESTORED, submission=2, step=20, epoch=0, source="checkpoint"),
        committed(30, 2),
    ]
    found = checkpoints.checkpoints(history, {})
    assert [(item.name, item.state) for item in found] == [
        ("step-000000010.s001.a001", "deleted"),
        ("step-000000020.s001.a001", "committed"),
        ("step-000000030.s002.a001", "committed"),
    ]
    newest = checkpoints.newest(found)
    assert newest is not None and newest.name == "step-000000030.s002.a001"
    best = checkpoints.best(found, "val_accuracy", "max")
    assert best is not None and best.step == 30
    worst = checkpoints.best(found, "accuracy", "min")
    assert worst is not None and worst.step == 20, "step 10 is deleted"
    scored = [committed(10), committed(20), committed(30)]
    for entry, metrics in zip(
        scored, ({"accuracy": 0.8}, {"accuracy": 0.9}, {"accuracy": 0.9}), strict=True
    ):
        entry.data["metrics"] = metrics
    best = checkpoints.best(checkpoints.checkpoints(scored, {}), "accuracy", "max")
    assert best is not None and best.step == 20, (
        "a later one that is as good may only repeat what was measured before it"
    )
    scored[0].data["metrics"] = {}
    late = [*scored, event(EventKind.EVALUATED, step=10, epoch=0, metrics={"accuracy": 0.95})]
    best = checkpoints.best(checkpoints.checkpoints(late, {}), "accuracy", "max")
    assert best is not None and best.step == 10, "saved before it was evaluated"
    assert checkpoints.best(found, "f1", "max") is None
    assert checkpoints.at_step(found, 40) is None
    deleted = checkpoints.at_step(found, 10)
    assert deleted is not None and deleted.state == "deleted"


def test_a_checkpoint_that_a_later_submission_reports_is_of_the_one_that_wrote_it() -> None:
    """Submission 1 died after attempt 5 had committed and before it could report that."""
    reported = committed(60, 2)
    reported.data["name"] = "step-000000060.s001.a005"
    history = [
        replace(event(EventKind.RESTORED, 1, step=60, epoch=0, source="checkpoint"), submission=2),
        reported,
    ]
    back = event(
        EventKind.RESTORED, 3, submission=2, attempt=3, step=30, epoch=0, source="snapshot"
    )
    run = run_row()
    for row in history:
        run = replace(run, **project(run, row).columns)
    assert [item["submission"] for item in run.recent_checkpoints] == [1]
    assert [item.submission for item in checkpoints.checkpoints(history, {})] == [1]
    assert checkpoints.checkpoints([*history, back], {}) == []
    assert project(run, back).columns["recent_checkpoints"] == []


def test_what_an_older_attempt_commits_beyond_a_newer_ones_beginning_is_not_in_the_lineage() -> (
    None
):
    """Also where it was told before the newer one began: its rank was given up, not dead."""
    by_attempts = [committed(step) for step in (20, 60, 60)]
    for entry, attempt in zip(by_attempts, (1, 1, 2), strict=True):
        entry.data["name"] = f"step-{entry.data['step']:09d}.s001.a{attempt:03d}"
    begins = replace(event(EventKind.RESTORED, step=30, epoch=0, source="snapshot"), attempt=2)
    history = [*by_attempts[:2], begins, by_attempts[2]]
    names = ["step-000000020.s001.a001", "step-000000060.s001.a002"]
    assert [item.name for item in checkpoints.checkpoints(history, {})] == names
    run = run_row()
    for row in history:
        run = replace(run, **project(run, row).columns)
    assert [item["name"] for item in run.recent_checkpoints] == names
    both = checkpoints.checkpoints([by_attempts[2], by_attempts[1]], {})
    found = (
        checkpoints.newest(both),
        checkpoints.at_step(both, 60),
        checkpoints.best(both, "val_accuracy", "max"),
    )
    assert [item and item.name for item in found] == [names[1]] * 3, (
        "of one step the newer attempt's counts"
    )


def test_checks_and_rejections_show() -> None:
    rejected = event(
        EventKind.RESTORED,
        at=NOON + 5,
        step=0,
        epoch=0,
        source="fresh",
        rejected=[{"name": "step-000000010.s001.a001", "problem": "size"}],
    )
    [found] = checkpoints.checkpoints([committed(10), rejected], {})
    assert (found.state, found.problem) == ("corrupt", "size")
    sound = CheckpointCheck("step-000000010.s001.a001", NOON + 9, None)
    [found] = checkpoints.checkpoints([committed(10), rejected], {sound.name: sound})
    assert (found.state, found.problem, found.verified_at) == (
        "committed",
        None,
        datetime.fromtimestamp(NOON + 9, UTC),
    )
    broken = CheckpointCheck("step-000000010.s001.a001", NOON + 1, "digest")
    [found] = checkpoints.checkpoints([committed(10)], {broken.name: broken})
    assert (found.state, found.problem) == ("corrupt", "digest")
    [again] = checkpoints.checkpoints(
        [committed(10), committed(10, at=NOON + 2)], {broken.name: broken}
    )
    assert again.state == "committed", "it was written anew after the check"


def epoch(number: int, **counts: int) -> EventRow:
    data = {"samples": 10, "used_once": 10, "duplicates": 0, "missing": 0} | counts
    return event(EventKind.EPOCH_COMPLETED, epoch=number, digest=f"d{number}", seconds=1.0, **data)


def test_samples_of_the_lineage() -> None:
    found = protection.samples(
        [epoch(0), epoch(1, missing=1), event(EventKind.RESTORED, step=15, epoch=1), epoch(1)]
    )
    assert [(item.epoch, item.missing, item.digest) for item in found.epochs] == [
        (0, 0, "d0"),
        (1, 0, "d1"),
    ]
    back = protection.samples([epoch(0), epoch(1), event(EventKind.RESTORED, step=5, epoch=0)])
    assert back.epochs == ()
