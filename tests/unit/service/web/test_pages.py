"""Pages of the dashboard: what they show in every state, and that nothing that users wrote is
markup."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import insert, update

from everstep.spec.parsing import parse_spec
from everstep.wire import Reason, ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.db.ids import new_run_id
from service.db.new_run import new_row
from service.db.tables import runs as runs_table
from storage.checkpoints.store import CheckpointStore
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService, Journal, spec
from tests.support.web_browser import Browser, status_of
from tests.unit.service.api.test_api_checkpoints import save

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        yield service


@pytest.fixture
async def browser(api: ApiService) -> Browser:
    return await Browser.logged_in(api, api.token("admin"))


def text_of(html: str) -> str:
    """What a reader sees."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def fail(journal: Journal, **data: Any) -> Any:
    fields = {
        "verdict": "node_lost",
        "first_rank": 1,
        "node_id": "node-2",
        "step": 5,
        "exception": None,
        "evidence": {},
    }
    fields |= {
        "action": "restarted",
        "budget": "system",
        "steps_lost": 0,
        "detect_s": 1.5,
        "recovery_s": None,
    }
    fields |= {"world_size_before": 2, "world_size_after": 1}
    return journal.event(EventKind.FAILURE, **fields | data)


# ---------------------------------------------------------------- runs


async def test_empty_pages_say_what_to_do(browser: Browser) -> None:
    assert "No runs yet" in await browser.page("/runs")
    assert "No matching runs" in await browser.page("/runs?search=nothing")
    assert "The queue is empty" in await browser.page("/queue")
    assert "Choose runs" in await browser.page("/compare")
    assert (await browser.http.get("/")).headers["location"] == "/runs"
    assert "does not exist" in await browser.page("/runs/run_000000000000", 404)


async def test_runs_are_searched_filtered_and_paged(api: ApiService, browser: Browser) -> None:
    wanted = await api.create(name="Vision 100", tags={"team": "red_pandas"}, project="vision")
    failed = await api.create(name="speech")
    api.runs.transition(
        failed,
        RunStatus.QUEUED,
        RunStatus.FAILED,
        Reason(code=ReasonCode.INFEASIBLE, message="too large"),
    )
    for query in (
        "search=vision",
        "search=d_pand",
        f"search={wanted[6:]}",
        "project=vision",
        "tag=team%3Dred_pandas",
        "tag=team",
    ):
        html = await browser.page(f"/runs?{query}")
        assert wanted in html and failed not in html, query
    assert (
        failed in (html := await browser.page("/runs?status=failed"))
        and wanted not in html
        and "too large" in html
    )
    assert wanted in (html := await browser.page("/runs?status=active")) and failed not in html
    for nothing in ("search=%25", "search=d%5Fx", "search=_00"):  # no wildcards
        assert "No matching runs" in await browser.page(f"/runs?{nothing}")
    listed = await api.get("/v1/runs?search=PANDA")
    assert [item["id"] for item in listed["items"]] == [wanted]
    for index in range(50):
        api.clock.now += 1
        await api.create(name=f"more {index}")
    first = await browser.page("/runs")
    [older] = re.findall(r'href="([^"]*)" rel="next"', first)
    assert wanted not in first and wanted in await browser.page(unescape(older))


async def test_the_list_is_small_with_6000_runs(api: ApiService, browser: Browser) -> None:
    wanted = parse_spec(spec())
    rows = [
        new_row(new_run_id(NOON + index), wanted, "tok_x", NOON + index).columns()
        for index in range(6000)
    ]
    with api.database.write() as connection:
        connection.execute(insert(runs_table), rows)
    answer = await browser.http.get("/runs?search=digits")
    assert "6,000" in answer.text
    total = int(answer.headers["content-length"])
    for address in set(re.findall(r'(?:href|src)="(/static/[^"]*)"', answer.text)):
        asset = await browser.http.get(address)
        assert (
            asset.headers["content-encoding"] == "gzip"
            and "immutable" in asset.headers["cache-control"]
        )
        total += int(asset.headers["content-length"])
    assert total < 60_000


