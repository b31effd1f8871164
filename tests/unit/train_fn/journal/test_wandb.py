"""Runs at Weights & Biases: one over all attempts, each step once. Offline for real, by W&B's own
program, as far as a file; online up to what W&B's package is asked to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.run_dir import RunDir
from tests.support.api_service import spec
from tests.support.service_process import wait_for
from tests.support.wandb_file import history, records
from tests.unit.train_fn.journal.test_tensorboard import Submission
from train_fn.driver.submission_journal import WandbRecorder, recorder_environment
from train_fn.journal.follower import NotNow
from train_fn.journal.wandb_tracking import Rows, WandbTracking

PATIENCE_S = 120.0


def made(directory: Path, **fields: Any) -> RunDir:
    run_dir = RunDir(open_storage(str(directory)), "run_w")
    run_dir.write_spec(parse_spec(spec(tags={"team": "vision"}, **{"wandb": {}, **fields})))
    return run_dir


def failed(submission: Submission, step: int) -> None:
    submission.tell(
        EventKind.FAILURE,
        verdict="worker_lost",
        first_rank=1,
        node_id="n",
        step=step,
        exception=None,
    )


@given(st.lists(st.tuples(st.sampled_from(["m", "e"]), st.integers(1, 9)), max_size=30))
def test_each_step_is_a_row_once_with_its_first_values(course: list[tuple[str, int]]) -> None:
    rows, seen = Rows(), {}
    for number, (kind, step) in enumerate(course):
        values = {"loss": float(number)}
        data: dict[str, Any] = {"points": [{"step": step, "at": 1.0, "values": values}]}
        if kind == "e":
            data = {"step": step, "epoch": 0, "metrics": values}
        event = JournalEvent(
            kind=EventKind.METRICS if kind == "m" else EventKind.EVALUATED,
            at=1.0,
            submission=1,
            data=data,
            source="driver",
            source_n=number,
        )
        for row in rows.of(event):
            assert (kind, row["step"]) not in seen
            seen[kind, row["step"]] = row
            assert float(number) in row.values()
    for kind in "me":
        steps = [step for each, step in seen if each == kind]
        assert steps == sorted(steps)


@pytest.mark.slow
def test_offline_one_record_has_every_step_once_whatever_died(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="comes with the extra wandb")
    run_dir = made(tmp_path)
    command = [sys.executable, "-m", "train_fn.journal.wandb_tracking", str(tmp_path), "run_w"]
    environ = {**os.environ, "WANDB_MODE": "online"}
    first = Submission(run_dir, 1)
    first.tell(EventKind.SUBMISSION_STARTED)
    first.steps(*range(1, 51))

    def run_json() -> dict[str, Any] | None:
        path = Path(str(run_dir.local_path), "wandb", "run.json")
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    with subprocess.Popen([*command, "1"], env=environ, stdin=subprocess.PIPE) as recorder:
        place = wait_for(run_json, PATIENCE_S, "the record's beginning")
        recorder.kill()
    failed(first, 50)
    first.steps(50)  # done again
    second = Submission(run_dir, 2)
    second.tell(EventKind.SUBMISSION_STARTED)
    second.steps(50, 51)
    second.tell(EventKind.EVALUATED, step=51, epoch=0, metrics={"accuracy": 0.5})
    second.tell(EventKind.FINISHED, outcome="failed", reason=None, step=51)
    subprocess.run([*command, "2"], env=environ, stdin=subprocess.DEVNULL, check=True)
    [directory] = Path(str(run_dir.local_path), "wandb").glob("offline-run-*-run_w")
    assert place["url"] is None and str(directory) != place["files"], "the older one is replaced"
    [path] = directory.glob("*.wandb")
    rows = history(path)
    assert [row["step"] for row in rows] == [*range(1, 52), 51]
    assert [row["loss"] for row in rows[:-1]] == [1 / step for step in range(1, 52)]
    assert rows[-1]["val_accuracy"] == 0.5 and "bad" not in rows[0]
    assert [row["_step"] for row in rows] == list(range(52))
    found = list(records(path))
    [run] = [each.run for each in found if each.HasField("run")][:1]
    assert (run.run_id, run.project, run.display_name) == ("run_w", "default", "digits")
    assert list(run.tags) == ["team=vision"]
    summary = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for each in found
        if each.HasField("summary")
        for item in each.summary.update
    }
    assert summary["everstep/outcome"] == "failed"
    assert "step 50: worker_lost of rank 1" in summary.values()
    assert [each.exit.exit_code for each in found if each.HasField("exit")] == [1]


class Server:
    """What W&B's package would do with a server that keeps rows by their number."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.away = False
        self.summary: dict[str, Any] = {}

    def module(self) -> types.ModuleType:
        module = types.ModuleType("wandb")
        errors = types.SimpleNamespace(Error=self.Error)
        names = {"Settings": lambda **given: given, "init": self.init, "errors": errors}
        names["teardown"] = lambda _code: None
        vars(module).update(names)
        return module

    def init(self, **given: Any) -> Any:
        self.asked.append(given)
        if self.away and given["mode"] == "online":
            raise self.Error("no server")
        online = given["mode"] == "online"
        return types.SimpleNamespace(
            starting_step=len(self.rows) if online else 0,
            url="https://wandb.example/ada/digits/runs/run_w" if online else None,
            dir=str(Path(given["dir"]) / "wandb" / "run-1" / "files"),
            define_metric=lambda *_given, **_options: None,
            log=self.log,
            summary=self.summary,
            finish=lambda exit_code: None,
        )

    def log(self, row: dict[str, Any], step: int) -> None:
        assert step not in self.rows, "no row is sent twice"
        assert step == len(self.rows), "and none is left out"
        self.rows[step] = row


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server.module())
    yield server


