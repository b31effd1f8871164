"""Exit codes and words of the commands, whatever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.api_service import ApiService
from tests.support.command_line import everstep, finish, run_cli
from tests.support.scripted_http import (
    RUN_ID,
    ScriptedServer,
    event,
    frame,
    problem,
    reply,
    run_answer,
    scripted,
    silent_after,
)

# ---------------------------------------------------------------- submit


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "train.epoch=1"], "did you mean train.epochs?"),
        (["--set", "train.epochs=many"], "train.epochs: should be a valid integer"),
        (["--set", "nothing"], "FIELD=VALUE"),
        (["--set", "train.epochs=0", "--set", "train.seed=-1"], "2 faults"),
    ],
)
async def test_a_bad_spec_is_exit_code_2_and_makes_no_run(
    api: ApiService, spec_file: Path, arguments: list[str], words: str
) -> None:
    result = await everstep("submit", spec_file, *arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""
    assert (await api.get("/v1/runs"))["items"] == []


async def test_faults_are_json_where_json_is_asked_for(api: ApiService, spec_file: Path) -> None:
    result = await everstep("submit", spec_file, "--set", "train.epochs=0", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stderr)["error"]
    assert error["code"] == "invalid_spec" and error["errors"][0]["loc"] == ["train", "epochs"]


def test_a_file_with_a_fault_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: a\nname: b\n")
    result = run_cli("submit", str(tmp_path / "bad.yaml"))
    assert result.exit_code == 2 and "line 2" in result.stderr
    result = run_cli("submit", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2 and "does not exist" in result.stderr


# ---------------------------------------------------------------- exit codes


def test_a_service_that_is_not_there_is_exit_code_3_and_says_what_to_do(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_URL", "http://127.0.0.1:9")
    for arguments in (["runs"], ["submit", str(spec_file)], ["cluster", "--json"]):
        result = run_cli(*arguments)
        assert result.exit_code == 3
        assert (
            "everstep serve" in result.stderr
            and "EVERSTEP_URL" in result.stderr
            and "127.0.0.1:9" in result.stderr
        )


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (problem(401, "unauthorized", "no valid token"), 2),
        (problem(403, "forbidden", "viewers may not"), 2),
        (problem(404, "not_found", "no such run"), 2),
        (problem(409, "invalid_transition", "it has ended"), 2),
        (problem(429, "rate_limited", "slow down", Retry_After="0"), 3),
        (problem(503, "database_unavailable", "away", Retry_After="0"), 3),
        (problem(500, "internal_error", "the service failed"), 1),
        (reply({"hello": "jenkins"}), 1),
    ],
)
def test_errors_have_exit_codes_and_words(answer: Any, code: int) -> None:
    with scripted() as server:
        server.script[f"/v1/runs/{RUN_ID}"] = [answer]
        result = run_cli("show", RUN_ID, "--url", server.url)
    assert (
        result.exit_code == code
        and result.stderr.startswith("error: ")
        and "Traceback" not in result.output
    )


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["show"], ["runs", "--limit", "0"], ["logs", "x", "--rank", "-1"], ["metrics"]],
)
def test_bad_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert run_cli(*arguments).exit_code == 2


def test_a_training_here_outlives_the_reader_of_its_output(spec_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "everstep.cli.main", "run", str(spec_file), "--local"]
    command += ["--storage", str(tmp_path / "here"), "--set", "train.epochs=2"]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as cli:
        assert cli.stdout is not None and cli.stderr is not None
        assert cli.stdout.readline() and cli.stdout.readline()
        cli.stdout.close()
        assert "Traceback" not in cli.stderr.read() and cli.wait(120) == 0
    journal = "".join(path.read_text() for path in (tmp_path / "here").rglob("events/*.jsonl"))
    assert '"finished"' in journal and '"succeeded"' in journal


@pytest.mark.parametrize(("outcome", "code"), [("succeeded", 0), ("failed", 1), ("stopped", 1)])
async def test_watch_ends_with_the_run_and_tells_how(
    api: ApiService, outcome: str, code: int
) -> None:
    reason = {"failed": {"code": "user_error", "message": "it raised twice"}}.get(outcome)
    if outcome == "stopped":
        reason = {"code": "cancelled_by_user", "message": "cancelled"}
    run_id = await finish(api, outcome, reason)
    result = await everstep("watch", run_id)
    assert result.exit_code == code, result.output
    assert "accuracy 0.97" in result.stdout
    assert "failure: worker_lost of rank 1: ActorDiedError: killed by signal 9" in result.stdout
    assert ("user_error: it raised twice" in result.stdout) == (outcome == "failed")
    assert ("everstep why" in result.stderr) == (outcome == "failed")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted() as running:
        running.script[f"/v1/runs/{RUN_ID}"] = [reply(run_answer())]
        yield running


def process(server: ScriptedServer, *arguments: str) -> subprocess.Popen[str]:
    """The command as in a terminal: a shell that runs the tests in the background would have it
    ignore Ctrl-C."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "everstep.cli.main", *arguments],
        env={**os.environ, "EVERSTEP_URL": server.url, "EVERSTEP_TOKEN": "token"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def log_page(count: int) -> dict[str, Any]:
    at = "2026-01-02T03:04:05Z"
    line = {
        "at": at,
        "submission": 1,
        "attempt": 1,
        "rank": 0,
        "level": "INFO",
        "message": "x" * 200,
    }
    return {"items": [{**line, "seq": seq} for seq in range(1, count + 1)], "next_cursor": None}


# ---------------------------------------------------------------- as a process


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_command_by_a_code_of_its_own(
    server: ScriptedServer,
) -> None:
    server.script[f"/v1/runs/{RUN_ID}/logs"] = [reply(log_page(5000))]
    for flags in ([], ["--json"]):
        with process(server, "logs", RUN_ID, *flags) as cli:
            assert cli.stdout is not None and cli.stderr is not None
            assert "x" * 200 in cli.stdout.readline()
            cli.stdout.close()
            assert cli.wait(60) == 141
            assert cli.stderr.read() == ""


def test_control_c_leaves_the_run_and_says_so(server: ScriptedServer) -> None:
    evaluated = event(1, "evaluated", step=1, epoch=0, metrics={"accuracy": 0.5})
    server.script[f"/v1/runs/{RUN_ID}/events"] = [silent_after(frame(evaluated))]
    with process(server, "watch", RUN_ID) as cli:
        assert cli.stdout is not None and cli.stderr is not None
        assert "accuracy 0.5" in cli.stdout.readline()
        cli.send_signal(signal.SIGINT)
        assert cli.wait(60) == 130
        output = cli.stderr.read()
    assert f"everstep cancel {RUN_ID}" in output and "Traceback" not in output
    assert all(request.method == "GET" for request in server.requests)


# ---------------------------------------------------------------- drain


@pytest.mark.parametrize("words", [["drain"], ["drain", "3f2a", "--this-node"]])
def test_a_drain_of_no_node_or_of_two_is_exit_code_2(words: list[str]) -> None:
    result = run_cli(*words)
    assert result.exit_code == 2 and "either NODE, or --this-node" in result.stderr


@pytest.mark.parametrize(
    ("raylets", "named"),
    [(["raylet", "raylet"], "2 nodes of Ray"), (["python"], "0 nodes of Ray")],
)
def test_a_machine_that_is_not_one_node_is_not_drained(
    monkeypatch: pytest.MonkeyPatch, raylets: list[str], named: str
) -> None:
    found = [SimpleNamespace(info={"name": name}) for name in raylets]
    monkeypatch.setattr("psutil.process_iter", lambda _names: found)
    result = run_cli("drain", "--this-node")
    assert result.exit_code == 2 and named in result.stderr
    over = run_cli("drain", "--this-node", "--deadline", "0")
    assert over.exit_code == 2 and "seconds that are left" in over.stderr
