"""A script that reports no steps: what the API and the page say of its time and its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.text import words
from everstep.wire import Goodput, Run
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService, Journal
from tests.support.code_archives import tar_gz
from tests.support.web_browser import Browser
from tests.unit.service.web.test_pages import text_of


async def script_run(api: ApiService) -> tuple[str, Journal]:
    """A script that has begun to train."""
    uploaded = await api.http.post(
        "/v1/code", files={"file": ("code.tar.gz", tar_gz({"train.py": "print('trains')"}))}
    )
    code = {"archive": uploaded.json()["digest"], "script": "train.py"}
    answer = await api.http.post("/v1/runs", json={"name": "script", "code": code})
    assert answer.status_code == 201, answer.text
    run_id: str = answer.json()["id"]
    api.runs.claim_submission(run_id, 0)
    api.runs.record_job(run_id, 1, f"{run_id}-s001")
    journal = Journal(at=api.clock.now)
    attempt, restored, began = journal.start()
    unknown = {"total_steps": None, "steps_per_epoch": None, "guarantee": "up to you"}
    api.apply(run_id, [attempt, restored, replace(began, data=unknown)])
    return run_id, journal


async def test_what_a_script_did_before_a_failure_is_neither_a_restart_nor_counted(
    api: ApiService,
) -> None:
    run_id, journal = await script_run(api)
    began_at = api.clock.now
    api.clock.now = began_at + 100
    failed = {"verdict": "worker_lost", "first_rank": 1, "node_id": "node-2", "step": None}
    failed |= {"exception": None, "evidence": {"worked_s": 99.0}, "action": "restarted"}
    failed |= {"budget": "system", "detect_s": 1.0, "world_size_before": 2}
    failure = journal.event(EventKind.FAILURE, at=began_at + 100, **failed)
    api.clock.now = began_at + 105
    journal.attempt = 2
    recovered = {"recovery_s": 5.0, "steps_lost": None, "world_size_after": 2, "phases": {}}
    back = journal.event(EventKind.RECOVERED, at=began_at + 105, world_size_before=2, **recovered)
    api.apply(run_id, [failure, back])
    api.clock.now = began_at + 135
    goodput = Goodput.model_validate(await api.get(f"/v1/runs/{run_id}/goodput"))
    spent = {name: value for name, value in goodput.buckets.model_dump().items() if value}
    assert spent == pytest.approx(
        {"unreported": 99, "detecting": 1, "restarting": 5, "productive": 30}
    )
    assert goodput.goodput == pytest.approx(30 / 135), "what is known to count"


async def test_a_script_without_reports_has_none_instead_of_step_0(api: ApiService) -> None:
    run_id, journal = await script_run(api)
    browser = await Browser.logged_in(api, api.token("admin"))
    for path in (f"/runs/{run_id}", "/runs", f"/compare?run={run_id}"):
        assert "none reported" in text_of(await browser.page(path)), path
    shown = text_of(await browser.page(f"/runs/{run_id}"))
    assert "Steps none reported Epochs done \N{EN DASH} Ranks 2" in shown
    run = Run.model_validate(await api.get(f"/v1/runs/{run_id}"))
    assert words.progress(run) == "none reported" and words.where(run) == "RUNNING"
    api.apply(run_id, [journal.steps(7)])
    shown = text_of(await browser.page(f"/runs/{run_id}"))
    assert "Steps 7 Epochs done 0 Ranks 2" in shown
    assert words.where(Run.model_validate(await api.get(f"/v1/runs/{run_id}"))) == (
        "RUNNING at step 7"
    )
