"""A storage that was replaced, is not mounted, or holds less than is known is noticed, and nothing
begins anew there."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.db.engine import Database
from service.db.node_marks import StorageRecords
from service.db.runs import RunStore
from service.model.states import SUBMITTED
from service.storage_identity import StorageGate, adopt_storage, begin_with, storage_status
from storage.cluster import (
    EXIT_STORAGE,
    IDENTITY_FILE,
    KNOWN_VARIABLE,
    STORAGE_WORDS,
    Known,
    MarkedNode,
    check_identity,
    check_known,
    encode_marks,
    new_identity,
    read_identity,
    read_identity_file,
    read_node_marks,
    write_identity,
    write_marks_file,
)
from storage.errors import CorruptFile, StorageMismatch, StorageOwned
from storage.filesystem import Storage, open_storage
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.reconciler_world import World
from tests.support.storage_places import event, save

pytest_plugins = ["tests.support.storage_fixtures", "tests.support.reconciler_fixtures"]


def journalled(run_dir: RunDir, submission: int, *kinds: EventKind, **data: object) -> None:
    with JournalWriter(run_dir, submission) as journal:
        journal.append(
            [event(number, kind, data=dict(data)) for number, kind in enumerate(kinds, 1)]
        )


# ---------------------------------------------------------------- the file


def test_a_storage_gets_one_id_however_many_use_it_first(any_storage: Storage) -> None:
    assert read_identity(any_storage) is None
    first = write_identity(any_storage, new_identity())
    assert write_identity(any_storage, new_identity()) == first == read_identity(any_storage)
    check_identity(any_storage, first)
    with pytest.raises(StorageMismatch, match=f"{first}.*belongs to .*other-id.*storage --adopt"):
        check_identity(any_storage, "other-id")


def test_of_writers_at_the_same_moment_one_creates_the_file(local_storage: Storage) -> None:
    ids, results = [new_identity() for _ in range(8)], {}
    start = threading.Barrier(len(ids))

    def write(one: str) -> None:
        start.wait()
        results[one] = write_identity(local_storage, one)

    threads = [threading.Thread(target=write, args=(one,)) for one in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(ids) and set(results.values()) == {read_identity(local_storage)}
    assert [path.name for path in Path(local_storage.uri).iterdir()] == [IDENTITY_FILE], (
        "no draft is left"
    )


def test_an_identity_file_that_holds_no_id_is_named(any_storage: Storage) -> None:
    any_storage.files.write(IDENTITY_FILE, b"{}")
    with pytest.raises(CorruptFile, match=IDENTITY_FILE):
        read_identity(any_storage)


# ---------------------------------------------------------------- what a driver is told


def test_a_storage_with_less_than_is_known_is_refused(run_dir: RunDir) -> None:
    check_known(run_dir, Known())
    with pytest.raises(StorageMismatch, match="journal of submission 2 of run run_a"):
        check_known(run_dir, Known(journal=2))
    journalled(run_dir, 2, EventKind.SUBMISSION_STARTED)
    check_known(run_dir, Known(journal=2))
    with pytest.raises(StorageMismatch, match="has no checkpoint"):
        check_known(run_dir, Known(journal=2, checkpoint="step-000000500.s002.a001"))
    save(run_dir, 400, 2)
    with pytest.raises(StorageMismatch, match="has only checkpoints up to step 400"):
        check_known(run_dir, Known(journal=2, checkpoint="step-000000500.s002.a001"))
    name = save(run_dir, 500, 2).name
    check_known(run_dir, Known(journal=2, checkpoint=name))


def test_a_lost_checkpoint_that_the_journal_names_is_left_to_the_restore(run_dir: RunDir) -> None:
    lost = save(run_dir, 500, 2)
    save(run_dir, 400, 2)
    journalled(run_dir, 2, EventKind.CHECKPOINT_COMMITTED, name=lost.name, step=500)
    run_dir.files.delete_dir(run_dir.checkpoints_path(lost.name))
    check_known(run_dir, Known(journal=2, checkpoint=lost.name))


def drive(storage: Path, known: Known) -> subprocess.CompletedProcess[str]:
    """A driver as Ray starts it. It must end before it asks for a cluster, of which there is
    none."""
    command = [
        sys.executable,
        "-m",
        "train_fn.driver",
        "--storage",
        str(storage),
        "--run-id",
        "run_a",
        "--submission",
        "2",
    ]
    env = {**os.environ, KNOWN_VARIABLE: known.to_text(), "RAY_ADDRESS": ""}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_driver_that_finds_another_storage_writes_nothing_and_says_so(tmp_path: Path) -> None:
    known, there = new_identity(), new_identity()
    ended = drive(tmp_path, Known(known, 1, "step-000000500.s001.a001"))
    assert (
        ended.returncode == EXIT_STORAGE and STORAGE_WORDS in ended.stderr and known in ended.stderr
    )
    assert list(tmp_path.iterdir()) == [], "an unmounted directory stays empty"
    write_identity(open_storage(str(tmp_path)), there)
    ended = drive(tmp_path, Known(known, 1, "step-000000500.s001.a001"))
    assert ended.returncode == EXIT_STORAGE and known in ended.stderr and there in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY_FILE]


# ---------------------------------------------------------------- the database's side


@pytest.fixture
def runs(database_url: str) -> Iterator[RunStore]:
    database = Database(database_url)
    database.migrate()
    yield RunStore(database)
    database.close()


def test_a_gate_gives_an_id_once_and_holds_the_storage_to_it(
    runs: RunStore, tmp_path: Path
) -> None:
    storage = open_storage(str(tmp_path / "storage"))
    gate = StorageGate(storage, runs.storage, lambda: 0.0)
    storage_id = gate.check()
    assert storage_id == read_identity(storage) == StorageGate(storage, runs.storage).check()
    (tmp_path / "storage" / IDENTITY_FILE).unlink()
    with pytest.raises(StorageMismatch, match=f"has no id: .*{storage_id}.*storage --adopt"):
        gate.check()
    assert read_identity(storage) is None, "nobody but an operator gives it another one"


def test_a_service_killed_before_the_file_was_there_writes_the_one_that_it_recorded(
    runs: RunStore, tmp_path: Path
) -> None:
    storage_id = new_identity()
    runs.storage.claim(storage_id)
    assert StorageGate(open_storage(str(tmp_path)), runs.storage).check() == storage_id


# ---------------------------------------------------------------- two databases on one storage


@pytest.fixture
def shared(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Database]:
    """A database that has never used a storage."""
    database = Database(f"sqlite:///{tmp_path / 'other.db'}")
    database.migrate()
    yield database
    database.close()


def begin(storage: Storage, database: Database, name: str = "here", *, adopt: str = "") -> None:
    """As a service does at its start."""
    gate = StorageGate(storage, StorageRecords(database), service=name)
    begin_with(gate, storage, NodeMarkStore(database), adopt)


def problem(storage: Storage, records: StorageRecords) -> str:
    """What a service that runs finds; it keeps no answer."""
    return StorageGate(storage, records).problem() or ""


def test_a_new_database_does_not_take_another_s_storage(
    runs: RunStore, other: Database, shared: Storage
) -> None:
    first = runs.storage
    StorageGate(shared, first, service="/first").take()
    before = read_identity_file(shared)
    storage_id = before.storage_id if before else ""
    for adopt in ("", new_identity()):
        with pytest.raises(
            StorageOwned, match=f"{storage_id}.*/first.*/second.*--adopt-storage {storage_id}"
        ):
            begin(shared, other, "/second", adopt=adopt)
    assert read_identity_file(shared) == before and problem(shared, first) == ""

    write_marks_file(shared, encode_marks([MarkedNode("n1", "cordoned", "dust", "ann", 1.0)]))
    begin(shared, other, "/second", adopt=storage_id)
    assert NodeMarkStore(other).all()["n1"].reason == "dust"
    assert problem(shared, StorageRecords(other)) == ""
    assert re.search("belongs to the database of another.*/second", problem(shared, first))
    with pytest.raises(StorageMismatch, match="/second"):
        StorageGate(shared, first).take()
    StorageGate(shared, first).adopt()
    assert problem(shared, first) == ""
    assert "belongs to the database of another" in problem(shared, StorageRecords(other))
    with pytest.raises(StorageMismatch):
        begin(shared, other, adopt=storage_id)  # the setting may stay: it works once


def test_of_two_new_databases_on_an_empty_storage_one_gets_it(
    runs: RunStore, other: Database, shared: Storage
) -> None:
    StorageRecords(other).claim(new_identity())  # both have looked and found none
    StorageGate(shared, runs.storage, service="/first").take()
    with pytest.raises(StorageOwned, match=r"/first.*--adopt-storage"):
        begin(shared, other)
    assert problem(shared, runs.storage) == ""


def test_replicas_and_restarts_go_on_and_an_older_copy_of_the_database_is_noticed(
    shared: Storage, other: Database, tmp_path: Path
) -> None:
    records = StorageRecords(other)
    begin(shared, other)
    with sqlite3.connect(tmp_path / "other.db") as source:
        source.backup(sqlite3.connect(tmp_path / "copy.db"))
    source.close()
    before = shared.files.read(IDENTITY_FILE)
    begin(shared, other)
    assert problem(shared, records) == ""
    copy = Database(f"sqlite:///{tmp_path / 'copy.db'}")
    with pytest.raises(StorageMismatch, match="newer copy of this database"):
        begin(shared, copy, "/copy")
    assert problem(shared, records) == ""
    # an older storage put back is left to the check of each run
    shared.files.write(IDENTITY_FILE, before)
    assert problem(shared, records) == ""
    begin(shared, copy, "/copy")
    begin(shared, copy, "/copy")
    assert "newer copy of this database" in problem(shared, records), "so is a copy that goes on"
    copy.close()


def test_a_storage_from_before_owners_is_taken_by_the_database_that_knows_it(
    runs: RunStore, other: Database, shared: Storage
) -> None:
    storage_id = StorageGate(shared, runs.storage).check()
    with pytest.raises(StorageOwned, match=f"another service, and .*--adopt-storage {storage_id}"):
        begin(shared, other)
    StorageGate(shared, runs.storage, service="/first").take()
    found = read_identity_file(shared)
    assert found is not None and found.owner is not None and "/first" in found.owner.service


def test_marks_of_another_service_stay(runs: RunStore, other: Database, shared: Storage) -> None:
    marks = NodeMarkStore(other)
    begin(shared, other)
    file = MarksFile(shared, marks, StorageGate(shared, StorageRecords(other)).require)
    marks.mark("n1", "cordoned", "ann")
    assert file.publish()
    StorageGate(shared, runs.storage).adopt()
    marks.mark("n2", "cordoned", "ann")
    late = MarksFile(shared, marks, StorageGate(shared, StorageRecords(other)).require)
    with pytest.raises(StorageMismatch):
        late.publish()
    assert set(read_node_marks(shared)) == {"n1"}


# ---------------------------------------------------------------- the reconciler


@pytest.mark.usefixtures("whole_ticks")
class TestReconciler:
    @pytest.fixture(autouse=True)
    def _no_kept_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.storage_identity.KEPT_S", 0.0)

    async def paused_at_500(self, here: World, ray: FakeRay) -> str:
        """A run that was paused with a checkpoint, as the issue's experiment has it."""
        run = here.create()
        await here.reconciler.tick()
        name = save(RunDir(here.storage, run.id), 500).name
        saved = {
            "step": 500,
            "epoch": 0,
            "name": name,
            "size_bytes": 1,
            "digest": "x",
            "metrics": {},
        }
        stopped = {"outcome": "stopped", "reason": None, "step": 500}
        here.write(
            run.id, 1, (EventKind.SUBMISSION_STARTED, {}), (EventKind.CHECKPOINT_COMMITTED, saved)
        )
        here.write(run.id, 1, (EventKind.FINISHED, stopped), first=3)
        ray.end(f"{run.id}-s001")
        await here.reconciler.tick()
        row = here.get(run.id)
        assert row.status == RunStatus.PAUSED and row.latest_checkpoint is not None
        return run.id

    async def test_a_run_does_not_resume_from_nothing_in_an_empty_directory(
        self, here: World, ray: FakeRay, tmp_path: Path
    ) -> None:
        run_id = await self.paused_at_500(here, ray)
        known = read_identity(here.storage)
        (tmp_path / "storage").rename(tmp_path / "unmounted")
        (tmp_path / "storage").mkdir()
        here.runs.resume(run_id)
        for _ in range(3):
            await here.reconciler.tick()
        row = here.get(run_id)
        assert (row.status, row.submission, row.reason_code) == (
            RunStatus.QUEUED,
            1,
            ReasonCode.STORAGE_UNAVAILABLE,
        )
        assert (
            known is not None
            and known in str(row.reason_message)
            and "everstep storage --adopt" in str(row.reason_message)
        )
        assert ray.submissions == [f"{run_id}-s001"]
        assert list((tmp_path / "storage").iterdir()) == [], "nothing was begun there"
        shutil.rmtree(tmp_path / "storage")
        (tmp_path / "unmounted").rename(tmp_path / "storage")
        await here.reconciler.tick()
        row = here.get(run_id)
        assert (row.status, row.submission, row.reason_code) == (RunStatus.STARTING, 2, None), (
            "it goes on by itself"
        )
        wanted = Known(known, 1, "step-000000500.s001.a001").to_text()
        assert wanted in ray.jobs[f"{run_id}-s002"]["entrypoint"]

    async def test_what_another_storage_lacks_fails_no_run(
        self, here: World, ray: FakeRay, tmp_path: Path
    ) -> None:
        """Its driver is gone and its deadline over; that it had finished is told in the storage
        that is away."""
        run = here.create(recovery={"deadline_s": 60})
        await here.reconciler.tick()
        here.write(run.id, 1, (EventKind.SUBMISSION_STARTED, {}))
        done = {"outcome": "succeeded", "reason": None, "step": 10}
        here.write(run.id, 1, (EventKind.FINISHED, done), first=2)
        ray.end(f"{run.id}-s001")
        (tmp_path / "storage").rename(tmp_path / "unmounted")
        (tmp_path / "storage").mkdir()
        here.now += 3600
        await here.reconciler.tick()
        row = here.get(run.id)
        assert (row.status, row.reason_code) == (RunStatus.STARTING, ReasonCode.STORAGE_UNAVAILABLE)
        shutil.rmtree(tmp_path / "storage")
        (tmp_path / "unmounted").rename(tmp_path / "storage")
        await here.reconciler.tick()
        assert here.get(run.id).status == RunStatus.SUCCEEDED

    async def test_a_driver_s_own_finding_is_the_run_s_reason(
        self, here: World, ray: FakeRay
    ) -> None:
        run = here.create()
        await here.reconciler.tick()
        job = ray.jobs[f"{run.id}-s001"]
        job["driver_exit_code"] = EXIT_STORAGE
        job["message"] = (
            f"Job entrypoint command failed\n{STORAGE_WORDS}node-7: /mnt has no id\nmore"
        )
        ray.end(f"{run.id}-s001")
        await here.reconciler.tick()
        row = here.get(run.id)
        assert (row.reason_code, row.reason_message) == (
            ReasonCode.STORAGE_UNAVAILABLE,
            "node-7: /mnt has no id",
        )
        assert row.status != RunStatus.FAILED

    async def test_a_database_older_than_its_storage_is_noticed_and_caught_up(
        self, here: World, ray: FakeRay
    ) -> None:
        run = here.create()
        await here.reconciler.tick()
        here.write(run.id, 1, (EventKind.SUBMISSION_STARTED, {}))
        # What a service did with a database that was lost since: two submissions more, and the
        # run's end.
        here.write(run.id, 2, (EventKind.SUBMISSION_STARTED, {}))
        here.write(run.id, 3, (EventKind.SUBMISSION_STARTED, {}))
        here.write(
            run.id,
            3,
            (EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 10}),
            first=2,
        )
        ray.end(f"{run.id}-s001")
        for _ in range(2):
            await here.reconciler.tick()
        row = here.get(run.id)
        assert (row.submission, row.reason_code) == (1, ReasonCode.STORAGE_UNAVAILABLE)
        assert "older than its storage" in str(row.reason_message) and ray.submissions == [
            f"{run.id}-s001"
        ]
        gate = self.gate(here)
        [behind] = storage_status(here.storage, here.runs, gate).behind
        assert (behind.run_id, behind.database_submission, behind.storage_submission) == (
            run.id,
            1,
            3,
        )
        assert adopt_storage(here.storage, here.runs, gate).caught_up == (run.id,)
        for _ in range(2):
            await here.reconciler.tick()
        row = here.get(run.id)
        assert (row.status, row.submission) == (RunStatus.SUCCEEDED, 3)
        events = [(one.kind, one.submission) for one in here.events.after(run.id, 0, 100)]
        assert ("submission_started", 2) in events and ("finished", 3) in events

    async def test_a_job_that_an_older_database_does_not_know_is_left_alone_and_then_followed(
        self, here: World, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its run was paused when the database was copied, and is not any more."""
        monkeypatch.setattr("service.reconciler.decide.STRAY_GRACE_S", 0.0)
        run_id = await self.paused_at_500(here, ray)
        later = {"submission_id": f"{run_id}-s002", "status": "RUNNING"}
        metadata = {"run_id": run_id, "submission": "2"}
        ray.jobs[f"{run_id}-s002"] = {**ray.jobs[f"{run_id}-s001"], **later, "metadata": metadata}
        here.write(run_id, 2, (EventKind.SUBMISSION_STARTED, {}))
        for _ in range(3):
            await here.reconciler.tick()
        assert here.get(run_id).status == RunStatus.PAUSED
        assert ray.jobs[f"{run_id}-s002"]["status"] == "RUNNING"
        adopt_storage(here.storage, here.runs, self.gate(here))
        await here.reconciler.tick()
        row = here.get(run_id)
        assert (row.status in SUBMITTED, row.submission) == (True, 2)
        assert ray.jobs[f"{run_id}-s002"]["status"] == "RUNNING"
        done = {"outcome": "succeeded", "reason": None, "step": 900}
        here.write(run_id, 2, (EventKind.FINISHED, done), first=2)
        ray.end(f"{run_id}-s002")
        await here.reconciler.tick()
        assert here.get(run_id).status == RunStatus.SUCCEEDED

    async def test_an_operator_who_means_it_goes_on_with_an_empty_storage(
        self, here: World, ray: FakeRay, tmp_path: Path
    ) -> None:
        run_id = await self.paused_at_500(here, ray)
        before = read_identity(here.storage)
        shutil.rmtree(tmp_path / "storage")
        here.runs.resume(run_id)
        await here.reconciler.tick()
        assert here.get(run_id).status == RunStatus.QUEUED
        done = adopt_storage(here.storage, here.runs, self.gate(here))
        assert (done.previous_id, done.lost) == (
            before,
            (run_id,),
        ) and done.storage_id == read_identity(here.storage) != before
        await here.reconciler.tick()
        row = here.get(run_id)
        assert (row.status, row.submission, row.latest_checkpoint) == (RunStatus.STARTING, 2, None)
        assert Known(done.storage_id).to_text() in ray.jobs[f"{run_id}-s002"]["entrypoint"]
        [adopted] = [
            one for one in here.events.after(run_id, 0, 100) if one.kind == "storage_adopted"
        ]
        assert adopted.data["lost"] is True
        again = adopt_storage(here.storage, here.runs, self.gate(here))
        assert (again.storage_id, again.lost, again.caught_up) == (done.storage_id, (), ())

    def gate(self, here: World) -> StorageGate:
        return StorageGate(here.storage, here.runs.storage)
