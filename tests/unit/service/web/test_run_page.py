"""The page of one run: its failures, buttons, checkpoints and logs."""

from __future__ import annotations

import re
from html import unescape

import pytest

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.web.rendering import marks
from storage.checkpoints.store import CheckpointStore
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService
from tests.support.page_text import fail, text_of
from tests.support.projected_events import event
from tests.support.web_browser import Browser, status_of
from tests.unit.service.api.test_api_checkpoints import save


@pytest.fixture
async def browser(api: ApiService) -> Browser:
    return await Browser.logged_in(api, api.token("admin"))


async def test_a_run_through_a_failure_is_told(api: ApiService, browser: Browser) -> None:
    run_id, journal = await api.running()
    api.clock.now += 10
    journal.at = api.clock.now
    evidence = {"exit_code": -9, "last_lines": ["one", "two"], "node": {"state": "DEAD"}}
    api.apply(
        run_id,
        [
            journal.steps(5),
            fail(journal, exception="Traceback\nRuntimeError: boom", evidence=evidence),
        ],
    )
    html = await browser.page(f"/runs/{run_id}")
    text = text_of(html)
    assert (
        "Recovering" in text
        and "with rank 1 was lost at step 5" in text
        and "cause: RuntimeError: boom" in text
    )
    assert "one two" in text and "state: DEAD" in text
    assert 'class="a-training"' in html and 'class="a-waiting"' in html and 'class="fault"' in html
    assert "Productive" in text and 'data-stream="/runs/' in html
    journal.attempt = 2
    api.apply(run_id, [*journal.start(step=5, world_size=1), journal.steps(6, loss=0.25)])
    curves = (await browser.http.get(f"/runs/{run_id}/curves.json")).json()
    assert [point[0] for point in curves["series"]["loss"]] == [1, 5, 6]
    assert [(mark["step"], mark["label"]) for mark in curves["marks"]] == [
        (5, "attempt 2: node_lost of rank 1")
    ]
    api.apply(run_id, [journal.event(EventKind.FINISHED, outcome="stopped", step=6)])
    journal.attempt = 3
    api.apply(run_id, journal.start(step=6, world_size=1))
    curves = (await browser.http.get(f"/runs/{run_id}/curves.json")).json()
    assert [mark["sign"] for mark in curves["marks"]] == ["↻ 2", "▶ after a pause"]
    assert curves["seq"] == api.runs.get(run_id).last_seq  # type: ignore[union-attr]
    shown = text_of(await browser.page(f"/runs/{run_id}/events"))
    assert "attempt 2 with 1 rank" in shown and "failure: node_lost of rank 1" in shown


def test_a_mark_tells_a_preemption_from_a_pause_by_the_owner() -> None:
    preempted = {"code": "preempted_by_priority", "message": "by run_x"}
    found = marks(
        [
            event(EventKind.RESTORED, attempt=1, step=0),
            event(EventKind.STATUS, to="PAUSED", reason=preempted),
            event(EventKind.STATUS, to="QUEUED", reason=preempted),
            event(EventKind.RESTORED, attempt=2, step=5),
            event(EventKind.STATUS, to="PAUSED", reason=None),
            event(EventKind.RESTORED, attempt=3, step=7),
        ]
    )
    assert [mark["label"] for mark in found] == [
        "attempt 2: preempted",
        "attempt 3: resumed after a pause",
    ]
    assert [mark["sign"] for mark in found] == ["↻ 2", "▶ after a pause"]


async def test_the_head_says_reports_where_a_step_is_a_report(
    api: ApiService, browser: Browser
) -> None:
    async def figures(run_id: str) -> str:
        html = await browser.page(f"/runs/{run_id}")
        return text_of(html[html.index('id="figures"') : html.index("curves-title")])

    run_id, journal = await api.running()
    api.apply(run_id, [journal.steps(5), fail(journal)])
    journal.attempt = 2
    api.apply(
        run_id,
        [
            *journal.start(step=3, source="checkpoint", unit="reports"),
            journal.event(
                EventKind.RECOVERED,
                recovery_s=3.1,
                steps_lost=2,
                unit="reports",
                since_report_s=12.0,
            ),
        ],
    )
    text = await figures(run_id)
    assert "Reports lost 2 at most 12.0 s of work done again" in text and "Reports 3" in text
    assert "Steps" not in text
    assert "2 reports lost" in text_of(await browser.page("/runs"))
    compared = text_of(await browser.page(f"/compare?run={run_id}"))
    assert "1, 2 reports lost and at most 12.0 s of work between reports done again" in compared
    task, journal = await api.running()
    api.apply(task, [journal.steps(5)])
    text = await figures(task)
    assert "Steps lost 0" in text and "Steps 5" in text and "Reports" not in text


