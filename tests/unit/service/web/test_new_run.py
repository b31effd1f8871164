"""The page of a new run: templates, other runs' specs, faults by line, the form, and submission."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import catalog
from everstep.spec.yaml_file import parse_yaml
from service.db.tables import runs as runs_table
from service.web.new_run import templates
from tests.support.api_service import ApiService, spec
from tests.support.page_text import HOSTILE
from tests.support.web_browser import Browser


@pytest.fixture
async def browser(api: ApiService) -> Browser:
    return await Browser.logged_in(api, api.token("submitter", "default"))


def text_in(html: str) -> str:
    found = re.search(r"<textarea[^>]*>(.*?)</textarea>", html, re.DOTALL)
    assert found is not None
    return unescape(found[1])


async def send(browser: Browser, address: str, **fields: str) -> httpx.Response:
    html = await browser.page("/new")
    found = re.findall(r'name="csrf" value="([^"]*)"><input type="hidden" name="key"', html)
    return await browser.http.post(address, data={"csrf": found[0], "key": "k", **fields})


async def ask(browser: Browser, address: str, **fields: str) -> Any:
    answer = await send(browser, address, **fields)
    return json.loads(answer.text) if answer.status_code == 200 else answer.status_code


async def test_each_template_is_right_but_for_what_has_to_be_filled_in(browser: Browser) -> None:
    for name in templates():
        html = await browser.page(f"/new?template={name}")
        entry = next(entry for entry in catalog().data if entry.name == name)
        faults = re.findall(r"<code>([^<]*)</code> ", html.split('id="faults"')[1])
        required = entry.args_schema.get("required", [])
        assert [fault.rpartition(".")[2] for fault in faults] == required, name
    await browser.page("/new?template=none", 422)


async def test_a_run_is_run_again_and_a_checkpoint_is_gone_on_from(
    api: ApiService, browser: Browser
) -> None:
    run_id = await api.create(
        tags={"a": "b"}, optimizer={"name": "sgd", "lr": 0.5}, checkpoint={"best_metric": "loss"}
    )
    before = (await api.get(f"/v1/runs/{run_id}/spec")) | {}
    again = parse_yaml(text_in(await browser.page(f"/new?from={run_id}")), "x")
    assert RunSpec.model_validate(again).model_dump(mode="json") == before
    assert again["tags"] == {"a": "b"} and "schedule" not in again and "env" not in again
    assert "best_mode" not in again["checkpoint"], "it follows from a metric that may be changed"
    forked = parse_yaml(text_in(await browser.page(f"/new?from={run_id}&step=10")), "x")
    assert forked["resume_from"] == {"run_id": run_id, "step": 10}
    assert forked["name"] == "digits-fork"
    old = {"name": "digits", "task": spec()["task"], "later": {"unknown": 1}}
    with api.database.write() as connection:
        connection.execute(update(runs_table).values(spec=old))
    assert parse_yaml(text_in(await browser.page(f"/new?from={run_id}")), "x") == old


async def test_faults_are_named_by_line_as_a_submission_would(browser: Browser) -> None:
    text = "name: x\ntrain:\n  epochs: 0\n  sed: 1\ntask: {name: image_classification}\n"
    found = (await ask(browser, "/new/check", spec=text))["faults"]
    places = [(fault["line"], fault["field"]) for fault in found]
    assert places[:2] == [(3, "train.epochs"), (4, "train.sed")] and len(places) == 4
    assert {line for line, _ in places[2:]} == {5} and "seed" in found[1]["msg"]
    [broken] = (await ask(browser, "/new/check", spec="name: x\ntask: [\n"))["faults"]
    assert broken["line"] == 3 and not broken["msg"].startswith("the spec")
    for wrong, words in (
        ("a: &x [1]\nb: [*x, *x]", "anchors"),
        ("name: " + "x" * 50_001, "longer than"),
        ("- list", "mapping"),
        ("[" * 50_000, "deep"),
    ):
        faults = (await ask(browser, "/new/check", spec=wrong))["faults"]
        assert faults and words in json.dumps(faults), wrong[:40]
    elsewhere = json.dumps(spec(project="elsewhere"))
    [fault] = (await ask(browser, "/new/check", spec=elsewhere))["faults"]
    assert "belongs to project" in fault["msg"]


async def test_the_form_changes_the_text_and_shows_what_is_in_it(browser: Browser) -> None:
    text = "name: a # mine\ntrain: {epochs: 3}\n"
    for path, value in (("train.epochs", "7"), ("optimizer.lr", "1e-4"), ("name", "1.0")):
        text = (await ask(browser, "/new/field", spec=text, path=path, value=value))["spec"]
    assert text == "name: '1.0' # mine\ntrain: {epochs: 7}\noptimizer:\n  lr: 0.0001\n"
    fields = (await ask(browser, "/new/check", spec=text))["fields"]
    assert (fields["train.epochs"], fields["optimizer.lr"], fields["project"]) == (
        "7",
        "0.0001",
        "",
    )
    assert await ask(browser, "/new/field", spec=text, path="env.LD_PRELOAD", value="x") == 422
    assert await ask(browser, "/new/field", spec="a: [", path="name", value="x") == 422


async def test_a_spec_is_submitted_once_and_a_wrong_one_kept(
    api: ApiService, browser: Browser
) -> None:
    wrong = json.dumps(spec(train={"epochs": 0}, nonsense=HOSTILE))
    answer = await send(browser, "/new", spec=wrong)
    assert answer.status_code == 422 and "Nothing was submitted" in answer.text
    assert "train.epochs" in answer.text and "<script>alert" not in answer.text
    assert text_in(answer.text) == wrong
    html = await browser.page("/new")
    fields = dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', html))
    fields["spec"] = text_in(html)
    made = [(await browser.http.post("/new", data=fields)).headers["location"] for _ in range(2)]
    assert made[0] == made[1] and made[0].startswith("/runs/run_")
    paths = [entry["path"] for entry in (await api.get("/v1/audit"))["items"]]
    await ask(browser, "/new/check", spec="")
    after = [entry["path"] for entry in (await api.get("/v1/audit"))["items"]]
    assert "/new" in paths and after == paths, "a check is no entry of the audit log"
    viewer = await Browser.logged_in(api, api.token("viewer", "default"))
    assert "/new" not in await viewer.page("/runs")
    for path in ("/new", "/new/check", "/new/field"):
        assert (await browser.http.post(path, data={"spec": "x"})).status_code == 403, "no token"


@pytest.mark.parametrize(
    "value", ["!!binary aGk=", "!!set {a, b}", "!!timestamp 2026-01-01", "!!omap [a: 1]", "!mine 5"]
)
async def test_a_value_of_another_type_is_a_fault_with_its_line(
    browser: Browser, value: str
) -> None:
    answer = await send(browser, "/new", spec=f"name: digits\ntags: {value}\n")
    assert answer.status_code == 422 and "line 2" in answer.text
