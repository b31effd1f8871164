"""Record a run in the operator's MLflow tracking server, from its journals, while it trains.

This uses MLflow's REST API (2.0) directly, so that MLflow need not be installed on the cluster.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from everstep.spec.run_spec import RunSpec
from everstep.text import failure as failure_words
from everstep.wire import Failure
from everstep.wire.events import EventKind
from storage.logs.journal import JournalEvent
from storage.run_dir import RunDir
from train_fn.journal.follower import JournalFollower, NotNow, measured

RUN_TAG = "everstep.run_id"
_TIMEOUT_S = 20.0
_MOST_METRICS = 1000
"""MLflow's limits for one request: metrics, and parameters."""
_MOST_PARAMS = 100
_MOST_CHARS = 500
"""Limit of older versions of MLflow for the value of a parameter."""
_NAME = re.compile(r"[^\w\-. :/]")
_STATUSES = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowTracking(JournalFollower):
    """Keep an MLflow run up to date with the journals, in the experiment of the run's project.

    Each point is sent once. Points that an earlier driver has sent are not sent again.
    """

    def __init__(
        self, run_dir: RunDir, submission: int, uri: str, environ: Mapping[str, str]
    ) -> None:
        """
        Args:
            run_dir: The run.
            submission: The submission of this driver.
            uri: Base URL of the tracking server.
            environ: Environment with MLflow's MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD.
        """
        super().__init__(run_dir, submission, "mlflow")
        user, token = environ.get("MLFLOW_TRACKING_USERNAME"), environ.get("MLFLOW_TRACKING_TOKEN")
        self._connect = partial(
            httpx.Client,
            base_url=f"{uri.rstrip('/')}/api/2.0/mlflow/",
            timeout=_TIMEOUT_S,
            auth=(user, environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None,
            headers={"Authorization": f"Bearer {token}"} if token and not user else None,
        )
        self._http: httpx.Client
        self._mlflow_run: str | None = None
        self._furthest: dict[str, int] = {}
        """The last step that MLflow has of each metric."""

    def take(self, submission: int, events: Sequence[JournalEvent]) -> None:
        if not events:
            return
        try:
            with self._connect() as self._http:
                if self._mlflow_run is None:
                    self._mlflow_run = self._opened(events[0].at)
                self._log_metrics(point for event in events for point in _points(event))
                for event in events:
                    self._log_event(event)
        except httpx.HTTPError as exc:
            raise NotNow(f"{type(exc).__name__}: {exc}") from exc

    def _opened(self, started_at: float) -> str:
        """Return the id of MLflow's run, after its parameters were sent. Sending them again changes
        nothing."""
        spec = self._run_dir.read_spec()
        found = self._found_or_made(spec, started_at)
        shown = spec.model_dump(mode="json", exclude={"name", "project", "tags", "secrets", "env"})
        for params in _cut(_params(shown), _MOST_PARAMS):
            self._post("runs/log-batch", {"run_id": found, "params": params})
        return found

    def _found_or_made(self, spec: RunSpec, started_at: float) -> str:
        experiment = self._experiment(spec.project)
        wanted = {
            "experiment_ids": [experiment],
            "filter": f"tags.`{RUN_TAG}` = '{self._run_dir.run_id}'",
            "max_results": 1,
        }
        for run in self._post("runs/search", wanted).get("runs") or ():
            self._furthest = {
                each["key"]: int(each.get("step") or 0)
                for each in run.get("data", {}).get("metrics") or ()
            }
            return str(run["info"]["run_id"])
        tags = [
            {"key": RUN_TAG, "value": self._run_dir.run_id},
            *({"key": key, "value": spec.tags[key]} for key in spec.tags),
        ]
        body = {
            "experiment_id": experiment,
            "run_name": spec.name,
            "start_time": int(started_at * 1000),
            "tags": tags,
        }
        return str(self._post("runs/create", body)["run"]["info"]["run_id"])

    def _experiment(self, name: str) -> str:
        answer = self._http.get("experiments/get-by-name", params={"experiment_name": name})
        if answer.status_code == httpx.codes.NOT_FOUND:
            return str(self._post("experiments/create", {"name": name})["experiment_id"])
        return str(answer.raise_for_status().json()["experiment"]["experiment_id"])

    def _log_metrics(self, points: Iterable[dict[str, Any]]) -> None:
        fresh = (point for point in points if point["step"] > self._furthest.get(point["key"], -1))
        for batch in _cut(fresh, _MOST_METRICS):
            self._post("runs/log-batch", {"run_id": self._mlflow_run, "metrics": batch})
            for point in batch:
                self._furthest[point["key"]] = max(
                    self._furthest.get(point["key"], -1), point["step"]
                )

    def _log_event(self, event: JournalEvent) -> None:
        """Record a failure as a tag, and the start or end of the run as its status."""
        if event.kind is EventKind.FAILURE:
            failure = Failure.of(event)
            words = f"step {failure.step}: {failure_words.who(failure)}"
            self._post(
                "runs/set-tag",
                {
                    "run_id": self._mlflow_run,
                    "key": f"everstep.failure.{event.submission}-{event.n}",
                    "value": words,
                },
            )
        elif event.kind is EventKind.SUBMISSION_STARTED:
            self._post("runs/update", {"run_id": self._mlflow_run, "status": "RUNNING"})
        elif event.kind is EventKind.FINISHED:
            status = _STATUSES.get(str(event.data.get("outcome")), "KILLED")
            self._post(
                "runs/update",
                {"run_id": self._mlflow_run, "status": status, "end_time": int(event.at * 1000)},
            )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(path, json=body).raise_for_status().json()
        return answer


def _points(event: JournalEvent) -> Iterator[dict[str, Any]]:
    """Yield the finite metrics of an event in MLflow's form."""
    for step, at, values in measured(event):
        for name, value in values.items():
            yield {
                "key": _NAME.sub("_", name),
                "value": value,
                "timestamp": int(at * 1000),
                "step": step,
            }


def _params(value: Any, path: str = "") -> Iterator[dict[str, str]]:
    """Yield every leaf of the spec, with its path as the name."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _params(item, f"{path}.{name}" if path else name)
    else:
        yield {"key": _NAME.sub("_", path), "value": json.dumps(value)[:_MOST_CHARS]}


def _cut(items: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(items)
    while batch := list(itertools.islice(remaining, size)):
        yield batch
