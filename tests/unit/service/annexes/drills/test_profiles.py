"""Profiles from the command to the trace on disk, against the service's real API; the rank's part
is told by its journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep import Client, Conflict, InvalidSpec, NotFound
from everstep.wire.drills import Profile, ProfileState
from everstep.wire.events import EventKind
from storage.run_control import ProfileOrder
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal
from tests.support.command_line import everstep
from tests.support.page_text import fail

ALL_REDUCES = [{"bucket": 0, "size_bytes": 4000, "count": 3, "mean_s": 0.002, "max_s": 0.003}]


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        service.announce(monkeypatch, "submitter")
        yield service


async def listed(api: ApiService, run_id: str) -> list[Profile]:
    return [
        Profile.model_validate(item)
        for item in (await api.get(f"/v1/runs/{run_id}/profiles"))["items"]
    ]


async def asked(api: ApiService, run_id: str) -> Profile:
    """The profile that a client in another thread asks for, once its order is on its way."""
    async with asyncio.timeout(60):
        while RunDir(api.storage, run_id).profile_ordered(1) is None:  # noqa: ASYNC110  it comes from a thread
            await asyncio.sleep(0.01)
    return (await listed(api, run_id))[0]


def record(api: ApiService, run_id: str, journal: Journal, profile_id: str) -> None:
    """The rank records three steps from step 12 on, and keeps its trace."""
    named = {"id": profile_id, "rank": 1}
    run_dir = RunDir(api.storage, run_id)
    run_dir.files.write(run_dir.trace_path(profile_id), b"\x1f\x8b the trace")
    done = {**named, "steps": 3, "step_s": 0.01, "size_bytes": 12, "all_reduces": ALL_REDUCES}
    api.apply(
        run_id,
        [
            journal.event(EventKind.PROFILE_STARTED, **named, step=12),
            journal.event(EventKind.PROFILE_DONE, **done),
        ],
    )


async def test_the_command_waits_shows_all_reduces_and_fetches_the_trace(
    api: ApiService, tmp_path: Path
) -> None:
    run_id, journal = await api.running()
    target = tmp_path / "t.json.gz"
    command = asyncio.create_task(
        everstep("profile", run_id, "--rank", 1, "--steps", 3, "-o", target)
    )
    profile = await asked(api, run_id)
    assert (profile.state, profile.rank, profile.steps) == (ProfileState.REQUESTED, 1, 3)
    assert RunDir(api.storage, run_id).profile_ordered(1) == ProfileOrder(
        profile.id, 1, 3, attempt=1
    )
    record(api, run_id, journal, profile.id)
    done = await command
    assert done.exit_code == 0, done.output
    assert (
        "bucket 0" in done.output
        and "2.00 ms" in done.output
        and "3 steps from step 12, 10.00 ms each" in done.output
    )
    assert target.read_bytes() == b"\x1f\x8b the trace"
    [kept] = await listed(api, run_id)
    assert kept.state is ProfileState.DONE and kept.all_reduces[0].max_s == 0.003


async def test_a_profile_whose_attempt_ends_lapses_and_the_command_fails(api: ApiService) -> None:
    run_id, journal = await api.running()
    command = asyncio.create_task(everstep("profile", run_id, "--json"))
    profile = await asked(api, run_id)
    api.apply(run_id, [fail(journal)])
    done = await command
    assert done.exit_code == 1 and json.loads(done.stdout.splitlines()[0])["state"] == "lapsed"
    run = await asyncio.to_thread(Client().runs.get, run_id)
    [lapsed] = await asyncio.to_thread(run.profiles)
    assert lapsed.id == profile.id
    with pytest.raises(NotFound, match="the profile is lapsed"):
        await asyncio.to_thread(lapsed.download, "nowhere")
    with pytest.raises(Conflict, match="a profile needs a run that is RUNNING"):
        await asyncio.to_thread(run.profile)


async def test_what_is_refused_is_raised(api: ApiService) -> None:
    run_id, journal = await api.running()
    run = await asyncio.to_thread(Client().runs.get, run_id)
    with pytest.raises(InvalidSpec, match="ranks 0 to 1"):
        await asyncio.to_thread(lambda: run.profile(rank=2))
    with pytest.raises(InvalidSpec, match="steps"):
        await asyncio.to_thread(lambda: run.profile(steps=1000))
    first = await asyncio.to_thread(run.profile)
    with pytest.raises(Conflict, match="has not been taken up yet"):
        await asyncio.to_thread(run.profile)
    ordered = journal.event(EventKind.PROFILE_ORDERED, id=first.id, rank=0, steps=10)
    failed = journal.event(
        EventKind.PROFILE_FAILED, id=first.id, rank=0, problem="another profiler runs"
    )
    api.apply(run_id, [ordered, failed])
    await asyncio.to_thread(first.refresh)
    assert (first.state, first.problem) == (ProfileState.FAILED, "another profiler runs")
    second = await asyncio.to_thread(run.profile)
    assert second.id != first.id and second.id in repr(second)