# ---------------------------------------------------------------- one run


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
    assert curves["seq"] == api.runs.get(run_id).last_seq  # type: ignore[union-attr]
    shown = text_of(await browser.page(f"/runs/{run_id}/events"))
    assert "attempt 2 with 1 rank" in shown and "failure: node_lost of rank 1" in shown


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
        and "Rank 1 on node <code>node-2</code> has been a straggler" in html
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


async def test_a_fork_is_submitted_once_and_its_faults_are_shown(
    api: ApiService, browser: Browser
) -> None:
    run_id = await api.create(name="digits", tags={"a": "b"})
    path = f"/runs/{run_id}/fork"
    html = await browser.page(path)
    resolved = json.loads(
        unescape(re.search(r"<textarea[^>]*>(.*?)</textarea>", html, re.DOTALL)[1])
    )  # type: ignore[index]
    assert resolved["name"] == "digits-fork" and resolved["tags"] == {"a": "b"}
    assert "best_mode" not in resolved["checkpoint"], (
        "it follows from a best_metric that may be changed"
    )
    wrong = resolved | {"train": {"epochs": 0}, "nonsense": HOSTILE}
    for text, words in (
        (json.dumps(wrong), "train.epochs"),
        ("{", "is not JSON"),
        ("[" * 5000, "spec"),
    ):
        answer = await browser.send(path, path, spec=text)
        assert (
            answer.status_code == 422
            and words in answer.text
            and "<script>alert" not in answer.text
        )
    fields = dict(
        re.findall(
            r'<input type="hidden" name="([^"]*)" value="([^"]*)"',
            html.split(f'action="{path}"')[1],
        )
    )
    fields["spec"] = json.dumps(resolved)
    made = [(await browser.http.post(path, data=fields)).headers["location"] for _ in range(2)]
    assert made[0] == made[1] and made[0] != f"/runs/{run_id}"


async def test_a_checkpoint_is_named_in_a_fork_from_it(api: ApiService, browser: Browser) -> None:
    run_id = await api.create()
    assert f'{{"run_id": "{run_id}", "step": 10}}' in re.sub(
        r"\s+", " ", unescape(await browser.page(f"/runs/{run_id}/fork?step=10"))
    ).replace("{ ", "{").replace(" }", "}")


async def test_a_run_of_an_older_version_is_forked(api: ApiService, browser: Browser) -> None:
    run_id = await api.create()
    old = {"name": "digits", "task": spec()["task"]}  # as resolved: without later sections
    with api.database.write() as connection:
        connection.execute(update(runs_table).values(spec=old))
    assert "mini_resnet" in await browser.page(f"/runs/{run_id}/fork?step=10")
    assert "1 rank of 1 CPU" in re.sub(r"<[^>]*>", "", await browser.page("/queue"))


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
    api.context.logs.forget(run_id)
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


# ---------------------------------------------------------------- cluster and queue


async def test_nodes_are_shown_and_marked(api: ApiService, browser: Browser) -> None:
    api.cluster.nodes = (
        api.cluster.node("node-1"),
        api.cluster.node("node-2"),
        api.cluster.node("node-3", "DEAD"),
    )
    run_id, _ = await api.running()
    text = text_of(await browser.page("/cluster"))
    assert "Live nodes 2" in text and "digits rank 0" in text and "digits rank 1" in text
    assert (
        await browser.send("/cluster", "/cluster/nodes/node-2/cordon", reason="bad disk")
    ).status_code == 303
    text = text_of(await browser.page("/cluster"))
    assert "Cordoned" in text and "bad disk" in text
    assert (
        await browser.send("/cluster", "/cluster/nodes/node-2/drain", deadline_min="-1")
    ).status_code == 422
    assert (
        await browser.send("/cluster", "/cluster/nodes/node-2/drain", deadline_min="10")
    ).status_code == 303
    assert "Draining" in await browser.page("/cluster")
    assert (await browser.send("/cluster", "/cluster/nodes/node-2/uncordon")).status_code == 303
    assert "bad disk" not in await browser.page("/cluster")
    viewer = await Browser.logged_in(api, api.token("viewer"))
    assert "/drain" not in await viewer.page("/cluster") and run_id in await viewer.page("/cluster")
    api.cluster.available = False
    assert "Ray does not respond" in await browser.page("/cluster")


