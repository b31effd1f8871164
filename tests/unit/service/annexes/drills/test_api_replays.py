"""Replays over HTTP: a run of its own with the spec of the first, refused by field where nothing
could be proven."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.wire.events import EventKind
from tests.support.api_service import ApiService, Journal
from tests.unit.service.api.test_api_checkpoints import save


def steps(journal: Journal, *numbers: int) -> Any:
    proof = {"chain": "c" * 32, "gradient": "0" * 16, "weights": "0" * 16}
    points = [
        {"step": step, "at": 0.0, "values": {"loss": 1.0}, "proof": proof} for step in numbers
    ]
    return journal.event(EventKind.METRICS, points=points)


async def trained(api: ApiService) -> tuple[str, Journal]:
    """A run of two ranks that has done 30 steps, with checkpoints of steps 10 and 20."""
    scaling = {"max_workers": 2}
    run_id, journal = await api.running(train={"epochs": 3}, scaling=scaling)
    api.apply(run_id, [steps(journal, *range(1, 31))])
    for step in (10, 20):
        save(api, run_id, journal, step)
    return run_id, journal


async def ask(api: ApiService, run_id: str, status: int = 201, **body: Any) -> Any:
    answer = await api.http.post(f"/v1/runs/{run_id}/replays", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_replay_is_a_run_of_its_own_that_is_told_its_result(api: ApiService) -> None:
    run_id, _ = await trained(api)
    before = await api.get(f"/v1/runs/{run_id}")
    made = await ask(api, run_id, from_step=10, to_step=15)
    of = made["replay_of"]
    assert (of["run_id"], of["from_step"], of["to_step"]) == (run_id, 10, 15)
    assert (of["result"], made["forked_from"], made["status"]) == (None, None, "QUEUED")
    spec = await api.get(f"/v1/runs/{made['id']}/spec")
    first = await api.get(f"/v1/runs/{run_id}/spec")
    section = {"run_id": run_id, "from_step": 10, "to_step": 15, "max_workers": 2}
    assert spec["replay"] == section
    assert (spec["scaling"]["min_workers"], spec["scaling"]["max_workers"]) == (2, 2)
    assert isinstance(spec["train"]["micro_batch_size"], int)
    same = {"task", "optimizer", "schedule", "env"}
    assert {name: spec[name] for name in same} == {name: first[name] for name in same}
    assert await api.get(f"/v1/runs/{run_id}") == before, "nothing of the first has changed"

    api.runs.claim_submission(made["id"], 0)
    api.runs.record_job(made["id"], 1, f"{made['id']}-s001")
    again = Journal(at=api.clock.now)
    api.apply(
        made["id"],
        [
            *again.start(step=10),
            again.event(
                EventKind.REPLAY_COMPARED,
                **{
                    **of,
                    "result": "differs",
                    "step": 12,
                    "differs": ["loss"],
                    "message": "step 12",
                },
            ),
        ],
    )
    told = (await api.get(f"/v1/runs/{made['id']}"))["replay_of"]
    assert (told["result"], told["step"], told["differs"]) == ("differs", 12, ["loss"])
    [listed] = (await api.get(f"/v1/runs/{run_id}/replays"))["items"]
    assert (listed["id"], listed["replay_of"]) == (made["id"], told)
    assert (await api.get(f"/v1/runs/{made['id']}/replays"))["items"] == []


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"from_step": 15, "to_step": 20}, "replay.from_step", "choose one of steps 10, 20"),
        ({"from_step": 10, "to_step": 31}, "replay.to_step", "has done 30 steps"),
        ({"from_step": 10, "to_step": 10}, "replay.to_step", "greater than from_step"),
        ({"from_step": 10, "to_step": 15, "workers": 1}, "scaling.max_workers", "by 2 ranks"),
    ],
)
async def test_what_could_prove_nothing_is_refused_by_field(
    api: ApiService, body: dict[str, Any], field: str, words: str
) -> None:
    run_id, _ = await trained(api)
    answer = await ask(api, run_id, 422, **body)
    faults = {".".join(map(str, each["loc"])): each["msg"] for each in answer["errors"]}
    assert words in faults[field], faults


async def test_steps_of_several_sizes_are_refused_and_those_of_one_are_not(
    api: ApiService,
) -> None:
    run_id, journal = await trained(api)
    journal.attempt = 2
    api.apply(
        run_id,
        [
            *journal.start(step=20, world_size=1, source="checkpoint"),
            steps(journal, *range(21, 31)),
        ],
    )
    answer = await ask(api, run_id, 422, from_step=10, to_step=25)
    [fault] = answer["errors"]
    assert fault["loc"] == ["replay", "to_step"]
    assert "steps 1 to 20 by 2 ranks, steps 21 to 30 by 1 rank" in fault["msg"]
    made = await ask(api, run_id, from_step=20, to_step=25)
    spec = await api.get(f"/v1/runs/{made['id']}/spec")
    assert spec["scaling"]["max_workers"] == 1


async def test_steps_with_smaller_micro_batches_are_replayed_by_themselves_and_as_small(
    api: ApiService,
) -> None:
    train = {"epochs": 3, "micro_batch_size": 16, "on_out_of_memory": "smaller"}
    run_id, journal = await api.running(train=train, scaling={"max_workers": 2})
    api.apply(run_id, [steps(journal, *range(1, 13))])
    for step in (10, 12):
        save(api, run_id, journal, step)
    for attempt in (2, 3):
        journal.attempt = attempt
        begun = journal.start(step=12, source="snapshot")
        begun[-1].data["micro_batch_size"] = 8
        api.apply(run_id, begun)
    api.apply(run_id, [steps(journal, *range(13, 31))])
    answer = await ask(api, run_id, 422, from_step=10, to_step=15)
    assert "steps 13 to 30 by 2 ranks with micro-batches of 8" in answer["errors"][0]["msg"]
    for (begin, end), size in (((10, 12), 16), ((12, 15), 8)):
        made = await ask(api, run_id, from_step=begin, to_step=end)
        spec = await api.get(f"/v1/runs/{made['id']}/spec")
        assert spec["train"]["micro_batch_size"] == size
        raw = {**spec, "train": {**spec["train"], "micro_batch_size": 4}}
        answer = await api.http.post("/v1/runs", json=raw)
        assert answer.status_code == (422 if size == 8 else 201), "a change on purpose is compared"
    assert answer.json()["errors"][0]["loc"] == ["train", "micro_batch_size"]


async def test_an_elastic_run_is_replayed_by_any_number_of_ranks(api: ApiService) -> None:
    train = {"epochs": 3, "exactness": "elastic"}
    run_id, journal = await api.running(train=train, scaling={"max_workers": 2})
    api.apply(run_id, [steps(journal, *range(1, 31))])
    made = await ask(api, run_id, from_step=0, to_step=5, workers=1)
    spec = await api.get(f"/v1/runs/{made['id']}/spec")
    assert (spec["scaling"]["max_workers"], spec["replay"]["max_workers"]) == (1, 2)


async def test_a_run_without_digests_has_nothing_to_compare_with(api: ApiService) -> None:
    run_id, journal = await api.running(train={"epochs": 3}, scaling={"max_workers": 2})
    api.apply(run_id, [journal.steps(*range(1, 31), loss=1.0)])
    answer = await ask(api, run_id, 422, from_step=0, to_step=5)
    assert "has recorded no digests of its steps" in answer["errors"][0]["msg"]
