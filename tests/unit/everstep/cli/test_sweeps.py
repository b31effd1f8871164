"""`everstep sweep` against the service's real API; what trains is played by the test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import Result

from everstep import Unavailable
from everstep.client import study
from everstep.client.study import space_of
from everstep.supported import install_command
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService, Journal
from tests.support.command_line import everstep, run_cli

LR = ("--metric", "val_accuracy", "--grid", "optimizer.lr=1e-3,3e-3,0.01")
STEPS = (10, 20, 30)
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "POLL_S", 0.05)
    monkeypatch.chdir(tmp_path)


def train(api: ApiService, run_id: str, *values: float, outcome: str = "succeeded") -> Journal:
    """Let a queued run report these accuracies, and end unless ``outcome`` is empty."""
    api.runs.claim_submission(run_id, 0)
    api.runs.record_job(run_id, 1, "job")
    journal = Journal(at=api.clock.now)
    events = [*journal.start(), journal.steps(1, loss=0.5)]
    for step, value in zip(STEPS, values, strict=False):
        metrics = {"accuracy": value}
        events.append(journal.event(EventKind.EVALUATED, step=step, epoch=0, metrics=metrics))
    reason = {"code": "user_error", "message": "it raised"} if outcome == "failed" else None
    if outcome:
        events.append(journal.event(EventKind.FINISHED, outcome=outcome, reason=reason, step=30))
    api.apply(run_id, events)
    return journal


async def queued(api: ApiService, number: int) -> dict[str, Any]:
    """Return the run of a trial once it is in the queue."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = (await api.get(f"/v1/runs?tag=trial={number}"))["items"]
            if found:
                return dict(found[0])
            await asyncio.sleep(0.02)


