"""`everstep sweep` and `client.sweeps`, against the service's real API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from everstep import Client, Conflict, InvalidSpec, NotFound, SweepFailed, UsageError
from everstep.cli.local import grid_of, random_of
from tests.support.api_service import ApiService, spec
from tests.support.command_line import everstep
from tests.support.sweep_runs import advance, train


async def test_a_sweep_is_submitted_shown_and_its_best_run_named(
    api: ApiService, spec_file: Path
) -> None:
    given = ["--grid", "optimizer.lr=1e-3,3e-3", "--metric", "val_accuracy", "--max-parallel", 2]
    made = await everstep("sweep", spec_file, *given, "--set", "train.epochs=3")
    sweep_id = made.stdout.strip()
    assert made.exit_code == 0 and sweep_id.startswith("sweep_") and "2 runs" in made.stderr
    advance(api)
    runs = (await api.get(f"/v1/sweeps/{sweep_id}/runs"))["items"]
    for run, accuracy in zip(runs, (0.5, 0.75), strict=True):
        train(api, run["run_id"], accuracy)
    advance(api)
    shown = await everstep("sweep", "show", sweep_id)
    assert "SUCCEEDED" in shown.stdout and "2 succeeded" in shown.stdout
    assert f"0.75 at step 30 by {runs[1]['run_id']}: optimizer.lr=0.003" in shown.stdout
    rows = [line for line in shown.stdout.splitlines() if "optimizer.lr=0.00" in line][1:]
    assert [runs[1]["run_id"] in rows[0], runs[0]["run_id"] in rows[1]] == [True, True]
    as_json = json.loads((await everstep("sweep", "show", sweep_id, "--json")).stdout)
    assert as_json["best"]["value"] == 0.75 and len(as_json["runs"]) == 2
    listed = await everstep("sweeps")
    assert sweep_id in listed.stdout and "2/2" in listed.stdout and "0.75" in listed.stdout
    watched = await everstep("sweep", "watch", sweep_id)
    assert watched.exit_code == 0 and watched.stdout.startswith("SUCCEEDED: 2 succeeded")
    assert (await everstep("sweep", "cancel", sweep_id)).exit_code == 2
    assert "add --yes" in (await everstep("sweep", "delete", sweep_id)).stderr
    deleted = await everstep("sweep", "delete", sweep_id, "--runs", "--yes")
    assert deleted.exit_code == 0 and (await api.get("/v1/runs"))["items"] == []


async def test_a_dry_run_shows_the_runs_of_a_sweep_and_submits_nothing(
    api: ApiService, spec_file: Path
) -> None:
    given = [spec_file, "--metric", "loss", "--random", "optimizer.lr=log:1e-4..1e-1"]
    checked = await everstep("sweep", *given, "--max-runs", 2, "--dry-run")
    assert checked.exit_code == 0 and "2 runs; nothing was submitted" in checked.stderr
    seed = checked.stderr.partition("--seed ")[2].split()[0]
    shown = [line.split()[-1] for line in checked.stdout.splitlines() if "optimizer.lr=" in line]
    assert len(shown) == 2 and (await api.get("/v1/sweeps"))["items"] == []
    made = await everstep("sweep", *given, "--max-runs", 2, "--seed", seed)
    runs = (await api.get(f"/v1/sweeps/{made.stdout.strip()}/runs"))["items"]
    assert [f"optimizer.lr={run['params']['optimizer.lr']:g}" for run in runs] == shown
    as_json = json.loads(
        (await everstep("sweep", *given, "--max-runs", 2, "--dry-run", "--json")).stdout
    )
    assert len(as_json["runs"]) == 2 and as_json["mode"] == "min"
    wrong = await everstep(
        "sweep", spec_file, "--metric", "loss", "--grid", "optimizer.lr=-1", "--dry-run"
    )
    assert wrong.exit_code == 2 and "grid.optimizer.lr.0: -1" in wrong.stderr


async def test_watching_a_sweep_that_is_cancelled_exits_with_1(
    api: ApiService, spec_file: Path
) -> None:
    given = ["--grid", "train.seed=1,2", "--metric", "loss", "-w"]
    watching = asyncio.create_task(everstep("sweep", spec_file, *given))
    async with asyncio.timeout(60):
        while not (items := (await api.get("/v1/sweeps"))["items"]):  # noqa: ASYNC110  it comes from another thread
            await asyncio.sleep(0.01)
    assert (await everstep("sweep", "cancel", items[0]["id"])).stdout.endswith("is STOPPING\n")
    advance(api)
    result = await asyncio.wait_for(watching, 60)
    assert result.exit_code == 1 and "CANCELLED: 2 waiting" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--grid", "optimizer.lr=1"], "--metric is required"),
        (["--metric", "loss"], "set grid, random, or both"),
        (["--metric", "loss", "--grid", "optimizer.lr"], "is not FIELD=VALUES"),
        (["--metric", "loss", "--grid", "optimizer.lr=0.1,-1"], "grid.optimizer.lr.1: -1:"),
        (["--metric", "loss", "--random", "train.seed=1..5"], "log:1e-4..1e-1"),
        (["--metric", "loss", "--grid", "train.seed=1", "--min-steps", "5"], "--scheduler asha"),
        (["--metric", "loss", "--grid", "train.seed=1", "--scheduler", "pbt"], "scheduler.name"),
        (["--metric", "loss", "--grid", "train.seed=1", "--mode", "best"], "mode"),
    ],
)
async def test_what_cannot_be_a_sweep_says_why(
    api: ApiService, spec_file: Path, arguments: list[str], says: str
) -> None:
    result = await everstep("sweep", spec_file, *arguments)
    assert result.exit_code == 2 and says in result.stderr


def test_values_are_read_as_yaml() -> None:
    grid = grid_of(["a.b=1, 2e-3,x", "env.N=[1,2],[3]", "c=true,null"])
    assert grid == {"a.b": [1, 2e-3, "x"], "env.N": [[1, 2], [3]], "c": [True, None]}
    random = random_of(["a=uniform:-1..1", "b=int:1..8", "c=choice:x,2", "d=log:1e-4..0.1"])
    assert random["a"] == {"name": "uniform", "low": -1, "high": 1}
    assert random["b"] == {"name": "int", "low": 1, "high": 8}
    assert random["c"] == {"name": "choice", "values": ["x", 2]}
    assert random["d"] == {"name": "log", "low": 1e-4, "high": 0.1}
    with pytest.raises(UsageError, match="twice"):
        grid_of(["a=1", "a=2"])


async def test_the_client_submits_waits_and_names_the_best(api: ApiService) -> None:
    def use() -> None:
        client = Client(api.url, api.token("submitter", "default"))
        sweep = client.sweeps.create(
            spec(),
            metric="val_accuracy",
            random={"optimizer.lr": {"name": "log", "low": 1e-4, "high": 1e-1}},
            max_runs=2,
            seed=7,
            idempotency_key="once",
        )
        assert "0/2 runs" in repr(sweep) and sweep.seed == 7 and "progress" in dir(sweep)
        with pytest.raises(NotFound):
            sweep.best()
        advance(api)
        for run, accuracy in zip(sweep.runs(), (0.9, 0.8), strict=True):
            train(api, str(run.run_id), accuracy)
        advance(api)
        best = sweep.wait(timeout_s=30).best()
        assert best.id == sweep.runs()[0].run_id and best.sweep_id == sweep.id
        api.clock.now += 1
        again = client.sweeps.create(**sweep.spec().model_dump())
        assert [run.params for run in again.runs()] == [run.params for run in sweep.runs()]
        assert [each.id for each in client.sweeps.list()] == [again.id, sweep.id]
        with pytest.raises(Conflict):
            again.delete()
        again.cancel()
        advance(api)
        with pytest.raises(SweepFailed, match="cancelled_by_user"):
            again.wait(timeout_s=30)
        again.delete()
        with pytest.raises(NotFound):
            client.sweeps.get(again.id)
        with pytest.raises(InvalidSpec, match="cannot be written as JSON"):
            client.sweeps.create(spec(), metric="loss", grid={"train.seed": [object()]})
        with pytest.raises(InvalidSpec, match="idempotency_key"):
            client.sweeps.create(
                spec(), metric="loss", grid={"train.seed": [1]}, idempotency_key=""
            )

    await asyncio.to_thread(use)
