"""Another Ray is refused with the names that changed, and the table has every name that is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from train_fn.ray_train import ray_internals
from train_fn.ray_train.ray_internals import ATTRIBUTES, EXPECTED, check_ray, names_of


def test_another_ray_is_refused_by_name() -> None:
    for supported in ("2.58.1", "2.59.0", "2.60.3"):
        check_ray(supported, EXPECTED, ATTRIBUTES)
    with pytest.raises(ImportError, match=r"ray 2\.61\.0, and Everstep needs ray 2\.58 to 2\.60"):
        check_ray("2.61.0", EXPECTED, ATTRIBUTES)

    def make_decision(self: object, error: Exception, attempt: int) -> None: ...

    parameters = EXPECTED[ray_internals.FailurePolicy.make_decision]
    changed = {**EXPECTED, make_decision: parameters}
    with pytest.raises(
        ImportError,
        match=r"make_decision takes \(self, error, attempt\), not \(self, training_failed_error\)",
    ):
        check_ray("2.60.0", changed, ATTRIBUTES)


def test_a_ray_without_an_attribute_that_is_used_is_refused_by_name() -> None:
    class Bare:
        def __init__(self) -> None:
            self._latest_poll_time = 0.0

    with pytest.raises(ImportError, match=r"Bare has no _checkpoint_manager; Bare has no _state\."):
        check_ray("2.60.0", {}, {Bare: "_latest_poll_time _checkpoint_manager _state"})


def test_the_table_has_every_private_name_of_ray_that_is_used() -> None:
    owners = {
        "controller": (ray_internals.TrainController, ray_internals.ScalingConfig),
        "group/factory": (ray_internals.WorkerGroup,),
        "group/worker_group": (ray_internals.WorkerGroup,),
        "scaling": (ray_internals.ScalingPolicy, ray_internals.ScalingConfig),
        "trainer": (ray_internals.DataParallelTrainer,),
        "ray_checkpoints": (ray_internals.CheckpointManager,),
    }
    pinned = {function.__name__ for function in EXPECTED}
    pinned |= {name for names in ATTRIBUTES.values() for name in names.split()}
    rooms = Path(ray_internals.__file__).parent
    for module, classes in owners.items():
        used = set(re.findall(r"\.(_[a-z]\w*)", (rooms / f"{module}.py").read_text()))
        of_ray = used & set().union(*(names_of(owner) for owner in classes))
        assert of_ray and of_ray - pinned == set(), module