async def test_the_queue_is_in_the_order_of_starts(api: ApiService, browser: Browser) -> None:
    ids = []
    for priority in (0, 5, 5):
        ids.append(
            await api.create(priority=priority, scaling={"min_workers": 2, "max_workers": 4})
        )
        api.clock.now += 1
    api.runs.set_reason(
        ids[0],
        RunStatus.QUEUED,
        Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message="needs 2 x CPU"),
    )
    html = await browser.page("/queue")
    assert sorted(ids, key=html.index) == [ids[1], ids[2], ids[0]]
    assert "needs 2 x CPU" in html and "2 to 4 ranks of 1 CPU" in text_of(html)


# ---------------------------------------------------------------- what users wrote is text


async def test_nothing_that_users_wrote_is_markup(api: ApiService, browser: Browser) -> None:
    run_id, journal = await api.running(tags={HOSTILE[:60]: HOSTILE}, env={"X": HOSTILE})
    api.apply(
        run_id,
        [
            journal.event(
                EventKind.METRICS, points=[{"step": 2, "at": NOON, "values": {HOSTILE: 1.0}}]
            ),
            fail(
                journal,
                exception=HOSTILE,
                evidence={HOSTILE: [HOSTILE]},
                action=HOSTILE,
                node_id=HOSTILE,
            ),
            journal.event(EventKind.WAITING, code="waiting_for_capacity", message=HOSTILE),
        ],
    )
    with RankLogWriter(RunDir(api.storage, run_id), 1, 1, 0) as writer:
        writer.write([LogRecord(NOON, f"x {HOSTILE}", HOSTILE)])
    other = await api.create(tags={"t": HOSTILE})
    api.runs.set_reason(
        other, RunStatus.QUEUED, Reason(code=ReasonCode.INFEASIBLE, message=HOSTILE)
    )
    paths = [
        f"/runs/{run_id}{tail}"
        for tail in ("", "/logs", "/events", f"/spec?against={other}", "/fork", "/checkpoints")
    ]
    for path in (*paths, "/runs", "/queue", f"/compare?run={run_id}&run={other}", "/cluster"):
        html = await browser.page(path)
        assert "<script>alert" not in html and (path == "/cluster" or "{{7*7}}" in html), path
    await browser.page(
        f"/runs?search={quote(HOSTILE)}&tag={quote(HOSTILE)}&project={quote(HOSTILE[:60])}"
    )
    answer = await browser.http.get(f"/runs/{run_id}/curves.json")
    assert (
        answer.headers["content-type"] == "application/json"
        and answer.headers["x-content-type-options"] == "nosniff"
    )


# ---------------------------------------------------------------- trouble, reference, links


async def test_a_database_that_is_away_is_a_page_too(
    api: ApiService, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.db.errors import DatabaseUnavailable

    def away(*_: object) -> None:
        raise DatabaseUnavailable("gone")

    monkeypatch.setattr(api.context.runs, "page", away)
    answer = await browser.http.get("/runs")
    assert (
        answer.status_code == 503
        and "Try again" in answer.text
        and answer.headers["retry-after"] == "2"
    )


async def test_the_reference_needs_nothing_from_elsewhere(api: ApiService) -> None:
    http = await api.client(None)
    answer = await http.get("/docs")
    assert (
        answer.status_code == 200
        and "default-src 'none'" in answer.headers["content-security-policy"]
    )
    assert not re.findall(r"https?://", answer.text)
    for address in re.findall(r'(?:href|src)="(/static/[^"]*)"', answer.text):
        assert (await http.get(address)).status_code == 200
    assert (await http.get("/static/../app.py")).status_code == 404
    assert (await http.get("/static/%2e%2e/rendering.py")).status_code == 404


async def test_a_kept_file_is_asked_for_once(api: ApiService) -> None:
    http = await api.client(None)
    first = await http.get("/static/everstep.css")
    again = await http.get("/static/everstep.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content, first.headers["cache-control"]) == (
        304,
        b"",
        "no-cache",
    )


async def test_a_run_links_to_its_page(api: ApiService) -> None:
    api.context.public_url = "https://everstep.example"
    run_id = await api.create()
    assert (await api.get(f"/v1/runs/{run_id}"))["links"][
        "dashboard"
    ] == f"https://everstep.example/runs/{run_id}"
