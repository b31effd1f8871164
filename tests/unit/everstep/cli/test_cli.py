"""The command line as a user types it, against the service's real API: output for people, pipes and
programs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService, spec
from tests.support.command_line import everstep, finish
from tests.unit.service.api.test_api_checkpoints import save

# ---------------------------------------------------------------- submit


async def test_submit_prints_the_id_alone_for_scripts(api: ApiService, spec_file: Path) -> None:
    result = await everstep(
        "submit", spec_file, "--set", "train.epochs=7", "--set", "tags.team=vision"
    )
    run_id = result.stdout.strip()
    assert result.exit_code == 0 and run_id.startswith("run_") and "everstep watch" in result.stderr
    run = await api.get(f"/v1/runs/{run_id}/spec")
    assert (
        run["train"]["epochs"] == 7
        and run["tags"] == {"team": "vision"}
        and run["name"] == "by hand"
    )


@pytest.mark.parametrize("arguments", [["--json", "submit"], ["submit", "--json"]])
async def test_json_may_stand_before_and_behind_the_command(
    api: ApiService, spec_file: Path, arguments: list[str]
) -> None:
    result = await everstep(*arguments, spec_file)
    assert json.loads(result.stdout)["status"] == "QUEUED" and result.stderr == ""


async def test_a_spec_comes_from_standard_input_too(api: ApiService) -> None:
    result = await everstep(
        "submit", "-", "--idempotency-key", "k", stdin=json.dumps(spec(name="piped"))
    )
    again = await everstep(
        "submit", "-", "--idempotency-key", "k", stdin=json.dumps(spec(name="piped"))
    )
    assert result.exit_code == again.exit_code == 0 and result.stdout == again.stdout
    other = await everstep(
        "submit", "-", "--idempotency-key", "k", stdin=json.dumps(spec(name="other"))
    )
    assert other.exit_code == 2 and "key" in other.stderr.lower()


# ---------------------------------------------------------------- exit codes


async def test_submit_and_watch_follow_a_run_live(api: ApiService, spec_file: Path) -> None:
    watching = asyncio.create_task(everstep("submit", spec_file, "--watch", "--json"))
    async with asyncio.timeout(60):
        while not (items := (await api.get("/v1/runs"))["items"]):  # noqa: ASYNC110  it comes from another thread
            await asyncio.sleep(0.01)
    run_id = items[0]["id"]
    api.runs.request_stop(run_id, "cancel")
    result = await asyncio.wait_for(watching, 60)
    values = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert [value["seq"] for value in values[:-1]] == list(range(1, len(values)))
    assert values[-1]["id"] == run_id and values[-1]["status"] == "CANCELLED"


# ---------------------------------------------------------------- looking


async def test_runs_and_show(api: ApiService) -> None:
    run_id = await finish(api, name="mine", tags={"team": "[red]vision[/red] \x1b[31m"})
    await api.create(name="another")
    listed = await everstep("runs")
    assert run_id in listed.stdout and "SUCCEEDED" in listed.stdout and "another" in listed.stdout
    assert listed.stdout.split()[0] == "ID"
    filtered = json.loads(
        (await everstep("runs", "--status", "SUCCEEDED", "--tag", "team", "--json")).stdout
    )
    assert [run["id"] for run in filtered] == [run_id]
    assert len(json.loads((await everstep("runs", "-n", "1", "--json")).stdout)) == 1
    shown = await everstep("show", run_id)
    assert (
        shown.exit_code == 0
        and "team=[red]vision[/red]" in shown.stdout
        and "\x1b" not in shown.stdout
    )
    value = json.loads((await everstep("show", run_id, "--json")).stdout)
    assert value["transitions"][0] == value["transitions"][0] | {"from": None, "to": "QUEUED"}
    assert (await everstep("runs", "--name", "none")).stdout == ""


async def test_why_tells_failures_in_words(api: ApiService) -> None:
    run_id = await finish(
        api, "failed", {"code": "system_failures_exhausted", "message": "too many"}
    )
    output = (await everstep("why", run_id)).stdout
    assert "system_failures_exhausted: too many" in output
    assert "rank 1 on node node-2-l died at step 7 (attempt 1, verdict worker_lost)" in output
    assert "cause: ActorDiedError: killed by signal 9" in output
    assert "2 -> 1 rank, 0 steps lost, detected after 0.2 s, training again after 1.2 s" in output
    value = json.loads((await everstep("why", run_id, "--json")).stdout)
    assert value["status"] == "FAILED" and value["reason"]["message"] == "too many"
    assert value["failures"][0]["verdict"] == "worker_lost"


async def test_goodput_and_stragglers_in_tables(api: ApiService) -> None:
    run_id, journal = await api.running()
    api.clock.now += 30
    rank = {"node_id": "node-2-long-name", "micro_batches": 1, "wait_s": 0.0}
    ranks = [
        {**rank, "rank": 0, "own_s": 0.01, "skew": 0.2},
        {**rank, "rank": 1, "own_s": 0.06, "skew": 6.0},
    ]
    slow = {
        "rank": 1,
        "node_id": "node-2-long-name",
        "step": 9,
        "slow": True,
        "own_s": 0.06,
        "peers_s": 0.01,
        "skew": 6.0,
    }
    api.apply(
        run_id,
        [
            journal.event(EventKind.RANK_TIMES, step=9, step_s=0.06, ranks=ranks),
            journal.event(EventKind.STRAGGLER, **slow),
        ],
    )
    output = (await everstep("stragglers", run_id)).stdout
    assert (
        "rank 1 on node node-2-l slows the others down since" in output
        and "it works 60 ms in a step, a peer 10 ms" in output
    )
    assert "60.0 ms" in output and output in (await everstep("stragglers", run_id)).stdout
    assert (
        json.loads((await everstep("stragglers", run_id, "--json")).stdout)["ranks"][1]["skew"]
        == 6.0
    )
    assert "slows the others down since" in (await everstep("why", run_id)).stdout
    assert "productive" in (await everstep("goodput", run_id)).stdout
    assert "default: 1 run" in (await everstep("goodput")).stdout
    assert (
        json.loads((await everstep("goodput", "--json")).stdout)["items"][0]["project"] == "default"
    )
    assert (await everstep("goodput", "--project", "none")).stdout == ""


async def test_events_and_why_say_where_ranks_build_for_themselves_and_why(
    api: ApiService,
) -> None:
    run_id, journal = await api.running()
    start, *rest = journal.start()
    why = "the build has left files open (/data/a.h5)"
    apart = {"node-2": why, "node-3": why}
    start = dataclasses.replace(start, data={**start.data, "built_apart": apart})
    api.apply(run_id, [start, *rest, journal.steps(2)])
    assert (await api.get(f"/v1/runs/{run_id}/attempts"))["items"][-1]["built_apart"] == apart
    words = f"each rank on node-2, node-3 builds for itself, in every attempt: {why}"
    for command in ("why", "events"):
        assert words in " ".join((await everstep(command, run_id)).output.split())
    ended = journal.event(EventKind.ATTEMPT_ENDED, cause="worker_lost")
    api.apply(run_id, [ended, journal.event(EventKind.WAITING, message="needs 9 CPUs")])
    for available, room in ((True, "free now: 2 CPU"), (False, "needs 9 CPUs")):
        api.cluster.available = available
        said = " ".join((await everstep("why", run_id)).output.split())
        assert room in said and words in said, "why a run waits does not hide why ranks build"


async def test_logs_are_printed_without_control_characters(api: ApiService) -> None:
    run_id = await finish(api)
    with RankLogWriter(RunDir(api.storage, run_id), 1, 1, 0) as writer:
        writer.write(
            [
                LogRecord(NOON, "INFO", "plain"),
                LogRecord(NOON + 1, "ERROR", "two\nlines \x1b]0;evil\x07"),
            ]
        )
    for arguments in (["logs", run_id], ["logs", run_id, "-f"]):
        lines = (await everstep(*arguments)).stdout.splitlines()
        assert [line.split(maxsplit=4)[1:4] for line in lines] == [
            ["a1", "r0", "INFO"],
            ["a1", "r0", "ERROR"],
            ["a1", "r0", "ERROR"],
        ]
        assert lines[0].endswith("plain") and lines[2].endswith("lines ")
    for options, shown in (
        (["--tail", "1"], ["ERROR", "ERROR"]),
        (["--tail", "9", "-f", "--level", "warning"], ["ERROR", "ERROR"]),
        (["--tail", "0"], []),
        (["--level", "critical"], []),
    ):
        lines = (await everstep("logs", run_id, *options)).stdout.splitlines()
        assert [line.split()[3] for line in lines] == shown, options
    assert "critical" in (await everstep("logs", run_id, "--level", "loud")).stderr
    [first, second] = map(
        json.loads, (await everstep("logs", run_id, "--json")).stdout.splitlines()
    )
    assert first["message"] == "plain" and second["message"].startswith("two\nlines")
    assert (await everstep("logs", run_id, "--rank", "3")).stdout == ""


async def test_json_and_words_hold_nothing_that_steers_a_terminal(api: ApiService) -> None:
    evil = "a\x9b2Jb\x85c\u202ed\u2066e\u2028f"
    run_id = await finish(api, tags={"evil": evil})
    with RankLogWriter(RunDir(api.storage, run_id), 1, 1, 0) as writer:
        writer.write([LogRecord(NOON, "INFO", evil)])
    for arguments in (["logs", run_id], ["show", run_id], ["runs"], ["watch", run_id]):
        for extra in ([], ["--json"]):
            result = await everstep(*arguments, *extra)
            assert result.exit_code == 0 and not set(result.stdout + result.stderr) & set(
                "\x9b\x85\u202e\u2066\u2028"
            ), arguments
    assert json.loads((await everstep("logs", run_id, "--json")).stdout)["message"] == evil
    assert json.loads((await everstep("show", run_id, "--json")).stdout)["tags"] == {"evil": evil}


async def test_metrics_and_samples(api: ApiService) -> None:
    run_id, journal = await api.running()
    epoch = {
        "epoch": 0,
        "samples": 10,
        "used_once": 10,
        "duplicates": 0,
        "missing": 0,
        "digest": "ab" * 32,
        "seconds": 1.0,
    }
    api.apply(
        run_id,
        [
            journal.steps(2, loss=0.25),
            journal.steps(3, loss=None, lr=0.1),
            journal.event(EventKind.EPOCH_COMPLETED, **epoch),
        ],
    )
    rows = {
        line.split()[0]: line for line in (await everstep("metrics", run_id)).stdout.splitlines()
    }
    assert (
        "not finite" in rows["loss"]
        and "0.25 at 2" in rows["loss"]
        and "0.5 at 1" in rows["loss"]
        and "lr" in rows
    )
    series = json.loads((await everstep("metrics", run_id, "loss", "--json")).stdout)["series"]
    assert [[step, value] for step, _, value in series["loss"]] == [[1, 0.5], [2, 0.25], [3, None]]
    assert (
        "0      10       10         0           0        abababababababab"
        in (await everstep("samples", run_id)).stdout
    )
    assert (
        json.loads((await everstep("samples", run_id, "--json")).stdout)["epochs"][0]["used_once"]
        == 10
    )


async def test_checkpoints_and_download(
    api: ApiService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, journal = await api.running(checkpoint={"best_metric": "accuracy"})
    assert "no checkpoints yet" in (await everstep("checkpoints", run_id)).stderr
    manifests = [
        save(api, run_id, journal, step, accuracy=value) for step, value in ((10, 0.9), (20, 0.8))
    ]
    listed = (await everstep("checkpoints", run_id)).stdout
    assert manifests[0].digest[:16] in listed and "accuracy 0.9" in listed and "committed" in listed
    monkeypatch.chdir(tmp_path)
    fetched = await everstep("download", run_id)
    assert fetched.exit_code == 0 and fetched.stdout.strip() == f"{run_id}-20"
    assert (tmp_path / f"{run_id}-20" / "model.pt").stat().st_size == 700_000
    best = await everstep("download", run_id, "best", tmp_path / "best", "--json")
    assert (
        json.loads(best.stdout)["checkpoint"]["step"] == 10
        and (tmp_path / "best" / "manifest.json").exists()
    )
    for which, words in (
        ("newest", "is not a checkpoint; use a step"),
        ("77", "no checkpoint of step 77"),
    ):
        refused = await everstep("download", run_id, which, tmp_path / "none")
        assert (
            refused.exit_code == 2 and words in refused.stderr and not (tmp_path / "none").exists()
        )
    assert "step-000000020.s001.a001 is sound" in (await everstep("verify", run_id)).stdout
    (
        Path(CheckpointStore(RunDir(api.storage, run_id)).path(manifests[0].name)) / "model.pt"
    ).write_bytes(b"short")
    corrupt = await everstep("verify", run_id, "best")
    assert (
        corrupt.exit_code == 1
        and "model.pt: expected 700000 bytes, found 5 bytes" in corrupt.stdout
    )
    assert (
        json.loads((await everstep("verify", run_id, "10", "--json")).stdout)["state"] == "corrupt"
    )
    assert "step-000000010.s001.a001 is damaged" in (await everstep("why", run_id)).stdout
    unwritable = await everstep("download", run_id, "latest", "/proc/none/out")
    assert (
        unwritable.exit_code == 1
        and "/proc/none" in unwritable.stderr
        and "Traceback" not in unwritable.output
    )


async def test_cancel_pause_and_resume(api: ApiService) -> None:
    run_id = await api.create()
    assert "PAUSED" in (await everstep("pause", run_id)).stdout
    assert "QUEUED" in (await everstep("resume", run_id)).stdout
    assert json.loads((await everstep("cancel", run_id, "--json")).stdout)["status"] == "CANCELLED"
    again = await everstep("resume", run_id)
    assert again.exit_code == 2 and f"with resume_from.run_id={run_id}" in again.stderr


async def test_cluster(api: ApiService) -> None:
    shown = await everstep("cluster")
    assert "10.0.0.1" in shown.stdout and "2 CPU" in shown.stdout and "2.60.0" in shown.stdout
    assert f"{api.url}/ray/" in shown.stdout and "ray.example" not in shown.stdout
    assert (
        json.loads((await everstep("cluster", "--json")).stdout)["nodes"][0]["hostname"] == "host"
    )
    api.cluster.available = False
    assert "Ray does not respond" in (await everstep("cluster")).stderr


# ---------------------------------------------------------------- as a process
