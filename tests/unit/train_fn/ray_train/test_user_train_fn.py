"""A Ray Train function's reports: told to the journal as steps, and a stop that all ranks take at
the same one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.code import CodeStore
from storage.filesystem import Storage, open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import tar_gz
from tests.support.one_rank import journal_of, one_rank
from tests.support.own_task import own_node
from train_fn.context import WorkerContext
from train_fn.ray_train import user_function as own_function
from train_fn.ray_train.ray_checkpoints import (
    PARTS_METRIC,
    KeepCheckpointList,
    latest_reported,
    parts_of,
    rejected_reports,
    repair_snapshot_file,
)
from train_fn.recovery.evidence import StepFailed, describe_error
from train_fn.user_code.modules import DOOR

__all__ = ["own_node"]

SOURCE = """
reported = []


def train_fn(config):
    for n in range(config["n"]):
        metrics = {"loss": 1.0 / (n + 1), "name": "x", "bad": float("nan")}
        REPORT(metrics, CHECKPOINT if n in config["kept"] else None)


def raises(config):
    REPORT({"loss": 1.0}, None)
    raise LookupError("sample 3")


def nothing():
    REPORT({"loss": 2.0}, None)


def two(a, b):
    pass
"""


class RayContext:
    """What Ray's own context has that the reports touch."""

    def __init__(self) -> None:
        self.checkpoint: Any = None
        self.report_call_index = 0
        self.reported: list[tuple[Any, ...]] = []
        self.given_up = False

    def report(self, *args: Any) -> None:
        if not self.given_up:
            self.report_call_index += 1
            self.reported.append(args)


@pytest.fixture
def ray_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RayContext:
    # A rank has a process of its own; here another test may have imported it.
    monkeypatch.delitem(sys.modules, DOOR, raising=False)
    found = RayContext()
    monkeypatch.setattr(own_function, "get_train_context", lambda: found)
    monkeypatch.setattr("ray.train.collective.broadcast_from_rank_zero", lambda value: value)
    monkeypatch.setattr("builtins.REPORT", lambda *args: found.report(*args), raising=False)
    monkeypatch.setattr(
        "builtins.CHECKPOINT", ray.train.Checkpoint.from_directory(tmp_path), raising=False
    )
    return found


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    yield open_storage(str(tmp_path / "storage"))


def context(storage: Storage, name: str = "train_fn", **config: Any) -> WorkerContext:
    digest = CodeStore(storage).put(tar_gz({"mine.py": SOURCE})).digest
    code = {"archive": digest, "train_fn": f"mine:{name}", "config": config}
    return one_rank(
        RunSpec.model_validate({"name": "own", "code": code}), RunDir(storage, "run_own")
    )


def events(ctx: WorkerContext) -> list[tuple[EventKind, dict[str, Any]]]:
    return journal_of(ctx).events


def test_reports_are_steps_and_numbers_are_metrics(
    storage: Storage, ray_context: RayContext
) -> None:
    ctx = context(storage, n=3, kept=[])
    assert own_function.train(ctx) is None
    kinds = [kind for kind, _ in events(ctx)]
    assert kinds == [EventKind.RESTORED, EventKind.TRAINING_STARTED, *[EventKind.METRICS] * 3]
    assert events(ctx)[0][1] == {
        "step": 0,
        "epoch": 0,
        "source": "fresh",
        "checkpoint": None,
        "unit": "reports",
        "rejected": [],
    }
    points = [data["points"][0] for kind, data in events(ctx) if kind is EventKind.METRICS]
    assert [point["step"] for point in points] == [1, 2, 3]
    assert points[1]["values"].keys() == {"loss", "bad", "step_s"}
    assert (points[1]["values"]["loss"], points[1]["values"]["bad"]) == (0.5, None)
    assert [metrics["everstep_step"] for metrics, *_ in ray_context.reported] == [1, 2, 3]


@pytest.mark.parametrize(
    ("stop", "kept", "num_reports"),
    [("cancel", [1], 1), ("pause", [], 1), ("pause", [0], 1), ("pause", [1], 1)],
)
def test_a_stop_is_taken_at_a_report(
    storage: Storage, ray_context: RayContext, stop: Any, kept: list[int], num_reports: int
) -> None:
    ctx = context(storage, n=5, kept=kept)
    journal_of(ctx).stop_requested = stop
    assert own_function.train(ctx) == stop
    assert len(ray_context.reported) == num_reports


def test_a_pause_waits_for_a_checkpoint_of_a_function_that_makes_some(
    storage: Storage, ray_context: RayContext
) -> None:
    ctx = context(storage, n=5, kept=[3])
    run_list(storage, ["checkpoint_a"], [7])
    ray_context.checkpoint = object()
    journal_of(ctx).stop_requested = "pause"
    assert own_function.train(ctx) == "pause"
    assert len(ray_context.reported) == 4
    assert events(ctx)[0][1] == {
        "step": 7,
        "epoch": 0,
        "source": "checkpoint",
        "checkpoint": "checkpoint_a",
        "unit": "reports",
        "rejected": [],
    }
    assert events(ctx)[-1][1]["points"][0]["step"] == 11


