"""A run whose ranks were killed is replayed through the service, in runs of their own that are
killed too: equal, or the first step that differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from everstep.client.runs import RunHandle
from everstep.wire.events import EventKind
from tests.support.service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.chaos

STEPS = 3000


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess(nodes=2, env={"EVERSTEP_DRILLS": "1"}) as running:
        yield running


def spec(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet", "args": {"width": 8, "blocks_per_stage": 1}},
            "data": {"name": "digits"},
        },
        "train": {
            "epochs": 1000,
            "max_steps": STEPS,
            "eval_every_epochs": 1000,
            "global_batch_size": 128,
            "seed": 5,
        },
        "scaling": {"min_workers": 2, "max_workers": 2, "use_gpu": False},
        "checkpoint": {"every_steps": 500, "keep_latest": 9},
    }


def at_step(run: RunHandle, step: int) -> None:
    wait_for(lambda: run.refresh().step >= step, 300, f"step {step} of {run.id}")


@pytest.mark.timeout(900)
def test_a_killed_run_is_equal_to_its_killed_replay_and_a_change_is_named(
    service: ServiceProcess,
) -> None:
    client = service.client()
    twin, run = client.runs.create(spec("twin")), None
    twin.wait(300)
    run = client.runs.create(spec("killed"))
    at_step(run, 600)
    run.drill("kill_worker", rank=1).wait(300)
    run.wait(300)
    assert run.restarts > 0 and run.chain == twin.refresh().chain is not None

    whole = run.replay(0, STEPS)
    at_step(whole, 800)
    whole.drill("kill_worker", rank=0).wait(300)
    found = whole.wait(300).replay_of
    assert found is not None and (found.result, found.compared) == ("equal", STEPS), found
    assert whole.chain == run.chain
    assert [each.id for each in run.replays()] == [whole.id]

    begin = [each.step for each in run.checkpoints() if each.step < STEPS][-1]
    part = run.replay(begin, begin + 30).wait(300).replay_of
    assert part is not None and (part.result, part.compared) == ("equal", 30), part

    changed = run.replay(begin, begin + 10).spec().model_dump(mode="json")
    changed["optimizer"]["lr"] *= 1.0001
    other = client.runs.create(changed).wait(300).replay_of
    assert other is not None and other.result == "differs", other
    assert other.step == begin + 2 and "gradient" in other.differs, other


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["corrupt_gradient", "corrupt_weights"])
def test_a_flipped_bit_is_found_and_the_run_ends_as_its_twin(
    service: ServiceProcess, kind: str
) -> None:
    client = service.client()
    [twin] = [run for run in client.runs.list() if run.name == "twin"]
    run = client.runs.create(spec(kind))
    at_step(run, 1000)
    drill = run.drill(kind, rank=1).wait(300)
    assert drill.report is not None and drill.report.verdict == "silent_corruption", drill.report
    run.wait(300)
    [failure] = [each for each in run.failures() if each.verdict == "silent_corruption"]
    assert failure.first_rank is None and "no majority" in str(failure.exception)
    assert run.chain == twin.chain
    [restored] = [event.data["step"] for event in run.events() if event.kind == EventKind.RESTORED][
        1:
    ]
    assert (failure.step is not None and restored <= failure.step - 64) or restored == 0