async def reached(api: ApiService, run_id: str, status: str) -> None:
    """Wait for a status that the command brings about."""
    async with asyncio.timeout(DEADLINE_S):
        while (await api.get(f"/v1/runs/{run_id}"))["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def sweeping(*arguments: object) -> AsyncIterator[asyncio.Task[Result]]:
    """A command that goes on in a thread, and has ended afterwards."""
    task = asyncio.create_task(everstep("sweep", *arguments))
    try:
        yield task
        await asyncio.wait_for(asyncio.shield(task), DEADLINE_S)
    finally:
        if not task.done():  # a thread cannot be cancelled
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(study.Sweep, "tick", lambda _self: True)
                await task
                pytest.fail(task.result().output)


def strange_study() -> None:
    Path("studies/b.db").write_text("something else")


async def numbers(api: ApiService) -> list[str]:
    """Return the numbers of the trials that have runs, newest first."""
    return [run["tags"]["trial"] for run in (await api.get("/v1/runs"))["items"]]


async def test_each_point_of_a_grid_is_a_run_with_the_tags_of_its_trial(
    api: ApiService, spec_file: Path
) -> None:
    given = [*LR, "--grid", "task.model.args.width=8,16", "--set", "tags.team=a", "--parallel", 2]
    async with sweeping(spec_file, *given, "--json") as task:
        for number in range(6):
            run = await queued(api, number)
            assert run["tags"] == {"study": "by-hand", "trial": str(number), "team": "a"}
            waiting = (await api.get("/v1/runs?status=QUEUED"))["items"]
            assert run["name"] == f"by-hand-{number:03d}" and len(waiting) <= 2
            train(
                api, run["id"], 0.1 * number, 0.2, outcome="failed" if number == 4 else "succeeded"
            )
    found = json.loads(task.result().stdout)["trials"]
    assert task.result().exit_code == 0 and [each["trial"] for each in found] == [5, 3, 0, 1, 2, 4]
    assert found[0]["value"] == 0.5 and found[-1]["state"] == "FAIL"
    lr, width = ("optimizer.lr", "task.model.args.width")
    assert {(each["values"][lr], each["values"][width]) for each in found} == {
        (lr, width) for lr in (1e-3, 3e-3, 0.01) for width in (8, 16)
    }
    own = await api.get(f"/v1/runs/{found[0]['run']}/spec")
    assert own["optimizer"]["lr"] == 0.01 and own["task"]["model"]["args"]["width"] == 16
    assert "it raised" in task.result().stderr


async def test_a_run_that_is_worse_than_others_is_cancelled_and_recorded_as_pruned(
    api: ApiService, spec_file: Path
) -> None:
    given = ["--metric", "val_accuracy", "--range", "optimizer.lr=log:1e-4..1e-1", "--trials", 3]
    given += ["--parallel", 1, "--pruner", "asha", "--min-steps", 20]
    async with sweeping(spec_file, *given) as task:
        train(api, (await queued(api, 0))["id"], 0.1, 0.6, 0.7)
        bad = (await queued(api, 1))["id"]
        journal = train(api, bad, 0.9, 0.5, outcome="")
        await reached(api, bad, "STOPPING")
        assert len(await numbers(api)) == 2, "its place is free once it has ended"
        end = journal.event(EventKind.FINISHED, outcome="cancelled", reason=None, step=20)
        api.apply(bad, [end])
        train(api, (await queued(api, 2))["id"], 0.1, 0.8, 0.9)
    states = [
        each.state.name
        for each in optuna.load_study(
            study_name="by-hand", storage="sqlite:///studies/by-hand.db"
        ).trials
    ]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE"] and task.result().exit_code == 0


async def test_a_study_goes_on_where_a_command_ended_and_submits_no_trial_twice(
    api: ApiService, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--metric", "val_accuracy", "--range", "optimizer.lr=0.1..1", "--trials", 3]
    given += ["--sampler", "random"]
    set_attr, ends = optuna.Trial.set_user_attr, [KeyboardInterrupt, KeyboardInterrupt]

    def dies(trial: optuna.Trial, key: str, value: Any) -> None:
        if key == "values" and ends:
            raise ends.pop()
        set_attr(trial, key, value)

    monkeypatch.setattr(optuna.Trial, "set_user_attr", dies)
    first = await everstep("sweep", spec_file, *given, "--study", "a")
    assert first.exit_code == 130 and "everstep sweep --study a" in first.stderr
    # with another token: no key of it is known, but the tags are
    other = api.token("admin", None)
    monkeypatch.setenv("EVERSTEP_TOKEN", other)
    assert (await everstep("sweep", "--study", "a")).exit_code == 130
    found = optuna.load_study(study_name="a", storage="sqlite:///studies/a.db")
    torn = found.ask()  # a command that died before it had drawn the values
    async with sweeping("--study", "a") as task:
        for number in range(3):
            train(api, (await queued(api, number))["id"], 0.5)
    assert task.result().exit_code == 0 and torn.number == 1
    assert sorted(await numbers(api)) == ["0", "1", "2"]
    drawn = [each.params["optimizer.lr"] for each in found.trials]
    assert len({*drawn}) == 3, "a command that goes on draws other values"
    async with sweeping("--study", "a", "--trials", 4) as task:
        train(api, (await queued(api, 3))["id"], 0.5)
    assert task.result().exit_code == 0 and len(await numbers(api)) == 4


async def test_a_service_that_is_away_is_waited_for(
    api: ApiService, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick, away = study.Sweep.tick, [Unavailable("no connection"), Unavailable("no connection")]

    def interrupted(self: study.Sweep) -> bool:
        if away:
            raise away.pop()
        return tick(self)

    monkeypatch.setattr(study.Sweep, "tick", interrupted)
    async with sweeping(spec_file, *LR, "--trials", 1) as task:
        train(api, (await queued(api, 0))["id"], 0.5)
    assert task.result().exit_code == 0
    assert task.result().stderr.count("waiting: no connection") == 1


async def test_a_metric_that_no_run_reports_ends_the_study(
    api: ApiService, spec_file: Path
) -> None:
    given = ["--metric", "val_acuracy", "--grid", "train.seed=1,2"]
    async with sweeping(spec_file, *given) as task:
        other = (await queued(api, 1))["id"]
        train(api, (await queued(api, 0))["id"], 0.5)
    assert task.result().exit_code == 2
    assert "Begin another study with --metric val_accuracy" in task.result().stderr
    assert (await api.get(f"/v1/runs/{other}"))["status"] == "CANCELLED"


async def test_a_study_without_a_value_fails(api: ApiService, spec_file: Path) -> None:
    async with sweeping(spec_file, *LR) as task:
        for number in range(3):
            run_id = (await queued(api, number))["id"]
            if number:
                train(api, run_id, outcome="failed")
            else:
                await api.http.post(f"/v1/runs/{run_id}/cancel")
    assert task.result().exit_code == 1 and "no run ended with a value" in task.result().stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--grid", "optimizer.lr=1"], "add --metric"),
        (["--metric", "loss"], "add --grid or --range"),
        ([*LR[:2], "--grid", "optimizer.lr"], "write --grid FIELD=VALUE,VALUE"),
        ([*LR[:2], "--grid", "optimizer.lr=[]]"], "--grid optimizer.lr=[]]"),
        ([*LR[:2], "--grid", "optimizer.lr=1,1"], "one of them twice"),
        ([*LR[:2], "--grid", "optimizer.lrr=1"], "did you mean optimizer.lr?"),
        ([*LR[:2], "--grid", "optimizer.lr=0.1,-1"], "optimizer.lr=-1:"),
        ([*LR[:2], "--grid", "name=a,b"], "name is set already"),
        ([*LR, "--range", "optimizer.lr=0..1"], "optimizer.lr is set already"),
        ([*LR, "--trials", "4"], "at most 3 trials"),
        ([*LR, "--trials", "3", "--sampler", "cmaes"], "needs two fields with --range"),
        ([*LR, "--sampler", "genetic"], "--sampler"),
        ([*LR, "--parallel", "0"], "--parallel"),
        ([*LR, "--pruner", "asha"], "--min-steps: is missing"),
        ([*LR, "--study", "a b"], "use letters"),
        ([*LR[:2], "--range", "train.epochs=1..8", "--trials", "1"], "train.epochs=1.0:"),
        ([*LR[:2], "--range", "optimizer.lr=0.1..1"], "--trials: is missing"),
        ([*LR[:2], "--range", "optimizer.lr=log:0..1", "--trials", "2"], "low > 0"),
        ([*LR[:2], "--range", "optimizer.lr=1..0.1", "--trials", "2"], "smaller one first"),
        ([*LR[:2], "--range", "x=0..1", "--sampler", "grid"], "a --range has no grid"),
    ],
)
def test_what_cannot_be_a_study_is_refused_before_the_service_is_asked(
    spec_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.setenv("EVERSTEP_URL", "http://127.0.0.1:9")
    result = run_cli("sweep", str(spec_file), *arguments)
    assert result.exit_code == 2 and says in result.stderr
    assert not [*tmp_path.rglob("*.db")]


async def test_a_study_is_refused_to_whom_it_does_not_belong(
    api: ApiService, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sweeping(spec_file, *LR, "--study", "a") as task:
        for number in range(3):
            run = await queued(api, number)
            if number == 0:
                second = await everstep("sweep", "--study", "a")
                assert second.exit_code == 2 and "end the `everstep sweep`" in second.stderr
            train(api, run["id"], 0.5)
    assert task.result().exit_code == 0
    again = await everstep("sweep", spec_file, *LR, "--study", "a")
    assert again.exit_code == 2 and "leave out grid, metric, spec" in again.stderr
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copied = await everstep("sweep", spec_file, *LR, "--study", "a")
    assert copied.exit_code == 2 and "copy that file" in copied.stderr
    strange_study()
    strange = await everstep("sweep", "--study", "b")
    assert strange.exit_code == 2 and "is not a study" in strange.stderr


async def test_without_optuna_it_says_what_to_install(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = sys.modules["importlib.util"].find_spec
    hidden: Callable[[str], Any] = lambda name: None if name == "optuna" else find(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", hidden)
    result = await everstep("sweep", spec_file, *LR)
    assert result.exit_code == 2 and install_command("sweeps") in result.stderr


def test_values_of_a_grid_may_be_anything_that_a_spec_holds() -> None:
    space = space_of(["a=1,true,x,[1, 2],null"], ["b=int:1..8", "c=log:1e-4..0.1", "d=-1..1"])
    assert study.ends(space["a"]) == [1, True, "x", [1, 2], None]
    assert [study.ends(space[each]) for each in "bcd"] == [[1, 8], [1e-4, 0.1], [-1.0, 1.0]]
    assert getattr(space["c"], "log") and not getattr(space["d"], "log")  # noqa: B009