@pytest.mark.parametrize(
    ("name", "config", "words", "step"),
    [
        ("raises", {"n": 1}, r"sample 3 (mine.py, line 13)", 1),
        ("two", {"n": 1}, "mine:two (mine.py, line 20) needs 2 arguments", 0),
        ("nothing", {"n": 1}, "let it take one", 0),
        ("reported", {"n": 1}, "is a list", 0),
        ("absent", {}, "mine.py has no 'absent'", 0),
    ],
)
def test_what_goes_wrong_is_the_user_s_and_has_its_place(
    storage: Storage,
    ray_context: RayContext,
    name: str,
    config: dict[str, Any],
    words: str,
    step: int,
) -> None:
    with pytest.raises(StepFailed) as caught:
        own_function.train(context(storage, name, **config))
    error = describe_error(caught.value, 0)
    assert error.kind is ErrorKind.USER and words in error.message
    assert (error.step, error.phase) == (step, "train_fn")


@pytest.mark.parametrize("how", ["given up", "no agreement"])
def test_a_peer_that_is_gone_is_not_the_user_s_fault(
    storage: Storage, ray_context: RayContext, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(value: Any) -> Any:
        raise RayError("the barrier was reset")

    ray_context.given_up = how == "given up"
    if how == "no agreement":
        monkeypatch.setattr("ray.train.collective.broadcast_from_rank_zero", lost)
    with pytest.raises(StepFailed) as caught:
        own_function.train(context(storage, n=1, kept=[]))
    assert describe_error(caught.value, 0).collateral


# ---------------------------------------------------------------- Ray's list of checkpoints


def run_list(storage: Storage, names: list[str], steps: list[int]) -> bytes:
    """Ray's list as it writes it, and the directories that it names."""
    files = RunDir(storage, "run_own").files
    results = [
        {"checkpoint_dir_name": name, "metrics": {"everstep_step": step}}
        for name, step in zip(names, steps, strict=True)
    ]
    state = {
        "ray_version": ray.__version__,
        "checkpoint_results": results,
        "checkpoint_report_indices": [20 + step for step in steps],
        "latest_checkpoint_result": results[-1],
        "validated_checkpoint_dir_names": names,
    }
    data = json.dumps(state).encode()
    for name in names:
        files.write(f"runs/run_own/{name}/state.pt", b"x")
    files.write("runs/run_own/checkpoint_manager_snapshot.json", data)
    return data


def test_a_torn_list_is_replaced_by_its_last_copy(storage: Storage) -> None:
    run_dir, path = RunDir(storage, "run_own"), "runs/run_own/checkpoint_manager_snapshot.json"
    assert latest_reported(run_dir) == (0, None)
    keep = KeepCheckpointList(run_dir)
    reported = SimpleNamespace(
        checkpoint=SimpleNamespace(path="/any/checkpoint_b"), metrics={"everstep_step": 5}
    )
    keep.after_report(reported, [{}])  # nothing to copy yet: told in the log only
    good = run_list(storage, ["checkpoint_a", "checkpoint_b"], [1, 5])
    keep.after_report(SimpleNamespace(checkpoint=None), [])
    repair_snapshot_file(run_dir)
    assert run_dir.files.read(path) == good and latest_reported(run_dir) == (5, "checkpoint_b")
    keep.after_report(reported, [{}])
    run_dir.files.write(path, good[:-5])
    repair_snapshot_file(run_dir)
    assert run_dir.files.read(path) == good
    run_dir.files.delete_dir("runs/run_own/checkpoint_b")
    repair_snapshot_file(run_dir)
    mended = json.loads(run_dir.files.read(path))
    assert latest_reported(run_dir) == (1, "checkpoint_a")
    assert (mended["checkpoint_report_indices"], mended["validated_checkpoint_dir_names"]) == (
        [21],
        ["checkpoint_a"],
    )
    run_dir.files.delete_dir("runs/run_own/checkpoint_a")
    repair_snapshot_file(run_dir)
    assert not run_dir.files.exists(path)


def test_reports_that_are_gone_are_named_and_a_function_does_not_begin_again_for_them(
    storage: Storage, ray_context: RayContext
) -> None:
    run_dir, names = RunDir(storage, "run_own"), ["checkpoint_a", "checkpoint_b"]
    run_list(storage, names, [1, 5])
    for name in names:
        KeepCheckpointList(run_dir).after_report(
            SimpleNamespace(
                checkpoint=SimpleNamespace(path=f"/any/{name}"), metrics={"everstep_step": 5}
            ),
            [{}],
        )
    assert rejected_reports(run_dir) == {}
    run_dir.files.delete_dir("runs/run_own/checkpoint_b")
    repair_snapshot_file(run_dir)
    assert rejected_reports(run_dir) == {"checkpoint_b": "it lacks all of it"}
    ray_context.checkpoint = "checkpoint_a"
    ctx = context(storage, n=0, kept=[])
    own_function.train(ctx)
    [restored] = journal_of(ctx).of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["checkpoint"]) == ("checkpoint", "checkpoint_a")
    assert restored["rejected"] == [{"name": "checkpoint_b", "problem": "it lacks all of it"}]

    run_dir.files.delete_dir("runs/run_own/checkpoint_a")
    repair_snapshot_file(run_dir)
    ray_context.checkpoint = None
    with pytest.raises(StepFailed, match="has reported checkpoint_b") as caught:
        own_function.train(context(storage, n=1, kept=[]))
    assert describe_error(caught.value, 0).kind is ErrorKind.STORAGE


