"""Runs in MLflow, against a server that keeps what MLflow's REST interface would: each point once,
whatever died."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.parsing import parse_spec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.api_service import spec
from tests.support.scripted_http import Answer, Request, ScriptedServer, scripted
from tests.unit.train_fn.journal.test_tensorboard import Submission
from train_fn.journal.follower import NotNow
from train_fn.journal.mlflow import MlflowTracking


class Mlflow:
    """A tracking server, as far as runs are kept in it; ``fail`` requests are answered 503
    first."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.fail: list[str] = []

    def answer(self, request: Request) -> Answer:
        path, _, query = request.path.removeprefix("/api/2.0/mlflow/").partition("?")
        if path in self.fail:
            self.fail.remove(path)
            return lambda handler: handler.send(503, b"{}")
        status, body = self._do(path, query.rpartition("=")[2], json.loads(request.body or b"{}"))
        return lambda handler: handler.send(
            status, json.dumps(body).encode(), Content_Type="application/json"
        )

    def _do(self, path: str, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match path:
            case "experiments/get-by-name" if name in self.experiments:
                return 200, {"experiment": {"experiment_id": self.experiments[name]}}
            case "experiments/get-by-name":
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}
            case "experiments/create":
                self.experiments[body["name"]] = "7"
                return 200, {"experiment_id": "7"}
            case "runs/search":
                return 200, {
                    "runs": [
                        run
                        for run in self.runs.values()
                        if str(run["tags"]["everstep.run_id"]) in body["filter"]
                    ]
                }
            case "runs/create":
                tags = {tag["key"]: tag["value"] for tag in body["tags"]}
                self.runs["m1"] = {
                    "info": {"run_id": "m1", "name": body["run_name"]},
                    "data": {"metrics": []},
                    "tags": tags,
                }
                self.runs["m1"]["params"] = {}
                return 200, {"run": self.runs["m1"]}
            case "runs/log-batch":
                run = self.runs[body["run_id"]]
                run["data"]["metrics"] += body.get("metrics", ())
                run["params"] |= {param["key"]: param["value"] for param in body.get("params", ())}
                assert len(body.get("metrics", ())) <= 1000 and len(body.get("params", ())) <= 100
            case "runs/set-tag":
                self.runs[body["run_id"]]["tags"][body["key"]] = body["value"]
            case "runs/update":
                self.runs[body["run_id"]]["info"] |= body
            case _:
                return 404, {}
        return 200, {}


@pytest.fixture
def mlflow() -> Mlflow:
    return Mlflow()


@pytest.fixture
def server(mlflow: Mlflow) -> Iterator[ScriptedServer]:
    with scripted() as running:
        running.answer = mlflow.answer  # type: ignore[method-assign]
        yield running


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(open_storage(str(tmp_path)), "run_m")
    found.write_spec(parse_spec(spec(tags={"team": "vision"})))
    return found


def test_a_run_is_there_once_with_every_point_whatever_died(
    mlflow: Mlflow, server: ScriptedServer, run_dir: RunDir
) -> None:
    first = Submission(run_dir, 1)
    first.tell(EventKind.SUBMISSION_STARTED)
    first.steps(*range(1, 700))
    follower = MlflowTracking(run_dir, 1, server.url, {"MLFLOW_TRACKING_TOKEN": "s3cret"})
    mlflow.fail = ["runs/create", "runs/log-batch", "runs/update"]
    for _ in range(3):
        with pytest.raises(NotNow):
            follower.update()
    follower.update()
    first.tell(
        EventKind.FAILURE,
        verdict="worker_lost",
        first_rank=1,
        node_id="n",
        step=699,
        exception=None,
    )
    first.steps(699, 700)  # the first of them is done again; then driver and follower died
    second = Submission(run_dir, 2)
    second.tell(EventKind.SUBMISSION_STARTED)
    second.steps(700, 701)
    second.tell(EventKind.EVALUATED, step=701, epoch=0, metrics={"accuracy": 0.5})
    second.tell(EventKind.FINISHED, outcome="succeeded", reason=None, step=701)
    MlflowTracking(run_dir, 2, server.url, {}).update()
    assert server.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert list(mlflow.runs) == ["m1"] and mlflow.experiments == {"default": "7"}
    run = mlflow.runs["m1"]
    assert (run["info"]["name"], run["info"]["status"], run["tags"]["team"]) == (
        "digits",
        "FINISHED",
        "vision",
    )
    assert [value for key, value in run["tags"].items() if key.startswith("everstep.failure")] == [
        "step 699: worker_lost of rank 1"
    ]
    assert run["params"]["task.model.name"] == '"mini_resnet"' and "secrets" not in run["params"]
    points = Counter((each["key"], each["step"]) for each in run["data"]["metrics"])
    assert set(points) == {(key, step) for key in ("loss", "lr") for step in range(1, 702)} | {
        ("val_accuracy", 701)
    }
    twice = [point for point, times in points.items() if times > 1]
    assert twice == [], "and what was not finite is left out"
