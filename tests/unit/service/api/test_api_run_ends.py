"""Runs that are stopped, resumed and deleted over HTTP, and answers while a part is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import Run
from storage.cluster import IDENTITY_FILE
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, spec
from tests.support.problems import problem


@pytest.fixture
async def either(tmp_path: Path, database_url: str) -> AsyncIterator[ApiService]:
    """On SQLite and on PostgreSQL."""
    async with ApiService(tmp_path, database_url=database_url) as service:
        yield service


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
    gate, runs = api.storage_gate, tmp_path / "storage" / "runs"
    identity = tmp_path / "storage" / IDENTITY_FILE
    identity.rename(tmp_path / "own")
    gate.forget()
    problem(await api.http.delete(f"/v1/runs/{run_id}"), 503, "storage_unavailable")
    found = api.runs.get(run_id)
    assert found is not None and found.stop_requested is None, "other runs may still start from it"
    (tmp_path / "own").rename(identity)
    gate.forget()
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

    monkeypatch.setattr(api.runs, "page", broken)
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