@pytest.mark.parametrize("harm", ["cut short", "longer", "gone"])
def test_a_checkpoint_that_lacks_a_rank_s_part_is_not_gone_on_from(
    storage: Storage, tmp_path: Path, harm: str
) -> None:
    run_dir = RunDir(storage, "run_own")
    names, own = ["checkpoint_a", "checkpoint_b"], []
    for rank in range(2):
        local = tmp_path / f"rank-{rank}"
        (local / "deep").mkdir(parents=True)
        (local / "deep" / f"__{rank}_0.distcp").write_bytes(b"12345")
        (local / "same.txt").write_bytes(b"x" * (rank + 1))
        (local / "empty").touch()
        own.append({PARTS_METRIC: parts_of(ray.train.Checkpoint.from_directory(local))})
    run_list(storage, names, [1, 5])
    root = Path(run_dir.files.path("runs/run_own"))
    for name in names:
        for rank in range(2):
            shutil.copytree(tmp_path / f"rank-{rank}", root / name, dirs_exist_ok=True)
        reported = SimpleNamespace(
            checkpoint=SimpleNamespace(path=f"/any/{name}"), metrics={"everstep_step": 5}
        )
        KeepCheckpointList(run_dir).after_report(reported, own)
    manifest = json.loads((root / "checkpoint_b" / "everstep_manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"]) == (5, 2)
    assert manifest["files"]["deep/__1_0.distcp"] == {"size_bytes": 5, "rank": 1}
    assert manifest["files"]["same.txt"]["size_bytes"] is None
    repair_snapshot_file(run_dir)
    assert latest_reported(run_dir) == (5, "checkpoint_b")
    part = root / "checkpoint_b" / "deep" / "__1_0.distcp"
    part.unlink() if harm == "gone" else part.write_bytes(
        b"1234" if harm == "cut short" else b"123456"
    )
    repair_snapshot_file(run_dir)
    assert latest_reported(run_dir) == (1, "checkpoint_a")


PROTECTED = """
import everstep.train as es
import torch


def train_fn(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with es.protect(model=model, optimizer=optimizer) as state:
        while state.step_number < config["steps"]:
            if state.step_number == config["raises"]:
                raise LookupError("sample 3")
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)
            if state.step_number == 2:
                REPORT({"extra": 5.0}, None)
"""


def test_a_protected_function_continues_from_its_own_state(
    storage: Storage, ray_context: RayContext, shared_memory: Path
) -> None:
    """The run is not told that it begins anew, which would void the state: only where the state
    continues. A report beside it adds to its step."""
    digest = CodeStore(storage).put(tar_gz({"own_protected.py": PROTECTED})).digest

    def attempt(number: int, raises: int | None) -> WorkerContext:
        config = {"steps": 8, "raises": raises}
        code = {"archive": digest, "train_fn": "own_protected:train_fn", "config": config}
        spec = RunSpec.model_validate({"name": "own", "code": code})
        return one_rank(spec, RunDir(storage, "run_protected"), attempt=number)

    first, second = attempt(1, raises=5), attempt(2, raises=None)
    with pytest.raises(StepFailed) as caught:
        own_function.train(first)
    error = caught.value.error
    assert (error.kind, error.step, error.snapshot_step) == (ErrorKind.USER, 5, 5)
    assert "LookupError" in error.summary and caught.value.snapshot_problem is None
    assert own_function.train(second) is None
    [begun], [resumed] = (journal_of(each).of_kind(EventKind.RESTORED) for each in (first, second))
    assert (begun["source"], begun["step"]) == ("fresh", 0)
    assert (resumed["source"], resumed["step"]) == ("snapshot", 5)
    points = [*journal_of(first).points, *journal_of(second).points]
    assert sorted({point["step"] for point in points}) == list(range(1, 9))
    assert [point["step"] for point in points if "extra" in point["values"]] == [2]
    assert ray_context.reported[0][0]["everstep_step"] == 2
