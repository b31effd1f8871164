"""Commands around a run as a user types them: delete, events, compare, open, validate, catalog,
log-ins, and what Tab offers."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstep import Client
from everstep.cli import terminal as completion
from everstep.cli.main import app
from everstep.client.address import read_contexts
from everstep.errors import UsageError
from everstep.wire import RunStatus
from everstep.wire.team import Quotas
from tests.support.api_service import ApiService
from tests.support.code_archives import TASK
from tests.support.command_line import everstep, finish, run_cli
from tests.support.narrow_terminal import NarrowTerminal
from tests.support.web_browser import Browser

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------- delete


async def test_delete_asks_on_a_terminal_and_not_in_a_script(api: ApiService) -> None:
    first, second = await finish(api, name="first"), await finish(api, name="second")
    refused = await everstep("delete", first)
    assert refused.exit_code == 2 and "add --yes" in refused.stderr
    live = await api.create()
    too_early = await everstep("delete", live, "--yes")
    assert too_early.exit_code == 2 and "cancel it first" in too_early.stderr
    terminal = NarrowTerminal("delete", first)
    await asyncio.to_thread(terminal.read_until, "[y/N]")
    terminal.type("n")
    assert await asyncio.to_thread(terminal.finish) == 1 and api.runs.get(first) is not None
    done = await everstep("delete", first, second, "--yes")
    assert done.exit_code == 0 and f"{second} second is deleted" in done.stdout
    assert api.runs.get(first) is None and api.runs.get(second) is None
    assert (await everstep("delete", first, "--yes")).exit_code == 2


# ---------------------------------------------------------------- events


async def test_events_are_told_in_words_followed_and_filtered(api: ApiService) -> None:
    run_id = await finish(api)
    told = (await everstep("events", run_id)).stdout
    assert "attempt 1 with 2 ranks" in told and "failure: worker_lost of rank 1" in told
    assert "metrics" not in told
    assert (await everstep("events", run_id, "-f")).stdout == told
    only = json.loads((await everstep("events", run_id, "--kind", "failure", "--json")).stdout)
    assert only["kind"] == "failure" and only["data"]["first_rank"] == 1
    everything = (await everstep("events", run_id, "--json")).stdout.splitlines()
    assert [json.loads(line)["seq"] for line in everything] == list(range(1, len(everything) + 1))
    wrong = await everstep("events", run_id, "--kind", "faliure")
    assert wrong.exit_code == 2 and "'faliure' is not a kind of event" in wrong.stderr


# ---------------------------------------------------------------- compare, open


async def test_compare_shows_figures_and_differences(api: ApiService) -> None:
    one = await finish(api, name="narrow", train={"epochs": 3})
    other = await finish(api, name="wide", train={"epochs": 7})
    shown = (await everstep("compare", one, other)).stdout
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[1:]}
    assert rows["name"] == ["narrow", "wide"] and rows["loss"] == ["0.25", "0.25"]
    assert rows["train.epochs"] == ["3", "7"] and "train.seed" not in rows
    value = json.loads((await everstep("compare", one, other, "--json")).stdout)
    assert value["differences"] == {"train.epochs": {one: "3", other: "7"}}
    assert [run["id"] for run in value["runs"]] == [one, other]
    both = await everstep("show", one, other, "--ranks")
    assert both.exit_code == 2 and "--ranks shows one run" in both.stderr


async def test_notes_are_printed_replaced_and_removed(api: ApiService) -> None:
    one, two = await api.create(name="b", train={"seed": 9}), await api.create(name="a")
    assert (await everstep("note", one)).stdout == ""
    noted = await everstep("note", one, "lr too \x9bhigh\n\x1b[31mred")
    assert noted.stdout == "lr too \N{REPLACEMENT CHARACTER}high\nred\n"
    piped = await everstep("note", one, "-", "--json", stdin="from a pipe\n")
    assert json.loads(piped.stdout)["notes"] == "from a pipe"
    assert "from a pipe" in (shown := await everstep("show", one)).stdout
    assert "owner" in shown.stdout and "admin of None" in shown.stdout
    assert (await everstep("note", one, "x", "--clear")).exit_code == 2
    assert (await everstep("note", one, "x" * 4001)).exit_code == 2
    assert (await everstep("note", one, "--clear")).stdout == ""
    listed = json.loads((await everstep("runs", "--sort", "-spec.train.seed", "--json")).stdout)
    assert [run["id"] for run in listed] == [one, two]
    assert "cannot sort by this" in (await everstep("runs", "--sort", "colour")).stderr


async def test_open_prints_the_address_of_a_page(api: ApiService) -> None:
    run_id = await api.create()
    assert (await everstep("open", run_id)).stdout.strip() == f"{api.url}/runs/{run_id}"
    assert json.loads((await everstep("open", "--json")).stdout) == {"url": f"{api.url}/runs"}
    assert (await everstep("open", "run_000000000000")).exit_code == 2


# ---------------------------------------------------------------- validate, catalog


async def test_validate_needs_no_service_and_a_dry_run_submits_nothing(
    api: ApiService, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = await everstep("submit", spec_file, "--dry-run", "--json")
    assert json.loads(dry.stdout)["train"]["epochs"] > 0
    assert (await everstep("submit", spec_file, "--dry-run")).stdout == (
        "by hand is valid; nothing was submitted\n"
    )
    elsewhere = await everstep("submit", spec_file, "--dry-run", "--set", "project=nowhere")
    assert elsewhere.exit_code == 2 and "project 'nowhere' does not exist" in elsewhere.stderr
    assert (await api.get("/v1/runs"))["items"] == []
    monkeypatch.setenv("EVERSTEP_URL", "http://127.0.0.1:9")
    assert (await everstep("validate", spec_file)).stdout == f"{spec_file} is valid\n"
    resolved = json.loads((await everstep("validate", spec_file, "--json")).stdout)
    assert resolved["scaling"]["min_workers"] == 1
    wrong = await everstep("validate", spec_file, "--set", "train.epochs=0", "--set", "priority=x")
    assert wrong.exit_code == 2 and "the spec has 2 faults" in wrong.stderr
    assert "train.epochs" in wrong.stderr and "priority" in wrong.stderr


def test_validate_finds_the_class_that_code_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.py").write_text(TASK)
    code = ("validate", "--code", tmp_path, "--task")
    assert run_cli(*code, "mine.task:Line").stdout == "Line is valid\n"
    for entry, words in (
        ("mine.task:Lines", "mine/task.py has no class 'Lines'; did you mean 'Line'?"),
        ("mine.tasks:Line", "the archive has no module 'mine.tasks'; did you mean mine.task?"),
        ("mine.task.Line", "write MODULE:NAME, for example my_task.task:MyTask"),
    ):
        wrong = run_cli(*code, entry)
        assert (wrong.exit_code, words in wrong.stderr) == (2, True), wrong.stderr


async def test_a_spec_without_a_project_is_of_the_token_s(
    api: ApiService, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.projects.put("vision", Quotas())
    monkeypatch.setenv("EVERSTEP_TOKEN", api.token("submitter", "vision"))
    submitted = await everstep("submit", spec_file, "--json")
    assert json.loads(submitted.stdout)["project"] == "vision", submitted.stderr
    other = await everstep("submit", spec_file, "--set", "project=default")
    assert other.exit_code == 2 and "belongs to project 'vision'" in other.stderr


def test_the_catalog_is_listed_with_arguments() -> None:
    listed = run_cli("catalog").stdout
    assert "mini_resnet" in listed and "width=16" in listed and "cosine" in listed
    only = run_cli("catalog", "optimizers").stdout
    assert "adamw" in only and "mini_resnet" not in only
    assert "schedules" in json.loads(run_cli("catalog", "--json").stdout)
    assert run_cli("catalog", "cars").exit_code == 2


# ---------------------------------------------------------------- log-ins


async def test_login_keeps_a_token_that_the_service_knows(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EVERSTEP_URL", "EVERSTEP_TOKEN"):
        monkeypatch.delenv(name)
    run_id = await api.create(name="elsewhere")
    assert "no token" in (await everstep("runs", "--url", api.url)).stderr
    refused = await everstep("login", api.url, stdin="not-a-token\n")
    assert refused.exit_code == 2 and read_contexts().log_ins == {}
    done = await everstep("login", api.url, "--name", "team", stdin=api.token("viewer") + "\n")
    assert done.exit_code == 0 and done.stdout == f"logged in to {api.url} as team\n"
    file = api.home / "contexts.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run_id in (await everstep("runs")).stdout  # by the log-in in use
    assert run_id in (await everstep("runs", "--url", api.url)).stdout
    assert run_id in {run.id for run in await asyncio.to_thread(_runs_of, Client())}
    listed = await everstep("context")
    assert f"*  team   {api.url}" in listed.stdout
    away = await everstep("context", "local", "--json")
    assert json.loads(away.stdout)["current"] is None
    assert Client().url == "http://127.0.0.1:8000"
    assert (await everstep("context", "none")).exit_code == 2
    monkeypatch.setenv("EVERSTEP_TOKEN", "of-the-environment")
    await everstep("context", "team")
    assert Client().url == "http://127.0.0.1:8000"  # a log-in gets no other token
    monkeypatch.delenv("EVERSTEP_TOKEN")
    assert (await everstep("logout")).stdout == "forgot team\n"
    assert read_contexts().log_ins == {} and "not logged in" in (await everstep("logout")).stderr


def _runs_of(client: Client) -> list[object]:
    return list(client.runs.list())


def test_a_damaged_file_of_log_ins_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    (tmp_path / "contexts.json").write_text('{"current": 3}')
    with pytest.raises(UsageError, match="remove it and log in again"):
        Client()


# ---------------------------------------------------------------- Tab


async def test_tab_offers_runs_and_statuses(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await finish(api, name="mine")
    assert await asyncio.to_thread(completion.run_ids, "run_") == [(run_id, "mine SUCCEEDED")]
    assert await asyncio.to_thread(completion.run_ids, "x") == []
    assert completion.statuses("r") == [RunStatus.RUNNING, RunStatus.RECOVERING]
    for words, offered in (
        (["show", "run_"], run_id),
        (["runs", "--status", "SUCC"], "SUCCEEDED"),
        (["events", run_id, "--kind", "fai"], "failure"),
    ):
        assert offered in await asyncio.to_thread(_tab, words), words
    monkeypatch.setenv("EVERSTEP_URL", "http://127.0.0.1:9")
    assert await asyncio.to_thread(completion.run_ids, "run_") == []


def _tab(words: list[str]) -> str:
    """What bash is offered after these words."""
    asked = {
        "_EVERSTEP_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["everstep", *words]),
        "COMP_CWORD": str(len(words)),
    }
    return CliRunner().invoke(app, [], env={**os.environ, **asked}, prog_name="everstep").output


# ---------------------------------------------------------------- nodes that come back


async def test_a_dead_node_that_comes_back_is_told_by_command_and_page(api: ApiService) -> None:
    assert "started again" not in (await everstep("cluster")).stderr
    api.cluster.coming_back = (datetime(2026, 6, 1, 12, 3, 5, tzinfo=UTC),)
    assert "a missing node is started again at" in (await everstep("cluster")).stderr
    page = await (await Browser.logged_in(api, api.token("viewer"))).page("/cluster")
    assert "A missing node is started again at" in page and "12:03:05" in page


# ---------------------------------------------------------------- sessions


async def test_sessions_are_listed_and_ended(api: ApiService) -> None:
    made = api.tokens.create("ada", "viewer", "default")[0]
    secret = api.sessions.begin(made.id, address="10.0.0.9", browser="Firefox")
    listed = json.loads((await everstep("session", "list", "--json")).stdout)
    assert (listed["name"], listed["address"], listed["browser"]) == ("ada", "10.0.0.9", "Firefox")
    assert listed["id"] in (await everstep("session", "list")).stdout
    ended = await everstep("session", "revoke", listed["id"])
    assert ended.exit_code == 0 and api.sessions.find(secret) is None
    again = await everstep("session", "revoke", listed["id"])
    assert again.exit_code == 2 and "has ended" in again.stderr
