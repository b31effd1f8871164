"""When ranks that have exited have finished the run, and when those that have left are waited
for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train.controller import EverstepController
from train_fn.ray_train.ray_internals import (
    ReschedulingState,
    ResizeDecision,
    ResizingState,
    RestartingState,
    RunningState,
    SchedulingState,
    ShuttingDownState,
    TrainController,
    TrainingFailedError,
)
from train_fn.recovery.launch import YIELDED


@pytest.mark.parametrize(
    ("value", "asked", "requested", "finished", "stopped"),
    [
        # rank 0 had not heard that it was to make room: the run goes on
        ("pause", True, None, False, None),
        ("pause", True, "pause", True, "pause"),
        ("pause", False, None, True, "pause"),  # where saves fail
        ("cancel", True, "cancel", True, "cancel"),
        (YIELDED, True, None, False, None),
        (None, True, None, True, None),
    ],
)
def test_ranks_that_made_room_have_not_paused(
    value: str | None, asked: bool, requested: str | None, finished: bool, stopped: str | None
) -> None:
    controller: Any = SimpleNamespace(
        _yielding=SimpleNamespace(asked=asked),
        _journal=SimpleNamespace(stop_requested=requested),
        _driver=SimpleNamespace(is_leaving=False),
        _stopped=None,
    )
    status = SimpleNamespace(
        finished=True, errors={}, worker_statuses={0: SimpleNamespace(return_value=value)}
    )
    assert EverstepController._is_training_succeeded(controller, status) is finished
    assert controller._stopped == stopped


SIZE = ResizeDecision(num_workers=3, resources_per_worker={"CPU": 1})
ERROR = TrainingFailedError("a rank died")
RUNNING, RESIZING, SCHEDULING = RunningState(), ResizingState(SIZE), SchedulingState(SIZE)
RESTARTING, RESCHEDULING = RestartingState(ERROR), ReschedulingState(ERROR)


@pytest.mark.parametrize(
    ("states", "waits"),
    [
        ((RUNNING, RESIZING, SCHEDULING, RUNNING), (True, True, True, True)),
        ((RUNNING, RESTARTING, SCHEDULING, RUNNING), (True, False, False, True)),
        ((RUNNING, RESIZING, SCHEDULING, RESCHEDULING, SCHEDULING), (True,) * 4 + (False,)),
    ],
    ids=["of another size", "after a failure", "that does not start"],
)
def test_ranks_that_left_for_a_group_are_waited_for_when_the_driver_dies(
    states: tuple[Any, ...], waits: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their state may be in their memory alone, which their hosts lend as long as they live."""
    controller = EverstepController.__new__(EverstepController)
    controller._state, controller._resizes = states[0], False
    controller._driver = SimpleNamespace(is_leaving=False)  # type: ignore[assignment]
    controller._journal = SimpleNamespace(stop_requested=None)  # type: ignore[assignment]
    found = [controller._has_group()]
    for then in states[1:]:
        result = SimpleNamespace(next_state=then)

        async def step(self: Any, result: Any = result) -> Any:
            return result

        monkeypatch.setattr(TrainController, "_step", step)
        asyncio.run(controller._step())
        always = waits[len(found) - 1] and waits[len(found)]
        assert controller._has_group() or not always, "also before the state is set"
        controller._state = then
        found.append(controller._has_group())
    assert tuple(found) == waits


@pytest.mark.parametrize(
    ("state", "asked", "is_open", "keeps"),
    [
        (SCHEDULING, True, True, True),  # the driver has died since they were asked
        (ShuttingDownState(next_state=RUNNING), True, True, True),
        (ShuttingDownState(next_state=RUNNING), False, True, False),  # they have saved
        (SCHEDULING, True, False, False),  # kept when its failure was judged
    ],
)
def test_what_ranks_have_handed_over_is_kept_when_the_driver_dies(
    state: Any, asked: bool, is_open: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    controller: Any = object.__new__(EverstepController)
    controller._driver = SimpleNamespace(is_leaving=True)
    controller._yielding = SimpleNamespace(asked=asked, reset=lambda: None)
    controller._sizes = SimpleNamespace(draining=frozenset())
    controller._attempt_log = SimpleNamespace(is_open=is_open, ended=lambda cause: None)
    controller._stopped = None
    controller.worker_group_cls = SimpleNamespace(
        keeps_hosts=True, hosts=SimpleNamespace(end=lambda: None)
    )
    controller._worker_group = SimpleNamespace(
        keep_hosts=lambda steps: found.append("states"),
        get_workers=lambda: [],
        shutdown=lambda: None,
    )
    monkeypatch.setattr(EverstepController, "get_state", lambda self: state)
    EverstepController._shutdown_worker_group(controller)
    assert found == ["states"] * keeps
