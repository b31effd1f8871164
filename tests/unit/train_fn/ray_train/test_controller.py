"""When ranks that have exited have finished the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from train_fn.ray_train.controller import EverstepController
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
