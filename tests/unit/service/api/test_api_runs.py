"""Runs over HTTP: good and bad requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import Problem, Run
from everstep.wire.events import EventKind
from service.api.kept_answers import KeptAnswers
from service.model.run_rows import RunHead
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService, spec


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        yield service


@pytest.fixture
async def either(tmp_path: Path, database_url: str) -> AsyncIterator[ApiService]:
    """On SQLite and on PostgreSQL."""
    async with ApiService(tmp_path, database_url=database_url) as service:
        yield service


def problem(answer: httpx.Response, status: int, code: str) -> Problem:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = Problem.model_validate(answer.json())
    assert (found.status, found.code) == (status, code)
    assert found.detail and "Traceback" not in answer.text
    return found


async def post_raw(
    api: ApiService, body: bytes, content_type: str | None = "application/json"
) -> httpx.Response:
    headers = {"content-type": content_type} if content_type else {}
    return await api.http.post("/v1/runs", content=body, headers=headers)


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


async def test_every_fault_is_told_at_once(api: ApiService) -> None:
    wrong = spec(
        colour="red",
        train={"global_batch_size": 8, "micro_batch_size": 16, "grad_clip_norm": float("inf")},
        scaling={"min_workers": 3, "max_workers": 2},
        optimizer={"name": "adamw", "lr": float("nan")},
        env={"RAY_ADDRESS": "x"},
    )
    wrong["task"]["model"] = {"name": "mini_resnet", "args": {"widht": 3}}
    found = problem(await post_raw(api, json.dumps(wrong).encode()), 422, "invalid_spec")
    assert {".".join(map(str, error.loc)) for error in found.errors} == {
        "colour",
        "train.micro_batch_size",
        "train.grad_clip_norm",
        "scaling.max_workers",
        "optimizer.lr",
        "env.RAY_ADDRESS",
        "task.model.args.widht",
    }
    assert (await api.get("/v1/runs"))["items"] == []


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"spec"', b"{}"])
async def test_json_that_is_no_spec(api: ApiService, body: bytes) -> None:
    assert problem(await post_raw(api, body), 422, "invalid_spec").errors


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"name": }',
        b'{"name": "a"} x',
        b"\xff\xfe{}",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b"name: yaml",
        b"\x00",
    ],
)
async def test_a_body_that_is_no_json(api: ApiService, body: bytes) -> None:
    problem(await post_raw(api, body), 400, "malformed_json")


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 70 + b"1" + b"}" * 70],
)
async def test_a_body_that_is_nested_too_deeply(api: ApiService, body: bytes) -> None:
    problem(await post_raw(api, body), 400, "too_deep")


async def test_a_body_that_is_too_large(api: ApiService) -> None:
    problem(await post_raw(api, b" " * (1 << 20) + b"{}"), 413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 65536

    answer = await api.http.post(
        "/v1/runs", content=chunks(), headers={"content-type": "application/json"}
    )
    problem(answer, 413, "body_too_large")


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"],
)
async def test_a_body_of_another_type(api: ApiService, content_type: str) -> None:
    problem(
        await post_raw(api, json.dumps(spec()).encode(), content_type),
        415,
        "unsupported_media_type",
    )


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json; charset=utf-8", "application/vnd.everstep+json", "Application/JSON"],
)
async def test_kinds_of_json(api: ApiService, content_type: str | None) -> None:
    assert (await post_raw(api, json.dumps(spec()).encode(), content_type)).status_code == 201


@pytest.mark.parametrize(
    "fields",
    [
        {"\ud800": 1},
        {"tags": {"a": "\ud800"}},
        {"name": "\ud800"},
        {"name": "a\nb"},
        {"name": "x" * 129},
        {"tags": {str(index): "x" for index in range(65)}},
        {"priority": 10**30},
        {"priority": True},
        {"secrets": {"a": "../b"}},
        {"secrets": {"LD_PRELOAD": "b"}},
        {"resume_from": {"run_id": "x", "step": 1}},
        {"runtime_env": {"pip": ["x"]}},
        {"code": {"archive": "sha256:1"}},
    ],
)
async def test_odd_fields_are_faults_of_the_request(
    api: ApiService, fields: dict[str, Any]
) -> None:
    problem(await post_raw(api, json.dumps(spec(**fields)).encode()), 422, "invalid_spec")


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


async def test_one_key_sent_many_times_at_once_makes_one_run(either: ApiService) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(
        *(either.http.post("/v1/runs", json=spec(), headers=headers) for _ in range(20))
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len((await either.get("/v1/runs"))["items"]) == 1


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


async def test_unknown_paths_and_methods(api: ApiService) -> None:
    problem(await api.http.get("/v1/nothing"), 404, "not_found")
    answer = await api.http.put("/v1/runs")
    problem(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]


# ---------------------------------------------------------------- stopped, resumed, deleted


async def test_a_queued_run_pauses_resumes_and_is_cancelled(api: ApiService) -> None:
    run_id = await api.create()
    statuses = []
    for action in ("pause", "resume", "cancel"):
        answer = await api.http.post(f"/v1/runs/{run_id}/{action}")
        assert answer.status_code == 202
        statuses.append((answer.json()["status"], (answer.json()["reason"] or {}).get("code")))
    assert statuses == [
        ("PAUSED", "paused_by_user"),
        ("QUEUED", None),
        ("CANCELLED", "cancelled_by_user"),
    ]
    for action in ("pause", "resume", "cancel"):
        problem(await api.http.post(f"/v1/runs/{run_id}/{action}"), 409, "invalid_transition")
    run = Run.model_validate(await api.get(f"/v1/runs/{run_id}"))
    assert [change.to_status for change in run.transitions] == [
        "QUEUED",
        "PAUSED",
        "QUEUED",
        "CANCELLED",
    ]
    assert run.finished_at is not None


async def test_a_run_that_trains_stops_when_its_driver_says_so(api: ApiService) -> None:
    run_id, journal = await api.running()
    problem(await api.http.post(f"/v1/runs/{run_id}/resume"), 409, "invalid_transition")
    stopping = await api.http.post(f"/v1/runs/{run_id}/cancel")
    assert (stopping.status_code, stopping.json()["status"]) == (202, "STOPPING")
    assert (await api.http.post(f"/v1/runs/{run_id}/cancel")).status_code == 202, (
        "a retry is harmless"
    )
    problem(await api.http.post(f"/v1/runs/{run_id}/pause"), 409, "invalid_transition")
    api.apply(
        run_id,
        [
            journal.checkpoint(1),
            journal.event(EventKind.FINISHED, outcome="stopped", reason=None, step=1),
        ],
    )
    run = Run.model_validate(await api.get(f"/v1/runs/{run_id}"))
    assert (
        run.status == "CANCELLED"
        and run.latest_checkpoint is not None
        and run.latest_checkpoint.step == 1
    )


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


async def test_deleting_removes_directory_and_history(either: ApiService, tmp_path: Path) -> None:
    run_id = await either.create()
    problem(await either.http.delete(f"/v1/runs/{run_id}"), 409, "invalid_transition")
    directory = tmp_path / "storage" / "runs" / run_id
    RunDir(either.storage, run_id).write_spec(RunSpec.model_validate(spec()))
    assert directory.is_dir()
    await either.http.post(f"/v1/runs/{run_id}/cancel")
    answer = await either.http.delete(f"/v1/runs/{run_id}")
    assert (answer.status_code, answer.content) == (204, b"")
    assert not directory.exists()
    problem(await either.http.get(f"/v1/runs/{run_id}"), 404, "not_found")
    problem(await either.http.delete(f"/v1/runs/{run_id}"), 404, "not_found")


async def test_a_directory_that_cannot_be_removed_keeps_the_run(
    api: ApiService, tmp_path: Path
) -> None:
    run_id = await api.create()
    await api.http.post(f"/v1/runs/{run_id}/cancel")
    runs = tmp_path / "storage" / "runs"
    runs.parent.mkdir(exist_ok=True)
    # A symbolic link that leads nowhere but to itself: no user, not even root, can walk through it.
    runs.symlink_to(runs)
    answer = await api.http.delete(f"/v1/runs/{run_id}")
    found = problem(answer, 503, "storage_unavailable")
    assert str(runs) in found.detail and answer.headers["retry-after"]
    assert (await api.get(f"/v1/runs/{run_id}"))["status"] == "CANCELLED"
    runs.unlink()
    assert (await api.http.delete(f"/v1/runs/{run_id}")).status_code == 204


async def test_a_bug_is_a_problem_without_a_traceback(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(api.runs, "claimed_page", broken)
    answer = await api.http.get("/v1/runs")
    assert "secret detail" not in answer.text
    problem(answer, 500, "internal_error")


async def test_a_database_that_is_away(api: ApiService, tmp_path: Path) -> None:
    run_id = await api.create()
    api.database.close()
    for name in ("everstep.db", "everstep.db-wal", "everstep.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "everstep.db").mkdir()
    answer = await api.http.get(f"/v1/runs/{run_id}")
    problem(answer, 503, "database_unavailable")
    assert answer.headers["retry-after"] == "2"


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


def test_answers_that_were_not_asked_for_longest_make_room() -> None:
    kept = KeptAnswers(most_bytes=2000)
    heads = [RunHead(f"run_{index}", 0.0, 1) for index in range(3)]
    answers = [random.Random(index).randbytes(600) for index in range(3)]
    for head, answer in zip(heads[:2], answers, strict=False):
        kept.keep(head, "x", answer)
    assert [kept.get(head, "x") for head in (heads[1], heads[0])] == [answers[1], answers[0]]
    kept.keep(heads[2], "x", answers[2])
    assert [kept.get(head, "x") is not None for head in heads] == [True, False, True]
    assert (
        kept.get(heads[0], "y") is None and kept.get(heads[0]._replace(row_version=2), "x") is None
    )
    kept.keep(heads[0], "x", random.Random(3).randbytes(5000))
    assert [kept.get(head, "x") for head in heads] == [None, None, None], (
        "one that is larger than the room is not kept"
    )
