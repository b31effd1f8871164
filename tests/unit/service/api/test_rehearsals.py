"""Whether a restart was rehearsed on a run's code: the route, the client, `everstep why` and the
page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everstep.code import pack, with_code
from everstep.spec.parsing import parse_spec
from everstep.wire.drills import REHEARSAL_TAG, Rehearsal
from tests.support.api_service import ApiService
from tests.support.command_line import everstep
from tests.support.page_text import text_of
from tests.support.web_browser import Browser
from tests.unit.service.api.test_api_code import upload
from train_fn.rehearsal.verdict import keep, known

RATE = {
    "what": "the optimizer's groups",
    "step": 7,
    "rank": 0,
    "detail": "optimizer/param_groups/0/lr: 0.05 became 0.1",
    "where": "train.py, line 18",
    "held": ["train.py: seen (6 became 1)"],
    "advice": "Compute it from state.step_number",
}
EQUAL: dict[str, Any] = {
    "outcome": "equal",
    "text": "A restart was rehearsed on this code: equal in every bit.",
    "ranks": 2,
    "steps": 12,
    "rows": [{"name": "a rank killed within step 6", "outcome": "equal", "text": "the same"}],
    "notes": [],
}
DIFFERENT = EQUAL | {
    "outcome": "different",
    "text": "A restart changes what this code trains: 1 of 5 rows differ.",
    "rows": [
        {
            "name": "rank 0 killed right after step 6",
            "outcome": "different",
            "text": "the optimizer's groups of step 7, rank 0: 0.05 became 0.1.",
            "difference": RATE,
            "went_on_from": "step 6 (snapshot)",
        },
        {"name": "an evaluation", "outcome": "left out", "text": "not seen within 12 steps"},
    ],
}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        service.announce(monkeypatch, "submitter")
        yield service


async def page_of(api: ApiService, run_id: str) -> str:
    browser = await Browser.logged_in(api, api.token("admin"))
    html = await browser.page(f"/runs/{run_id}")
    start = html.find('id="rehearsal-title"')
    return "" if start < 0 else text_of(html[start : html.index("goodput-title")])


async def test_a_built_in_task_is_not_rehearsed(api: ApiService) -> None:
    run_id, _ = await api.running()
    found = await api.get(f"/v1/runs/{run_id}/rehearsal")
    assert found["state"] == "none"
    assert "nothing that a restart could change" in found["text"]
    assert await page_of(api, run_id) == ""
    assert "rehears" not in (await everstep("why", run_id)).output


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"script": "train.py", "argv": ["--lr", "1"]}, "--script train.py"),
        ({"task": "mine:Mine"}, "--task mine:Mine"),
    ],
)
async def test_a_loop_that_is_not_rehearsed_is_said_to_be_so_with_the_command(
    api: ApiService, tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text("import everstep.train as es\n")
    methods = "build_model = build_datasets = loss = print"
    (source / "mine.py").write_text(f"class Mine:\n    {methods}\n")
    digest = (await upload(api, pack(source))).json()["digest"]
    run_id, _ = await api.running(task=None, code={"archive": digest, **entry})
    command = f"--code DIRECTORY {words}"
    shown = await page_of(api, run_id)
    assert "Not rehearsed." in shown and command in shown
    assert command in (await api.get(f"/v1/runs/{run_id}/rehearsal"))["text"]
    options = [f"--{name}={entry[name]}" for name in entry if name != "argv"]
    after = ["--", *entry["argv"]] if "argv" in entry else []
    given = ("--set", "scaling.max_workers=2", *after)
    said = (await everstep("submit", "--code", source, *options, *given)).stderr
    told = f"everstep rehearse --code {source} {words} {' '.join(given)}"
    assert f"not rehearsed: `{told}`" in " ".join(said.split())


@pytest.mark.parametrize("report", [EQUAL, DIFFERENT], ids=["equal", "different"])
async def test_what_was_rehearsed_here_travels_with_a_run_of_the_same_and_with_no_other(
    api: ApiService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text("import everstep.train as es\n")
    given = ("--code", source, "--script=train.py")
    raw, _ = with_code(None, str(source), script="train.py")
    keep(parse_spec(raw), Rehearsal.model_validate(report), 0)

    async def shown(*more: object) -> tuple[str, str, str]:
        done = await everstep("submit", *given, *more)
        run_id = done.stdout.strip()
        why = " ".join((await everstep("why", run_id)).output.split())
        return " ".join(done.stderr.split()), why, await page_of(api, run_id)

    place = "the optimizer's groups of step 7 (train.py, line 18), with train.py: seen"
    words = "equal in every bit (2 ranks, 12 steps" if report is EQUAL else place
    said, *others = await shown("--set", "scaling.max_workers=4", "--set", "project=default")
    assert f"rehearsed: {report['outcome']} (2 ranks, 12 steps, everstep " in said
    assert all("as its submitter says" in each and words in each for each in others)
    tag = known(parse_spec(raw))
    for more in (["--set", "env.A=1"], ["--", "--lr", "1"]):
        said, why, page = await shown("--set", f"tags.{REHEARSAL_TAG}={tag}", *more)
        assert "not rehearsed: `everstep rehearse" in said and "Not rehearsed" in page
        assert "Rehearsed before" not in why + page
    (source / "train.py").write_text("import everstep.train as es  # another\n")
    said, why, page = await shown("--set", f"tags.{REHEARSAL_TAG}={tag}")
    assert "not rehearsed: `everstep rehearse" in said and "Rehearsed before" not in why + page


def test_a_difference_is_not_forgotten_for_a_smaller_rehearsal_that_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    code = {"archive": f"sha256:{'0' * 64}", "script": "train.py"}
    spec = parse_spec({"name": "a", "code": code})

    def outcome_after(report: dict[str, Any], **changes: Any) -> str:
        keep(spec, Rehearsal.model_validate(report | changes), 0)
        return str(known(spec)).partition(" ")[0]

    assert known(spec) is None
    assert outcome_after(DIFFERENT) == "different"
    assert outcome_after(EQUAL, ranks=1) == "different"
    assert outcome_after(EQUAL, outcome="impossible") == "different"
    assert outcome_after(EQUAL) == "equal"
