"""Sweeps over HTTP: what a request may ask for, and who sees and changes what it made."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from everstep.spec import overrides
from everstep.spec.sweep import SweepSpec
from everstep.spec.trials import trials_of
from everstep.wire.team import Quotas
from tests.support.api_service import ApiService, spec
from tests.support.sweep_runs import advance, create_sweep, sweep_body


async def faults(api: ApiService, **fields: Any) -> dict[str, str]:
    """The faults of a sweep that is refused, by place; nothing may have been recorded."""
    answer = await api.http.post("/v1/sweeps", json=sweep_body(**fields))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), answer.text
    assert (await api.get("/v1/sweeps"))["items"] == []
    return {".".join(map(str, each["loc"])): each["msg"] for each in answer.json()["errors"]}


async def test_a_sweep_is_recorded_with_its_runs_and_shown(api: ApiService) -> None:
    random = {"optimizer.weight_decay": {"name": "log", "low": 1e-4, "high": 0.1}}
    made = await create_sweep(api, random=random, max_runs=3, name="lr", max_parallel=2)
    assert (made["name"], made["status"], made["mode"]) == ("lr", "RUNNING", "max")
    assert made["progress"] | {"total": 3, "waiting": 3, "active": 0} == made["progress"]
    assert made["best"] is None and made["reason"] is None and made["seed"] is not None
    assert await api.get(f"/v1/sweeps/{made['id']}") == made
    assert (await api.get("/v1/sweeps"))["items"] == [made]
    page = await api.get(f"/v1/sweeps/{made['id']}/runs?limit=2")
    rest = await api.get(f"/v1/sweeps/{made['id']}/runs?cursor={page['next_cursor']}")
    runs = page["items"] + rest["items"]
    assert [run["number"] for run in runs] == [0, 1, 2] and rest["next_cursor"] is None
    assert [run["params"]["optimizer.lr"] for run in runs] == [0.1, 0.2, 0.1]
    drawn = [run["params"]["optimizer.weight_decay"] for run in runs]
    assert len(set(drawn)) == 3 and all(1e-4 <= value <= 0.1 for value in drawn)
    recorded = await api.get(f"/v1/sweeps/{made['id']}/spec")
    again = (await api.http.post("/v1/sweeps", json=recorded)).json()
    repeated = await api.get(f"/v1/sweeps/{again['id']}/runs")
    assert [run["params"] for run in repeated["items"]] == [run["params"] for run in runs]


async def test_every_run_is_checked_before_the_first_and_the_value_is_named(
    api: ApiService,
) -> None:
    found = await faults(api, grid={"optimizer.lr": [0.1, -1], "train.epochs": [1, "two"]})
    assert (
        "-1: " in found["grid.optimizer.lr.1"] and "greater than 0" in found["grid.optimizer.lr.1"]
    )
    assert '"two": ' in found["grid.train.epochs.1"] and len(found) == 2
    found = await faults(api, grid={"optimizer.rate": [0.1]})
    assert "has no field 'rate'" in found["grid.optimizer.rate.0"]
    found = await faults(api, grid={"train.global_batch_size": [16, 128]}, spec=_micro_64())
    assert "(run 0: train.global_batch_size=16)" in found["spec.train.micro_batch_size"]
    found = await faults(api, spec={"name": "a"})
    assert list(found) == ["spec.task"], "a fault of all runs is said once"


def _micro_64() -> dict[str, Any]:
    return spec(train={"micro_batch_size": 64})


async def test_many_runs_of_a_long_spec_are_refused_before_they_are_validated(
    api: ApiService,
) -> None:
    long = spec(code={"task": "a:b", "args": {f"k{number}": number for number in range(10_000)}})
    random = {"code.args.k0": {"name": "int", "low": 0, "high": 9}}
    began = time.monotonic()
    found = await faults(api, spec=long, grid={}, random=random, max_runs=500)
    assert "for each of 500 runs" in found["spec"] and "submit fewer runs" in found["spec"]
    assert time.monotonic() - began < 5


def test_a_run_of_a_sweep_copies_its_spec_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {f"k{number}": number for number in range(100)}
    code = {"task": "a:b", "archive": f"sha256:{'0' * 64}", "args": args}
    random = {f"code.args.k{n}": {"name": "int", "low": 0, "high": 9} for n in range(50)}
    body = {"spec": {"name": "a", "code": code}, "metric": "loss", "random": random}
    sweep = SweepSpec.model_validate({**body, "max_runs": 3})
    copied: list[object] = []
    copy_of = copy.deepcopy
    monkeypatch.setattr(
        overrides.copy, "deepcopy", lambda each: (copied.append(each), copy_of(each))[1]
    )
    assert len(trials_of(sweep)) == 3
    assert sum(isinstance(each, dict) for each in copied) == 3


async def test_what_the_service_does_not_allow_is_found_too(api: ApiService) -> None:
    place = {"run_id": "run_000000000000", "step": "latest"}
    found = await faults(api, spec=spec(resume_from=place))
    assert "does not exist in project" in found["spec.resume_from.run_id"]
    found = await faults(api, grid={"notify.url": ["https://nowhere.example/x"]})
    assert "(run 0: notify.url=https://nowhere.example/x)" in found["spec.notify.url"]


@pytest.mark.parametrize(
    ("fields", "place", "says"),
    [
        ({"grid": {}}, "", "set grid, random, or both"),
        ({"random": {"train.seed": {"name": "int", "low": 0, "high": 9}}}, "", "max_runs"),
        ({"max_runs": 1}, "", "raise max_runs"),
        ({"grid": {"name": ["a"]}}, "grid", "name cannot vary"),
        ({"grid": {"train.seed": [1, 1]}}, "grid", "twice"),
        ({"grid": {"optimizer": [1], "optimizer.lr": [1]}}, "", "by optimizer too"),
        ({"scheduler": {"name": "pbt"}}, "scheduler.name", "not known"),
        ({"max_paralel": 1}, "max_paralel", "did you mean 'max_parallel'"),
    ],
)
async def test_a_sweep_that_makes_no_sense_says_what_to_do(
    api: ApiService, fields: dict[str, Any], place: str, says: str
) -> None:
    found = await faults(api, **fields)
    assert says in found[place]


async def test_the_same_key_makes_one_sweep(api: ApiService) -> None:
    headers = {"Idempotency-Key": "once"}
    made = await api.http.post("/v1/sweeps", json=sweep_body(), headers=headers)
    again = await api.http.post("/v1/sweeps", json=sweep_body(), headers=headers)
    assert (made.status_code, again.status_code) == (201, 200)
    assert made.json()["id"] == again.json()["id"]
    other = await api.http.post("/v1/sweeps", json=sweep_body(max_runs=5), headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")


async def test_runs_say_their_sweep_and_a_quota_holds_the_rest_back(api: ApiService) -> None:
    api.context.projects.put("default", Quotas(max_queued=1))
    made = await create_sweep(api)
    advance(api)
    shown = await api.get(f"/v1/sweeps/{made['id']}")
    assert (shown["progress"]["active"], shown["progress"]["waiting"]) == (1, 1)
    assert shown["reason"]["code"] == "waiting_for_quota" and "max_queued" in str(shown["reason"])
    [run] = (await api.get("/v1/runs"))["items"]
    assert (run["name"], run["sweep_id"]) == ("digits-000", made["id"])
    [created, *_] = (await api.get(f"/v1/runs/{run['id']}/events"))["items"]
    assert created["data"]["sweep_id"] == made["id"]
    assert (await api.get(f"/v1/runs/{run['id']}/spec"))["optimizer"]["lr"] == 0.1
    api.context.projects.put("default", Quotas())
    advance(api)
    shown = await api.get(f"/v1/sweeps/{made['id']}")
    assert shown["progress"]["active"] == 2 and shown["reason"] is None
    advance(api)
    assert len((await api.get("/v1/runs"))["items"]) == 2, "nothing is submitted twice"


async def test_cancelling_ends_the_runs_and_submits_no_more(api: ApiService) -> None:
    made = await create_sweep(api, max_parallel=1)
    advance(api)
    answer = await api.http.post(f"/v1/sweeps/{made['id']}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "STOPPING")
    assert (await api.http.post(f"/v1/sweeps/{made['id']}/cancel")).status_code == 202
    refused = await api.http.delete(f"/v1/sweeps/{made['id']}")
    assert (refused.status_code, refused.json()["code"]) == (409, "invalid_transition")
    advance(api)
    advance(api)
    shown = await api.get(f"/v1/sweeps/{made['id']}")
    assert (shown["status"], shown["reason"]["code"]) == ("CANCELLED", "cancelled_by_user")
    [run] = (await api.get("/v1/runs"))["items"]
    assert (run["status"], run["reason"]["code"]) == ("CANCELLED", "cancelled_by_sweep")
    again = await api.http.post(f"/v1/sweeps/{made['id']}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "invalid_transition")
    assert (await api.http.delete("/v1/projects/default")).status_code == 409
    assert (await api.http.delete(f"/v1/sweeps/{made['id']}?runs=true")).status_code == 204
    assert (await api.get("/v1/runs"))["items"] == []
    assert (await api.http.get(f"/v1/sweeps/{made['id']}")).status_code == 404


async def test_a_deleted_sweep_leaves_its_runs(api: ApiService) -> None:
    made = await create_sweep(api)
    await api.http.post(f"/v1/sweeps/{made['id']}/cancel")
    advance(api)
    assert (await api.http.delete(f"/v1/sweeps/{made['id']}")).status_code == 204
    made = await create_sweep(api)
    advance(api)
    for run in (await api.get("/v1/runs"))["items"]:
        await api.http.post(f"/v1/runs/{run['id']}/cancel")
    advance(api)
    shown = await api.get(f"/v1/sweeps/{made['id']}")
    assert (shown["status"], shown["reason"]["code"]) == ("CANCELLED", "runs_cancelled")
    assert (await api.http.delete(f"/v1/sweeps/{made['id']}")).status_code == 204
    assert len((await api.get("/v1/runs"))["items"]) == 2


async def test_another_project_sees_and_changes_nothing(api: ApiService) -> None:
    made = await create_sweep(api)
    stranger = await api.client(api.token("submitter", "elsewhere"))
    for path in ("", "/spec", "/runs"):
        assert (await stranger.get(f"/v1/sweeps/{made['id']}{path}")).status_code == 404
    assert (await stranger.get("/v1/sweeps")).json()["items"] == []
    assert (await stranger.get("/v1/sweeps?project=default")).json()["items"] == []
    answer = await stranger.post("/v1/sweeps", json=sweep_body())
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_sweeps_are_listed_newest_first_by_page_and_status(api: ApiService) -> None:
    made = []
    for number in range(3):
        api.clock.now += 1
        made.append((await create_sweep(api, name=f"s{number}"))["id"])
    await api.http.post(f"/v1/sweeps/{made[0]}/cancel")
    first = await api.get("/v1/sweeps?limit=2")
    rest = await api.get(f"/v1/sweeps?limit=2&cursor={first['next_cursor']}")
    assert [each["id"] for each in first["items"] + rest["items"]] == made[::-1]
    assert [each["id"] for each in (await api.get("/v1/sweeps?status=STOPPING"))["items"]] == made[
        :1
    ]
    several = await api.get("/v1/sweeps?status=stopping,running&status=FAILED")
    assert len(several["items"]) == 3, "in the forms that lists of runs take"
    answer = await api.http.get("/v1/sweeps?status=PAUSED")
    assert answer.status_code == 422 and "the statuses are RUNNING" in answer.text
    assert (await api.http.get("/v1/sweeps?cursor=xyz")).status_code == 422


async def test_a_check_records_nothing_and_names_what_a_submission_would(api: ApiService) -> None:
    random = {"optimizer.lr": {"name": "log", "low": 1e-4, "high": 0.1}}
    body = sweep_body(grid={}, random=random, max_runs=3, spec=spec(project="fresh"))
    refused = await api.http.post("/v1/sweeps/validate", json=body)
    assert refused.status_code == 422 and "project" in refused.json()["errors"][0]["loc"]
    answer = await api.http.post("/v1/sweeps/validate?create_project=true", json=body)
    assert answer.status_code == 200 and answer.json()["seed"] is not None, answer.text
    assert (await api.get("/v1/sweeps"))["items"] == []
    assert "fresh" not in {each["name"] for each in (await api.get("/v1/projects"))["items"]}
    made = await create_sweep(api, **(answer.json() | {"spec": spec()}))
    runs = (await api.get(f"/v1/sweeps/{made['id']}/runs"))["items"]
    trials = trials_of(SweepSpec.model_validate(answer.json()))
    assert [run["params"] for run in runs] == [dict(trial.params) for trial in trials]


async def test_a_checkpoint_is_kept_for_runs_that_a_sweep_will_submit(api: ApiService) -> None:
    parent, journal = await api.running(train={"epochs": 3})
    api.apply(parent, [journal.checkpoint(10)])
    assert api.context.runs.checkpoints.awaited() == {}
    place = {"run_id": parent, "step": 10}
    held: list[int] = []
    looked: list[str] = []
    of_kinds = api.context.events.of_kinds
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(  # no files lie there
            "service.runs.origins._hold", lambda *given: held.append(given[3].step)
        )
        patched.setattr(
            api.context.events,
            "of_kinds",
            lambda *given: (looked.append(given[0]), of_kinds(*given))[1],
        )
        made = await create_sweep(api, spec=spec(train={"epochs": 9}, resume_from=place))
    assert (held, looked) == ([10], [parent]), "once for all runs"
    assert api.context.runs.checkpoints.awaited() == {parent: frozenset({10})}
    await api.http.post(f"/v1/sweeps/{made['id']}/cancel")
    advance(api)
    assert api.context.runs.checkpoints.awaited() == {}
