"""How long a group that failed is waited for."""

from __future__ import annotations

import pytest

from train_fn.ray_train.group_shutdown import hold_for


def test_ranks_are_waited_for_by_the_size_of_what_they_leave() -> None:
    assert hold_for(20.0, 0) == 20.0
    assert hold_for(20.0, 4 << 20) == pytest.approx(20.0, abs=0.1)
    # 24 GB take an estimated 30 to 50 s: two copies, two digests and a file
    assert hold_for(20.0, 24_000_000_000) == pytest.approx(100.0)
