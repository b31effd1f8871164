"""Scrubbing: what is due is read back at a bounded rate, and damage becomes known before a restore
meets it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from service.reconciler import scrub as scrub_module
from service.reconciler.scrub import Pace, Scrubber, ScrubRule, ScrubStopped
from service.storage_identity import KeptSteps
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.support.api_service import ApiService
from tests.unit.service.api.test_api_checkpoints import save

DAY_S = 24 * 3600.0


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    monkeypatch.setattr(scrub_module, "PLAN_INTERVAL_S", 0.0)
    async with ApiService(tmp_path) as service:
        yield service


def scrubber(api: ApiService, rule: ScrubRule | None = None) -> Scrubber:
    return Scrubber(
        api.runs.checkpoints, api.events, api.storage, rule or ScrubRule(1e9, DAY_S), api.clock
    )


def damage(api: ApiService, run_id: str, name: str) -> None:
    (Path(CheckpointStore(RunDir(api.storage, run_id)).path(name)) / "train_state.pt").write_bytes(
        b"stat!"
    )


def leavings(api: ApiService, run_id: str) -> list[str]:
    """Directories that are no checkpoints."""
    run_dir = RunDir(api.storage, run_id)
    committed = {manifest.name for manifest in CheckpointStore(run_dir).list()}
    return [
        entry.name
        for entry in run_dir.files.list(run_dir.checkpoints_path())
        if entry.name not in committed
    ]


async def test_a_checkpoint_is_read_back_once_it_is_due(api: ApiService) -> None:
    run_id, journal = await api.running()
    save(api, run_id, journal, 10)
    scrubbing = scrubber(api)
    await scrubbing.work()
    assert (await api.get(f"/v1/runs/{run_id}/checkpoints/10"))["verified_at"] is None
    api.clock.now += DAY_S
    await scrubbing.work()
    verified = (await api.get(f"/v1/runs/{run_id}/checkpoints/10"))["verified_at"]
    assert verified is not None
    api.clock.now += DAY_S / 2
    await scrubbing.work()
    assert (await api.get(f"/v1/runs/{run_id}/checkpoints/10"))["verified_at"] == verified


async def test_damage_becomes_an_event_a_failure_and_a_figure(api: ApiService) -> None:
    run_id, journal = await api.running()
    sound, bad = save(api, run_id, journal, 10), save(api, run_id, journal, 20)
    damage(api, run_id, bad.name)
    api.clock.now += DAY_S
    scrubbing = scrubber(api)
    for _ in range(3):
        await scrubbing.work()
    events = [
        row for row in api.events.after(run_id, 0, 100) if row.kind == EventKind.CHECKPOINT_CORRUPT
    ]
    assert [(row.data["name"], row.data["found_by"]) for row in events] == [(bad.name, "scrub")]
    [failure] = (await api.get(f"/v1/runs/{run_id}/failures"))["items"]
    assert (failure["verdict"], failure["step"], failure["evidence"]["checkpoint"]) == (
        "storage",
        20,
        bad.name,
    )
    assert "train_state.pt" in failure["exception"]
    assert (await api.get(f"/v1/runs/{run_id}"))["latest_checkpoint"]["step"] == sound.step
    published = KeptSteps(api.storage, api.runs.checkpoints)
    published.publish()
    run_dir = RunDir(api.storage, run_id)
    store = CheckpointStore(run_dir)
    assert run_dir.kept().corrupt == {bad.name}, "its ranks hear of it"
    assert store.retain(1, None) == [] and store.list() == [sound, bad]
    states = {
        item["step"]: item["state"]
        for item in (await api.get(f"/v1/runs/{run_id}/checkpoints"))["items"]
    }
    assert states == {10: "committed", 20: "corrupt"}
    figures = (await api.http.get("/metrics")).text
    assert 'everstep_checked_checkpoints{result="corrupt"} 1.0' in figures
    assert 'everstep_checked_checkpoints{result="sound"} 1.0' in figures


async def test_a_run_that_ended_is_scrubbed_too_and_its_history_stays_closed(
    api: ApiService,
) -> None:
    run_id, journal = await api.running()
    gone, bad = save(api, run_id, journal, 10), save(api, run_id, journal, 20)
    api.apply(
        run_id, [journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=30)]
    )
    num_events = len(api.events.after(run_id, 0, 100))
    damage(api, run_id, bad.name)
    api.storage.files.delete_dir(f"runs/{run_id}/checkpoints/{gone.name}")
    api.clock.now += DAY_S
    scrubbing = scrubber(api)
    for _ in range(2):
        await scrubbing.work()
    states = {
        item["step"]: item["state"]
        for item in (await api.get(f"/v1/runs/{run_id}/checkpoints"))["items"]
    }
    assert states == {10: "corrupt", 20: "corrupt"}
    assert len(api.events.after(run_id, 0, 100)) == num_events


async def test_what_retention_just_deleted_is_not_damage(api: ApiService) -> None:
    run_id, journal = await api.running()
    name = save(api, run_id, journal, 10).name
    api.storage.files.delete_dir(f"runs/{run_id}/checkpoints/{name}")
    api.clock.now += DAY_S
    await scrubber(api).work()
    assert api.events.checkpoint_checks(run_id) == {}


async def test_leavings_of_a_run_are_collected_some_time_after_its_end(api: ApiService) -> None:
    run_id, journal = await api.running()
    save(api, run_id, journal, 10)
    scrubbing = scrubber(api)
    api.apply(
        run_id, [journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=30)]
    )
    store = CheckpointStore(RunDir(api.storage, run_id))
    writer = store.begin(20, 1, 1)
    await scrubbing.work()
    [leaving] = leavings(api, run_id)
    assert leaving.startswith(f".begun-{writer.name}-")
    api.clock.now += scrub_module.ORPHANS_AFTER_S + 1
    await scrubbing.work()
    assert leavings(api, run_id) == []
    assert [manifest.step for manifest in store.list()] == [10]


async def test_a_rate_of_zero_reads_nothing(api: ApiService) -> None:
    run_id, journal = await api.running()
    save(api, run_id, journal, 10)
    api.clock.now += 10 * DAY_S
    await scrubber(api, ScrubRule(0.0, DAY_S)).work()
    assert api.events.checkpoint_checks(run_id) == {}


def test_the_pace_is_the_rate_and_a_stop_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    now = [100.0]

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            now[0] += timeout
            return self.is_set()

    monkeypatch.setattr(scrub_module.time, "monotonic", lambda: now[0])
    stopping = Stopping()
    pace = Pace(1e6, stopping)
    pace(500_000)
    now[0] += 0.3  # reading took some of it
    pace(500_000)
    now[0] += 9  # what is late is not made up for
    pace(500_000)
    assert waits == pytest.approx([0.5, 0.2, 0.0])
    stopping.set()
    with pytest.raises(ScrubStopped):
        pace(1)