async def test_a_run_is_stopped_resumed_and_deleted_by_buttons(
    api: ApiService, browser: Browser
) -> None:
    run_id = await api.create()
    path = f"/runs/{run_id}"
    assert (await browser.send(path, f"{path}/pause")).headers["location"] == path
    assert status_of(api, run_id) == RunStatus.PAUSED and "/pause" not in await browser.page(path)
    assert (await browser.send(path, f"{path}/resume")).status_code == 303
    assert (await browser.send(path, f"{path}/cancel")).status_code == 303
    assert status_of(
        api, run_id
    ) == RunStatus.CANCELLED and "data-stream" not in await browser.page(path)
    csrf = re.search(r'name="csrf" value="([^"]*)"', await browser.page(path))
    assert csrf is not None
    refused = await browser.http.post(f"{path}/resume", data={"csrf": csrf[1]})
    assert refused.status_code == 409 and "Not possible now" in refused.text
    assert (await browser.send(path, f"{path}/delete")).headers["location"] == "/runs"
    assert api.runs.get(run_id) is None


async def test_a_step_s_time_is_shown_by_rank_and_a_rank_is_profiled(
    api: ApiService, browser: Browser
) -> None:
    run_id, journal = await api.running()
    path = f"/runs/{run_id}"
    use = {
        "node_id": "node-2",
        "name": "H200",
        "busy": 0.85,
        "used_bytes": 7,
        "total_bytes": 10,
        "allocated_bytes": 5,
    }
    rank = {"node_id": "node-1", "micro_batches": 1, "own_s": 0.0125, "wait_s": 0.0875, "skew": 0.2}
    slow = {"rank": 1, "node_id": "node-2", "step": 9, "own_s": 0.1, "peers_s": 0.0125, "skew": 8.0}
    api.apply(
        run_id,
        [
            journal.event(EventKind.GPU_USE, rank=1, **use),
            journal.event(EventKind.STRAGGLER, slow=True, **slow),
            journal.event(
                EventKind.RANK_TIMES,
                step=9,
                step_s=0.1,
                ranks=[{"rank": 0, **rank}, {"rank": 1, **rank, "skew": 8.0}],
            ),
        ],
    )
    html = await browser.page(path)
    assert (
        "12.5 ms" in html
        and "87.5 ms" in html
        and "Rank 1 on node <code>node-2</code> has held the others up" in html
    )
    assert "GPU 85 %, 7 B of 10 B" in html
    refused = await browser.send(path, f"{path}/profiles", rank="7", steps="2")
    assert refused.status_code == 422 and "ranks 0 to 1" in refused.text
    assert (await browser.send(path, f"{path}/profiles", rank="1", steps="0")).status_code == 422
    asked = await browser.send(path, f"{path}/profiles", rank="1", steps="2")
    assert (asked.status_code, asked.headers["location"]) == (303, f"{path}#times-title")
    order = RunDir(api.storage, run_id).profile_ordered(1)
    assert order is not None and (order.rank, order.steps) == (1, 2)
    assert "requested…" in await browser.page(path)
    run_dir = RunDir(api.storage, run_id)
    looked = await browser.send(path, f"{path}/stacks")
    assert (looked.status_code, looked.headers["location"]) == (303, f"{path}#stacks")
    stacks = run_dir.stacks_ordered(1)
    assert stacks is not None and "reload the page" in await browser.page(path)
    said = {"rank": 0, "node_id": "node-1", "does": "runs", "stack": "in <module>"}
    told = {"id": stacks.id, "quiet_s": 90.0, "step": 9, "summary": "rank 0 runs", "ranks": [said]}
    api.apply(run_id, [journal.event(EventKind.STACKS, **told)])
    html = await browser.page(path)
    assert "rank 0 runs" in html and "in &lt;module&gt;" in html and "reload" not in html
    run_dir.files.write(run_dir.trace_path(order.id), b"trace")
    done = {
        "id": order.id,
        "rank": 1,
        "steps": 2,
        "step_s": 0.1,
        "size_bytes": 5,
        "all_reduces": [],
    }
    api.apply(run_id, [journal.event(EventKind.PROFILE_DONE, **done)])
    assert f'href="{path}/profiles/{order.id}/trace"' in await browser.page(path)
    assert (await browser.http.get(f"{path}/profiles/{order.id}/trace")).content == b"trace"


async def test_checkpoints_are_downloaded_and_verified(api: ApiService, browser: Browser) -> None:
    run_id, journal = await api.running()
    path = f"/runs/{run_id}/checkpoints"
    assert "No checkpoint yet" in await browser.page(path)
    manifest = save(api, run_id, journal, 10, accuracy=0.5)
    assert "not yet" in await browser.page(path)
    archive = await browser.http.get(f"{path}/10/archive")
    assert (
        archive.headers["content-type"] == "application/x-tar"
        and manifest.name in archive.headers["content-disposition"]
    )
    CheckpointStore(RunDir(api.storage, run_id)).verify(manifest.name)
    answer = await browser.send(path, f"{path}/10/verify")
    assert answer.headers["location"] == f"{path}#step-10"
    assert "not yet" not in await browser.page(path)


