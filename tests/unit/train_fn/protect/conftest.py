"""Where a protected loop trains: in shared memory of its own, and without warnings in the log.

Lightning imports torchvision, which has no compiled operators on a machine whose torch is another
build."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from train_fn.user_code.modules import declare_missing_ops

declare_missing_ops()


@pytest.fixture
def own_place(shared_memory: Path) -> Iterator[None]:
    logging.getLogger("train_fn").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("train_fn").setLevel(logging.NOTSET)
