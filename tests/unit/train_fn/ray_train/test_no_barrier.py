"""Groups whose ranks do not meet to report have no actor for that."""

from __future__ import annotations

import pickle

import pytest

from train_fn.ray_train.group.placement import NoBarrier, end_barrier, no_barrier
from train_fn.ray_train.ray_internals import SynchronizationActor, worker_group_module


def test_ray_makes_none_inside_the_block() -> None:
    with pytest.raises(RuntimeError, match="a start that failed"), no_barrier():
        made = worker_group_module.SynchronizationActor.options(label_selector={}).remote(
            timeout_s=1, warn_interval_s=1
        )
        assert isinstance(pickle.loads(pickle.dumps(made)), NoBarrier), "every rank gets it"
        end_barrier(made)
        end_barrier(None)
        raise RuntimeError("a start that failed")
    assert worker_group_module.SynchronizationActor is SynchronizationActor