async def test_deleted_checkpoints_are_folded_away_and_the_best_is_marked(
    api: ApiService, browser: Browser
) -> None:
    run_id, journal = await api.running(checkpoint={"best_metric": "accuracy"})
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.8)):
        api.apply(run_id, [journal.checkpoint(step, accuracy=accuracy)])
    gone = journal.event(EventKind.CHECKPOINT_DELETED, step=10, name="step-000000010.s001.a001")
    api.apply(run_id, [gone])
    html = await browser.page(f"/runs/{run_id}/checkpoints")
    shown, folded, behind = html.partition('<details id="deleted"')
    assert folded and "1 deleted checkpoint<" in behind
    assert re.findall(r'<tr id="step-(\d+)">', shown) == ["40", "30", "20"]
    assert 'id="name-step-000000010.s001.a001"' in behind and "Download" not in behind
    assert html.count("tag best") == 1
    assert "tag best" in shown.partition('<tr id="step-20">')[2]
    for step in (20, 30, 40):
        name = f"step-{step:09d}.s001.a001"
        api.apply(run_id, [journal.event(EventKind.CHECKPOINT_DELETED, step=step, name=name)])
    html = await browser.page(f"/runs/{run_id}/checkpoints")
    assert "4 deleted checkpoints" in html and "tag best" not in html


async def test_the_page_leads_with_the_metric_that_the_run_is_judged_by(
    api: ApiService, browser: Browser
) -> None:
    run_id, journal = await api.running()
    for step, loss in ((10, 0.25), (20, 0.5)):
        values = {"loss": loss, "f1": loss}
        api.apply(run_id, [journal.event(EventKind.EVALUATED, step=step, epoch=0, metrics=values)])
    text = text_of(await browser.page(f"/runs/{run_id}"))
    assert "Best val_loss 0.25 at step 10; latest 0.5 Steps" in text
    api.apply(run_id, [journal.steps(21, loss=1.0)])
    charts = (await browser.http.get(f"/runs/{run_id}/curves.json")).json()["charts"]
    assert charts[0]["names"] == ["loss", "val_loss"]
    save(api, run_id, journal, 5)
    fork = await api.create(resume_from={"run_id": run_id, "step": 5})
    assert f"forked from step 5 of {run_id}" in text_of(await browser.page(f"/runs/{fork}"))


async def test_specs_are_compared(api: ApiService, browser: Browser) -> None:
    one, two = (
        await api.create(train={"epochs": 3}),
        await api.create(train={"epochs": 4}, tags={"x": "y"}),
    )
    for path in (f"/runs/{one}/spec?against={two}", f"/compare?run={one}&run={two}"):
        html = await browser.page(path)
        assert (
            "train.epochs" in html
            and "tags.x" in html
            and "train.seed" not in html.split("Resolved spec")[0]
        )
    short = (await browser.page(f"/runs/{one}/spec")).split("Resolved spec")[0]
    assert "epochs: 3" in short and "seed" not in short
    await browser.page("/compare?" + "&".join(f"run=run_{index:012d}" for index in range(9)), 422)


async def test_logs_are_filtered_searched_and_paged(api: ApiService, browser: Browser) -> None:
    run_id, _ = await api.running()
    path = f"/runs/{run_id}/logs"
    assert "No lines yet" in await browser.page(path)
    for rank in (0, 1):
        with RankLogWriter(RunDir(api.storage, run_id), 1, 1, rank) as writer:
            writer.write(
                [
                    LogRecord(NOON + index, "info", f"rank {rank} says {index:04d}")
                    for index in range(1200)
                ]
            )
    api.logs.forget(run_id)
    newest = await browser.page(path)
    assert (
        "rank 1 says 1199" in newest
        and "says 0900" not in newest
        and newest.count('class="message"') == 500
    )
    [older] = re.findall(r'href="([^"]*before=\d+)">Older', newest)
    assert "says 0900" in await browser.page(unescape(older))
    one = await browser.page(f"{path}?rank=1")
    assert "rank 1 says 1199" in one and "rank 0" not in one
    found = text_of(await browser.page(f"{path}?search=SAYS+0007"))
    assert "rank 0 says 0007" in found and "rank 1 says 0007" in found and "0008" not in found
    assert "No matching lines" in await browser.page(f"{path}?search=absent")
    await browser.page(f"{path}?rank=x", 422)
