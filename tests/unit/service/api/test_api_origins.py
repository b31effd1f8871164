"""``resume_from`` over HTTP: made exact, refused by field, and its checkpoint held until the new
run has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.wire.events import EventKind
from service.storage_identity import KeptSteps
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal, spec
from tests.unit.service.api.test_api_checkpoints import save


async def parent_run(api: ApiService, **fields: Any) -> tuple[str, Journal]:
    """A run of 30 steps in 3 epochs, with checkpoints of steps 10, 20 and 25; the best is that of
    20."""
    fields = {"checkpoint": {"best_metric": "accuracy"}, "train": {"epochs": 3}} | fields
    run_id, journal = await api.running(**fields)
    for step, accuracy in ((10, 0.8), (20, 0.9), (25, 0.7)):
        save(api, run_id, journal, step, accuracy=accuracy)
    return run_id, journal


def fork(run_id: str, step: int | str | None = 20, **fields: Any) -> dict[str, Any]:
    origin = {"run_id": run_id} | ({} if step is None else {"step": step})
    return spec(**{"resume_from": origin, "train": {"epochs": 3}} | fields)


async def faults(api: ApiService, body: dict[str, Any]) -> dict[str, str]:
    answer = await api.http.post("/v1/runs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), answer.text
    return {".".join(map(str, error["loc"])): error["msg"] for error in answer.json()["errors"]}


@pytest.mark.parametrize(("which", "step"), [(10, 10), ("best", 20), ("latest", 25), (None, 25)])
async def test_a_fork_says_exactly_where_it_begins(
    api: ApiService, which: int | str | None, step: int
) -> None:
    run_id, _ = await parent_run(api)
    answer = await api.http.post("/v1/runs", json=fork(run_id, which))
    assert answer.status_code == 201, answer.text
    assert answer.json()["forked_from"] == {"run_id": run_id, "step": step}
    assert (await api.get(f"/v1/runs/{answer.json()['id']}/spec"))["resume_from"] == {
        "run_id": run_id,
        "step": step,
    }
    assert (await api.get(f"/v1/runs/{run_id}"))["forked_from"] is None


async def test_what_is_not_there_is_named_by_its_field(api: ApiService, tmp_path: Path) -> None:
    run_id, journal = await parent_run(api)
    other, _ = await parent_run(api, project="other")
    empty = await api.create()
    assert "does not exist" in (await faults(api, fork("run_nobody")))["resume_from.run_id"]
    assert (
        "does not exist in project 'default'"
        in (await faults(api, fork(other)))["resume_from.run_id"]
    )
    assert (
        "no checkpoint of step 11; choose one of steps 10, 20, 25"
        in (await faults(api, fork(run_id, 11)))["resume_from.step"]
    )
    assert (
        "no committed checkpoint yet; the run has no checkpoint to start from"
        in (await faults(api, fork(empty, "latest")))["resume_from.step"]
    )
    assert "checkpoint.best_metric" in (await faults(api, fork(empty, "best")))["resume_from.step"]
    api.apply(
        run_id,
        [journal.event(EventKind.CHECKPOINT_DELETED, step=10, name="step-000000010.s001.a001")],
    )
    assert (
        "deleted by retention; choose one of steps 20, 25"
        in (await faults(api, fork(run_id, 10)))["resume_from.step"]
    )
    path = tmp_path / "storage" / "runs" / run_id / "checkpoints" / "step-000000020.s001.a001"
    (path / "model.pt").write_bytes(b"short")
    await api.http.post(f"/v1/runs/{run_id}/checkpoints/20/verify")
    assert "is corrupt" in (await faults(api, fork(run_id, 20)))["resume_from.step"]
    # and the journal has not told yet
    api.storage.files.delete_dir(f"runs/{run_id}/checkpoints/step-000000025.s001.a001")
    assert "just deleted" in (await faults(api, fork(run_id, 25)))["resume_from.step"]


async def test_another_project_s_token_learns_nothing(api: ApiService) -> None:
    run_id, _ = await parent_run(api)
    stranger = await api.client(api.token("submitter", "other"))
    answer = await stranger.post("/v1/runs", json=fork(run_id, project="other"))
    assert answer.status_code == 422
    assert answer.json()["errors"] == [
        {"loc": ["resume_from", "run_id"], "msg": f"run {run_id} does not exist in project 'other'"}
    ]


async def test_what_must_be_the_same_and_what_would_be_over_at_once(api: ApiService) -> None:
    run_id, _ = await parent_run(api)
    body = fork(
        run_id, train={"epochs": 2, "seed": 7, "global_batch_size": 64}, optimizer={"name": "sgd"}
    )
    found = await faults(api, body)
    assert set(found) == {"train.seed", "train.global_batch_size", "optimizer.name", "train.epochs"}
    assert found["train.seed"].startswith(f"must be 0, as in run {run_id}")
    assert "ends the run at step 20" in found["train.epochs"]
    grouped = fork(
        run_id,
        train={"epochs": 3},
        optimizer={"name": "adamw", "groups": [{"parameters": "blocks.0.*"}]},
    )
    assert (await faults(api, grouped))["optimizer.groups"].startswith("must list []")
    assert "train.max_steps" in await faults(
        api, fork(run_id, 20, train={"epochs": 3, "max_steps": 15})
    )
    longer = fork(
        run_id,
        25,
        train={"epochs": 9},
        optimizer={"name": "adamw", "lr": 0.1},
        scaling={"max_workers": 4},
    )
    assert (await api.http.post("/v1/runs", json=longer)).status_code == 201


async def test_the_same_request_again_is_the_same_run_also_when_its_origin_is_gone(
    api: ApiService,
) -> None:
    run_id, journal = await parent_run(api)
    headers = {"Idempotency-Key": "once"}
    first = await api.http.post("/v1/runs", json=fork(run_id, "latest"), headers=headers)
    save(api, run_id, journal, 28)
    again = await api.http.post("/v1/runs", json=fork(run_id, "latest"), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert again.json()["forked_from"]["step"] == 25


async def test_the_checkpoint_is_held_until_the_fork_has_its_own(api: ApiService) -> None:
    run_id, journal = await parent_run(api)
    child = (await api.http.post("/v1/runs", json=fork(run_id, 10))).json()["id"]
    run_dir, kept = RunDir(api.storage, run_id), KeptSteps(api.storage, api.runs.checkpoints)
    assert [name[5:14] for name in CheckpointStore(run_dir).retain(1, None)] == ["000000020"]
    kept.publish()
    assert run_dir.kept().steps == {10}
    run_dir.files.delete_dir(run_dir.holds_path())
    assert CheckpointStore(run_dir).retain(1, None) == []
    api.apply(
        run_id, [journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=30)]
    )
    refused = await api.http.delete(f"/v1/runs/{run_id}")
    assert (refused.status_code, refused.json()["code"]) == (409, "invalid_transition")
    api.runs.claim_submission(child, 0)
    own = Journal(at=api.clock.now)
    api.apply(
        child,
        [
            *own.start(10, source="fork", checkpoint=f"{run_id}/step-000000010.s001.a001"),
            own.steps(11),
            own.checkpoint(10),
        ],
    )
    assert (await api.http.delete(f"/v1/runs/{run_id}")).status_code == 204


async def test_a_service_that_starts_lets_go_of_what_nobody_waits_for(api: ApiService) -> None:
    run_id, _ = await parent_run(api)
    RunDir(api.storage, run_id).keep_steps({10, 20})  # for a request that was never recorded
    KeptSteps(api.storage, api.runs.checkpoints).publish()
    assert RunDir(api.storage, run_id).kept().steps == frozenset()


async def test_a_fork_s_account_says_where_it_begins(api: ApiService) -> None:
    run_id, _ = await parent_run(api)
    child = (await api.http.post("/v1/runs", json=fork(run_id, 20))).json()["id"]
    assert (await api.get(f"/v1/runs/{child}"))["protection"]["worst_case_steps_lost"] == 0
    api.runs.claim_submission(child, 0)
    own = Journal(at=api.clock.now)
    origin = {
        "run_id": run_id,
        "checkpoint": "step-000000020.s001.a001",
        "step": 20,
        "epoch": 2,
        "samples": 0,
        "digest": "ab",
    }
    name = f"{run_id}/step-000000020.s001.a001"
    api.apply(
        child, [*own.start(20, source="fork", checkpoint=name, origin=origin), own.steps(21, 22)]
    )
    run = await api.get(f"/v1/runs/{child}")
    assert (run["step"], run["steps_lost"], run["protection"]["worst_case_steps_lost"]) == (
        22,
        0,
        2,
    )
    assert (await api.get(f"/v1/runs/{child}/samples"))["origin"] == origin
    [attempt] = (await api.get(f"/v1/runs/{child}/attempts"))["items"]
    assert (attempt["restored_from"], attempt["first_step"]) == (name, 20)
