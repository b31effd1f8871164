"""Runs over HTTP: made once, read and listed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import Run
from tests.support.api_service import NOON, ApiService, spec
from tests.support.problems import problem


@pytest.fixture
async def either(tmp_path: Path, database_url: str) -> AsyncIterator[ApiService]:
    """On SQLite and on PostgreSQL."""
    async with ApiService(tmp_path, database_url=database_url) as service:
        yield service


# ---------------------------------------------------------------- made


async def test_a_run_is_made_and_read(api: ApiService) -> None:
    answer = await api.http.post("/v1/runs", json=spec(tags={"team": "vision"}, priority=3))
    assert answer.status_code == 201
    run = Run.model_validate(answer.json())
    assert answer.headers["location"] == f"/v1/runs/{run.id}"
    assert (run.status, run.priority, run.tags, run.attempt, run.goodput) == (
        "QUEUED",
        3,
        {"team": "vision"},
        0,
        None,
    )
    assert answer.json()["created_at"] == "2026-05-28T20:26:40.000Z"
    assert answer.json()["transitions"] == [
        {"from": None, "to": "QUEUED", "at": "2026-05-28T20:26:40.000Z", "reason": None}
    ]
    assert await api.get(f"/v1/runs/{run.id}") == answer.json()


async def test_answers_are_written_as_the_model_would(either: ApiService) -> None:
    """They are put together without it, from a row that knows less of the spec in lists."""
    run_id, journal = await either.running(
        recovery={"max_system_failures": 0}, tags={"team": "vision"}
    )
    either.apply(run_id, [journal.steps(2, 3), journal.checkpoint(3, val_accuracy=0.5)])
    other = await either.create()
    await either.http.post(f"/v1/runs/{other}/cancel")
    for answer in [await either.http.get(f"/v1/runs/{each}") for each in (run_id, other)]:
        assert answer.text == Run.model_validate_json(answer.text).model_dump_json(by_alias=True)
    listed = {run["id"]: run for run in (await either.get("/v1/runs"))["items"]}
    assert listed == {each: await either.get(f"/v1/runs/{each}") for each in (run_id, other)}
    found = listed[run_id]
    assert found["latest_checkpoint"]["step"] == 3 and found["protection"]["survives"] == ["driver"]
    assert (
        found["transitions"][-1]["to"] == found["status"]
        and listed[other]["reason"]["code"] == "cancelled_by_user"
    )


async def test_the_spec_comes_back_as_resolved(api: ApiService) -> None:
    run_id = await api.create()
    resolved = await api.get(f"/v1/runs/{run_id}/spec")
    assert resolved["train"]["global_batch_size"] == 128
    assert RunSpec.model_validate(resolved) == RunSpec.model_validate(spec())


# ---------------------------------------------------------------- idempotency


async def test_an_idempotency_key(either: ApiService) -> None:
    headers = {"Idempotency-Key": "k-1"}
    first = await either.http.post("/v1/runs", json=spec(), headers=headers)
    reordered = json.dumps(dict(reversed(spec().items())), indent=2)
    again = await either.http.post(
        "/v1/runs", content=reordered, headers={**headers, "content-type": "application/json"}
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    problem(
        await either.http.post("/v1/runs", json=spec(name="other"), headers=headers),
        409,
        "idempotency_conflict",
    )
    other = await either.http.post(
        "/v1/runs", json=spec(name="other"), headers={"Idempotency-Key": "k-2"}
    )
    assert other.status_code == 201
    assert len((await either.get("/v1/runs"))["items"]) == 2


async def test_keys_sent_many_times_at_once_make_one_run_each(either: ApiService) -> None:
    headers = [{"Idempotency-Key": f"k{number % 2}"} for number in range(20)]
    answers = await asyncio.gather(
        *(either.http.post("/v1/runs", json=spec(), headers=each) for each in headers)
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 18 + [201] * 2
    made = sorted((answer.json()["id"], answer.status_code) for answer in answers)
    assert {run_id for run_id, _ in made} == {
        run["id"] for run in (await either.get("/v1/runs"))["items"]
    }
    audit = (await either.get("/v1/audit"))["items"]
    assert sorted((entry["target"], entry["status"]) for entry in audit) == made


async def test_nothing_that_is_sent_becomes_a_header(api: ApiService) -> None:
    injected = "x\r\nX-Injected: 1"
    made = await api.http.post("/v1/runs", json=spec(tags={"t": injected}))
    paths = [
        f"/v1/runs/{quote(injected)}",
        f"/v1/runs?cursor={quote(injected)}",
        f"/v1/runs?tag={quote(injected)}",
    ]
    answers = [made, *[await api.http.get(path) for path in paths]]
    assert [answer.status_code for answer in answers] == [201, 404, 422, 200]
    assert not any("x-injected" in answer.headers for answer in answers)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a\rX-Injected: "
        b"1\r\nContent-Length: 0\r\n\r\n"
    )
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401")) and b"x-injected" not in head.lower()


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "ä"])
async def test_a_bad_idempotency_key(api: ApiService, key: str) -> None:
    headers = [(b"Idempotency-Key", key.encode("latin-1"))]
    answer = await api.http.post("/v1/runs", json=spec(), headers=headers)
    problem(answer, 422, "invalid_request")


# ---------------------------------------------------------------- listed


async def test_lists_page_and_filter(either: ApiService) -> None:
    ids = []
    for index in range(7):
        either.clock.now = NOON + index // 2
        ids.append(await either.create(name=f"n{index % 2}", tags={"i": str(index)}))
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = await either.get(
            f"/v1/runs?limit=3&cursor={cursor}" if cursor else "/v1/runs?limit=3"
        )
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert sorted(seen) == sorted(ids)
    await either.http.post(f"/v1/runs/{ids[0]}/cancel")

    async def found(query: str) -> set[int]:
        return {ids.index(item["id"]) for item in (await either.get(f"/v1/runs?{query}"))["items"]}

    assert await found("name=n1") == {1, 3, 5}
    assert await found("status=CANCELLED") == {0}
    assert await found("status=cancelled,QUEUED&limit=100") == set(range(7))
    assert await found("status=CANCELLED&status=QUEUED") == set(range(7))
    assert await found("tag=i%3D3") == await found("tag=i=3") == await found("tag=i:3") == {3}
    assert await found("tag=i") == set(range(7))
    assert await found("tag=i%3D3&tag=i%3D4") == set()
    assert await found("project=nobody") == set()


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=501",
        "limit=x",
        "status=SLEEPING",
        "cursor=x",
        "cursor=%00",
        "cursor=bnVsbA",
        "cursor=W10",
        "cursor=" + "a" * 300,
    ],
)
async def test_bad_list_parameters(api: ApiService, query: str) -> None:
    assert (
        problem(await api.http.get(f"/v1/runs?{query}"), 422, "invalid_request").errors[0].loc[0]
        == query.split("=")[0]
    )


@pytest.mark.parametrize(
    "run_id", ["run_000000000000", "nothing", "run_%00", "..%2f..", "run_' OR 1=1"]
)
async def test_runs_that_do_not_exist(api: ApiService, run_id: str) -> None:
    for path in (
        "",
        "/spec",
        "/events",
        "/attempts",
        "/metrics",
        "/logs",
        "/checkpoints",
        "/failures",
        "/goodput",
        "/samples",
    ):
        problem(await api.http.get(f"/v1/runs/{run_id}{path}"), 404, "not_found")
    for action in ("cancel", "pause", "resume"):
        problem(await api.http.post(f"/v1/runs/{run_id}/{action}"), 404, "not_found")
    problem(await api.http.delete(f"/v1/runs/{run_id}"), 404, "not_found")


# ---------------------------------------------------------------- stopped, resumed, deleted


async def test_a_run_that_trains_shows_where_and_how(api: ApiService) -> None:
    run_id, _ = await api.running()
    api.clock.now += 4
    run = Run.model_validate(await api.get(f"/v1/runs/{run_id}"))
    assert (run.status, run.step, run.total_steps, run.world_size, run.attempt, run.submission) == (
        "RUNNING",
        1,
        30,
        2,
        1,
        1,
    )
    assert run.metrics == {"loss": 0.5}
    assert run.goodput == pytest.approx(1.0)
    assert run.links.ray_job == f"http://ray.example:8265/#/jobs/{run_id}-s001"
    assert run.protection.survives == ("rank", "node", "driver")
    api.cluster.dashboard_url = None
    assert Run.model_validate(await api.get(f"/v1/runs/{run_id}")).links.ray_job is None


async def test_what_was_answered_of_an_ended_run_is_answered_again_until_it_changes(
    api: ApiService,
) -> None:
    ended, waiting = await api.create(name="ended"), await api.create(name="waiting")
    await api.http.post(f"/v1/runs/{ended}/cancel")
    first = await api.get("/v1/runs")
    assert await api.get("/v1/runs") == first
    assert first["items"] == [
        await api.get(f"/v1/runs/{run_id}") for run_id in sorted((ended, waiting), reverse=True)
    ]
    await api.http.post(f"/v1/runs/{waiting}/cancel")
    api.cluster.dashboard_url = "http://elsewhere:8265"
    second = {run["id"]: run for run in (await api.get("/v1/runs"))["items"]}
    assert {run["status"] for run in second.values()} == {"CANCELLED"}
    assert {run["links"]["ray_dashboard"] for run in second.values()} == {"http://elsewhere:8265"}
    assert (await api.http.delete(f"/v1/runs/{ended}")).status_code == 204
    assert [run["id"] for run in (await api.get("/v1/runs"))["items"]] == [waiting]
