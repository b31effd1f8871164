"""Retention: what is kept, and that nothing is deleted which another may need."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoints.manifest import MANIFEST
from storage.checkpoints.store import CheckpointStore
from storage.claims import claim_attempt
from storage.errors import CheckpointReplaced, CorruptFile
from storage.filesystem import open_storage
from storage.run_dir import CheckpointName, RunDir
from tests.support.storage_places import (
    quick_directory,
    record_restored,
    save,
)

pytest_plugins = ["tests.support.storage_fixtures"]


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_an_older_attempt_deletes_nothing_that_a_newer_one_wrote(run_dir: RunDir) -> None:
    record_restored(run_dir, 1, 0, "fresh", attempt=1)
    store, zombie = CheckpointStore(run_dir), CheckpointStore(run_dir)
    save(run_dir, 20, attempt=1)
    assert zombie.retain(1, None, (1, 1)) == []
    record_restored(run_dir, 1, 20, "snapshot", attempt=2)
    ours = [save(run_dir, step, attempt=2) for step in (30, 40)]
    unfinished = store.begin(50, 1, 2)
    zombies = [save(run_dir, step, attempt=1) for step in (60, 70, 80)]
    zombie.retain(1, None, (1, 1), zombies[-1])
    assert {manifest.name for manifest in store.list()} >= {manifest.name for manifest in ours}
    with unfinished.write_file("model.pt") as file:
        file.write(b"goes on")
    unfinished.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})


# ---------------------------------------------------------------- retention


@given(
    commits=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=12, unique=True
    ),
    restored=st.dictionaries(st.integers(2, 3), st.tuples(st.integers(0, 30), st.booleans())),
    unfinished=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=3),
    keep_latest=st.integers(-1, 5),
    best=st.integers(0, 20),
    skew_s=st.lists(st.integers(-1000, 1000), min_size=12, max_size=12),
)
@settings(max_examples=150)
def test_retention_keeps_what_it_must(
    commits: list[tuple[int, int]],
    restored: dict[int, tuple[int, bool]],
    unfinished: list[tuple[int, int]],
    keep_latest: int,
    best: int,
    skew_s: list[int],
) -> None:
    with quick_directory() as directory:
        run_dir = RunDir(open_storage(directory), "run_p")
        store = CheckpointStore(run_dir)
        place: dict[str, tuple[int, int]] = {}
        attempts: dict[int, tuple[int, int]] = {}
        for number, (step, submission) in enumerate(commits):
            attempt, last_step = attempts.get(submission, (10 * submission, -1))
            attempt += step <= last_step  # only a later attempt goes back
            attempts[submission] = attempt, step
            when = NOW + timedelta(seconds=number + skew_s[number])
            place[save(run_dir, step, submission, created_at=when, attempt=attempt).name] = (
                submission,
                number,
            )
        for submission, (step, fresh) in restored.items():
            record_restored(run_dir, submission, step, "fresh" if fresh else "checkpoint")
        for step, submission in unfinished:
            if (step, submission) not in commits:
                store.begin(step, submission, 1)
        before, line = store.list(), store.lineage()
        best_name = before[best % len(before)].name

        deleted = store.retain(keep_latest, best_name)

        after = {manifest.name for manifest in store.list()}
        assert sorted(deleted) == sorted({manifest.name for manifest in before} - after)
        assert best_name in after
        if not line:
            assert deleted == []
            return
        newest = line[-1].name
        latest = [one.name for one in sorted(line, key=lambda one: place[one.name])][
            -max(1, keep_latest) :
        ]
        assert after >= {newest, *latest}
        kept_line = [manifest.name for manifest in line if manifest.name in after]
        assert set(kept_line) == {newest, *latest} | (
            {best_name} & {manifest.name for manifest in line}
        )
        assert store.newest_valid()[0] == line[-1]
        # What is left besides can only be what the newest submission has yet to overtake, or never
        # was in the line.
        for entry in run_dir.files.list("runs/run_p/checkpoints"):
            name = CheckpointName.parse(entry.name.removeprefix(".begun-")[: len(newest)])
            assert name is not None
            if entry.name not in after:
                newest_name = CheckpointName.parse(newest)
                assert newest_name is not None
                assert (name.origin, name.step) > (newest_name.origin, newest_name.step)
        assert store.retain(keep_latest, best_name) == []


def test_retention_counts_what_is_there_now(run_dir: RunDir) -> None:
    """It knows manifests from before: one that is gone since must not count, and one that was
    written anew is another."""
    store = CheckpointStore(run_dir)
    names = [save(run_dir, step).name for step in (10, 20, 30)]
    assert store.retain(3, best=None) == []
    run_dir.files.delete_file(f"runs/run_a/checkpoints/{names[1]}/{MANIFEST}")
    written = save(run_dir, 40)
    assert store.retain(3, None, None, written) == [], "three are left"
    assert [manifest.name for manifest in store.list()] == [
        names[0],
        names[2],
        written.name,
    ]
    run_dir.files.write(f"runs/run_a/checkpoints/{names[2]}/model.pt", b"bad")
    again = save(run_dir, 30, attempt=2)
    assert store.retain(1, best=None) == [names[0], names[2]], (
        "kept are the newest by commit, and by step"
    )
    assert store.list() == [again, written]


def test_the_best_by_a_metric_is_kept(run_dir: RunDir) -> None:
    measured = {10: 0.5, 20: 0.9, 30: 0.7}
    names = [save(run_dir, step, metrics={"score": value}).name for step, value in measured.items()]
    best_by: tuple[str, Literal["max"]] = ("score", "max")
    assert CheckpointStore(run_dir).retain(1, None, best_by=best_by) == names[:1]


def test_a_sound_checkpoint_below_a_corrupt_one_is_kept(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    bad = save(run_dir, 100).name
    run_dir.files.write(f"runs/run_a/checkpoints/{bad}/model.pt", b"bad")
    sound = save(run_dir, 75, attempt=2)  # the attempt that fell back goes on below it
    assert store.retain(1, best=None) == []
    newest, rejected = store.newest_valid()
    assert newest == sound
    assert [one.name for one in rejected] == [bad]


def test_what_a_restore_found_to_be_corrupt_does_not_count_as_kept(run_dir: RunDir) -> None:
    sound = save(run_dir, 50).name
    bad = [save(run_dir, step).name for step in (60, 70)]
    for name in bad:
        run_dir.files.write(f"runs/run_a/checkpoints/{name}/model.pt", b"bad")
    store = CheckpointStore(run_dir)
    assert [one.name for one in store.newest_valid()[1]] == bad[::-1]
    first = save(run_dir, 55, attempt=2).name
    # two sound ones are kept, and the evidence as long as one of them is older
    assert store.retain(2, best=None) == []
    second = save(run_dir, 58, attempt=2).name
    assert set(store.retain(2, best=None)) == {sound, *bad}
    assert [manifest.name for manifest in store.list()] == [first, second]


def test_what_was_just_written_is_kept_whatever_its_name_says(run_dir: RunDir) -> None:
    for step in (40, 50):
        save(run_dir, step, attempt=2)
    written = save(run_dir, 30, attempt=1)
    assert CheckpointStore(run_dir).retain(1, None, None, written) == ["step-000000040.s001.a002"]


def test_what_the_service_found_to_be_corrupt_does_not_count_as_kept(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    names = [save(run_dir, step).name for step in (10, 20, 30)]
    run_dir.keep_steps((), corrupt=[names[2]])
    assert store.retain(1, best=None) == [names[0]], "the newest sound one, and the evidence"
    save(run_dir, 40)
    assert store.retain(1, best=None) == names[1:]


def test_a_checkpoint_that_another_run_waits_for_is_kept(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    names = [save(run_dir, step).name for step in (10, 20, 30)]
    run_dir.keep_steps({10})
    assert store.retain(1, best=None) == [names[1]]
    run_dir.keep_steps(())
    assert store.retain(1, best=None) == [names[0]]
    run_dir.files.write("runs/run_a/control/kept.json", b"{}")
    save(run_dir, 40)
    with pytest.raises(CorruptFile, match="which steps to keep"):
        store.retain(1, best=None)


def test_the_leavings_of_a_run_that_ended_are_collected(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    kept = save(run_dir, 10)
    writer = store.begin(20, 1, 1)
    with writer.write_file("model.pt") as file:
        file.write(b"half")
    [orphan] = store.collect_orphans()
    assert orphan.startswith(f".begun-{writer.name}-" if run_dir.storage.is_local else writer.name)
    assert store.collect_orphans() == []
    assert store.list() == [kept]
    with pytest.raises(CheckpointReplaced):
        writer.write_file("train_state.pt")


def test_an_older_submission_deletes_nothing(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    for step in (10, 20, 30):
        save(run_dir, step)
    record_restored(run_dir, 2, 30)
    assert store.retain(1, None, (1, 1)) == []
    assert len(store.retain(1, None, (2, 1))) == 2


def test_an_attempt_that_is_replaced_while_it_deletes_deletes_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_attempt(run_dir, (1, 1))
    for step in (10, 20, 30):
        save(run_dir, step)
    delete_file = run_dir.files.delete_file

    def delete_and_be_replaced(path: str) -> None:
        delete_file(path)
        if not run_dir.files.exists(run_dir.claim_path((1, 2))):
            claim_attempt(run_dir, (1, 2))

    monkeypatch.setattr(run_dir.files, "delete_file", delete_and_be_replaced)
    assert CheckpointStore(run_dir).retain(1, None, (1, 1)) == []
    assert [manifest.step for manifest in CheckpointStore(run_dir).list()] == [10, 20, 30]