def test_online_a_later_driver_sends_what_the_server_lacks(tmp_path: Path, server: Server) -> None:
    run_dir = made(tmp_path, wandb={"project": "digits", "entity": "ada"})
    first = Submission(run_dir, 1)
    first.steps(*range(1, 31))
    WandbTracking(run_dir, 1, has_key=True).update()
    failed(first, 30)
    second = Submission(run_dir, 2)
    second.steps(30, 31, 32)
    tracking = WandbTracking(run_dir, 2, has_key=True)
    tracking.update()
    assert [server.rows[each]["step"] for each in range(32)] == list(range(1, 33))
    asked = server.asked[-1]
    assert (asked["id"], asked["resume"], asked["mode"]) == ("run_w", "allow", "online")
    assert (asked["project"], asked["entity"]) == ("digits", "ada")
    assert "secrets" not in asked["config"] and "env" not in asked["config"]
    kept = json.loads(run_dir.files.read(run_dir.wandb_path("run.json")))
    assert kept["url"] == "https://wandb.example/ada/digits/runs/run_w" and kept["problem"] is None


def test_without_an_answer_it_records_offline_or_tries_again(
    tmp_path: Path, server: Server
) -> None:
    server.away = True
    run_dir = made(tmp_path / "auto")
    Submission(run_dir, 1).steps(1, 2)
    WandbTracking(run_dir, 1, has_key=True).update()
    assert [asked["mode"] for asked in server.asked] == ["online", "offline"] and server.rows
    key = {"secrets": {"WANDB_API_KEY": "wandb"}}
    run_dir = made(tmp_path / "online", wandb={"mode": "online"}, **key)
    Submission(run_dir, 1).steps(1, 2)
    tracking = WandbTracking(run_dir, 1, has_key=True)
    with pytest.raises(NotNow, match="no server"):
        tracking.update()
    assert "no server" in run_dir.files.read(run_dir.wandb_path("run.json")).decode()
    server.away, server.rows = False, {}
    tracking.update()
    assert len(server.rows) == 2


def test_the_key_comes_from_a_file_of_the_node_and_from_nowhere_else(tmp_path: Path) -> None:
    key = {"secrets": {"WANDB_API_KEY": "wandb", "OTHER": "not-there"}}
    parsed = parse_spec(
        spec(wandb={}, env={"WANDB_BASE_URL": "https://w.example", "A": "b"}, **key)
    )
    environ = {"EVERSTEP_SECRETS_DIR": str(tmp_path), "WANDB_API_KEY": "the driver's", "PATH": "/"}
    found = recorder_environment(parsed, environ)
    assert "WANDB_API_KEY" not in found and found["WANDB_BASE_URL"] == "https://w.example"
    (tmp_path / "wandb").write_text("s3cret\n")
    found = recorder_environment(parsed, environ)
    assert found["WANDB_API_KEY"] == "s3cret" and "A" not in found and "OTHER" not in found
    with pytest.raises(InvalidSpec, match="WANDB_API_KEY"):
        parse_spec(spec(wandb={"mode": "online"}))


def test_a_recorder_that_does_not_end_is_ended(tmp_path: Path) -> None:
    run_dir = made(tmp_path)
    recorder = WandbRecorder(run_dir, 1, run_dir.read_spec(), os.environ)
    recorder.close(1.0)
    recorder.start()
    process = recorder._process
    assert process is not None
    recorder.close(0.01)
    assert process.returncode is not None
