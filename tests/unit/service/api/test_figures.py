"""What Prometheus is told, and where the time of a project's runs went."""

from __future__ import annotations

from everstep.wire import ProjectGoodput
from everstep.wire.events import EventKind
from storage.logs.journal import JournalEvent
from tests.support.api_service import ApiService, Journal
from tests.support.page_text import fail, text_of
from tests.support.web_browser import Browser


async def figures(api: ApiService) -> dict[str, float]:
    lines = (await api.http.get("/metrics")).text.splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def a_hard_life(journal: Journal) -> list[JournalEvent]:
    return [
        journal.steps(1, 2, 3),
        journal.checkpoint(3),
        journal.event(EventKind.CHECKPOINT_FAILED, step=4, error="full"),
        fail(journal, verdict="worker_lost", detect_s=0.4),
        journal.event(
            EventKind.RECOVERED,
            recovery_s=2.5,
            steps_lost=1,
            world_size_before=2,
            world_size_after=1,
        ),
        journal.event(EventKind.STRAGGLER, slow=True, rank=0),
        fail(journal, verdict="of a newer driver", action="stop"),
        journal.event(EventKind.METRICS, nonsense=True),
    ]


async def test_what_happened_is_counted_once(api: ApiService) -> None:
    run_id, journal = await api.running()
    run = api.runs.get(run_id)
    assert run is not None
    seen = api.figures
    seen.started(run, 20.0)
    at_first = await figures(api)
    assert at_first['everstep_checkpoints_total{project="default",result="failed"}'] == 0, (
        "born before it counts"
    )
    api.clock.now += 3
    seen.applied(run, a_hard_life(journal))
    values = await figures(api)
    expected = {
        'everstep_queue_seconds_sum{project="default"}': 20,
        'everstep_steps_total{project="default"}': 3,
        'everstep_steps_lost_total{project="default"}': 1,
        'everstep_failures_total{project="default",verdict="worker_lost"}': 1,
        'everstep_failures_total{project="default",verdict="unknown"}': 1,
        'everstep_restarts_total{project="default",verdict="worker_lost"}': 1,
        'everstep_restarts_total{project="default",verdict="unknown"}': 0,
        'everstep_recovery_seconds_bucket{le="3.0",project="default",verdict="worker_lost"}': 1,
        'everstep_recovery_seconds_bucket{le="2.0",project="default",verdict="worker_lost"}': 0,
        'everstep_checkpoints_total{project="default",result="committed"}': 1,
        'everstep_checkpoints_total{project="default",result="failed"}': 1,
        'everstep_checkpoint_bytes_total{project="default"}': 1003,
        'everstep_stragglers_total{project="default"}': 1,
        "everstep_event_lag_seconds_count": 1,
        "everstep_event_lag_seconds_sum": 3,
        'everstep_ranks{project="default"}': 2,
    }
    assert {name: values[name] for name in expected} == expected


async def test_a_training_run_shows_its_speed_as_far_as_it_is_known(api: ApiService) -> None:
    run_id, journal = await api.running()
    point = {"step": 4, "at": 1.0, "values": {"samples_per_s": 310.0, "data_wait": 0.03}}
    api.apply(run_id, [journal.event(EventKind.METRICS, points=[point])])
    values = await figures(api)
    of_run = f'{{project="default",run="{run_id}"}}'
    assert values["everstep_run_samples_per_second" + of_run] == 310
    assert values["everstep_run_data_wait_ratio" + of_run] == 0.03
    assert not [name for name in values if "mfu" in name or "tokens" in name]
    browser = await Browser.logged_in(api, api.token("admin"))
    shown = text_of(await browser.page(f"/runs/{run_id}"))
    assert "Speed 310 samples/s, 3 % of a step waiting for data" in shown


async def test_the_oldest_queued_run_and_the_time_by_bucket(api: ApiService) -> None:
    await api.create(project="slow")
    api.clock.now += 90
    await api.create(project="slow")
    await api.running(project="fast")
    api.clock.now += 10
    values = await figures(api)
    assert values['everstep_queue_oldest_seconds{project="slow"}'] == 100
    assert values['everstep_queue_oldest_seconds{project="fast"}'] == 0
    assert values['everstep_run_time_seconds{bucket="queued",project="slow"}'] == 110
    assert values['everstep_run_time_seconds{bucket="productive",project="fast"}'] == 10
    assert values['everstep_goodput_ratio{project="fast"}'] == 1


async def test_a_token_of_one_project_sees_its_own_time_only(api: ApiService) -> None:
    await api.create(project="mine")
    await api.create(project="theirs")
    api.clock.now += 5
    mine = await api.client(api.token("viewer", "mine"))
    assert (await mine.get("/metrics")).status_code == 403
    for query, names in (("", ["mine"]), ("?project=mine", ["mine"]), ("?project=theirs", [])):
        items = (await mine.get(f"/v1/goodput{query}")).json()["items"]
        assert [ProjectGoodput.model_validate(item).project for item in items] == names
    everyone = (await api.get("/v1/goodput"))["items"]
    assert [
        (item["project"], item["runs"], item["wall_s"], item["goodput"]) for item in everyone
    ] == [
        ("mine", 1, 5, None),
        ("theirs", 1, 5, None),
    ]


async def test_a_project_s_buckets_are_the_sum_of_its_runs(api: ApiService) -> None:
    ids = []
    for _ in range(3):
        run_id, journal = await api.running()
        api.clock.now += 7.25
        api.apply(run_id, [journal.steps(2, at=api.clock.now), journal.steps(3)])
        ids.append(run_id)
    api.apply(ids[2], [journal.event(EventKind.FINISHED, outcome="succeeded", step=3)])
    ids.append(await api.create())
    assert (await api.http.post(f"/v1/runs/{ids[3]}/pause")).status_code == 202
    api.clock.now += 100
    of_runs = [await api.get(f"/v1/runs/{run_id}/goodput") for run_id in ids]
    [total] = (await api.get("/v1/goodput"))["items"]
    assert total["runs"] == 4 and total["wall_s"] == sum(each["wall_s"] for each in of_runs)
    for name, seconds in total["buckets"].items():
        assert seconds == sum(each["buckets"][name] for each in of_runs), name
    assert total["buckets"]["productive"] > 0 and total["buckets"]["paused"] == 100
