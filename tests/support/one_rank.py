"""A rank alone in its run, on the CPU, with a journal that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.run_control import Stop
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.loop import build
from train_fn.node import node_dir
from train_fn.snapshots import store as snapshot


class Journal:
    stop_requested: Stop | None = None

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, dict[str, Any]]] = []

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        self.events.append((kind, data))

    def flush(self, timeout_s: float) -> bool:
        return True

    def of_kind(self, kind: EventKind) -> list[dict[str, Any]]:
        return [data for found, data in self.events if found is kind]

    def steps(self, kind: EventKind) -> list[int]:
        return [data["step"] for data in self.of_kind(kind)]

    @property
    def points(self) -> list[dict[str, Any]]:
        """Of the metrics, in the order in which they were told."""
        return [point for data in self.of_kind(EventKind.METRICS) for point in data["points"]]


def one_rank(
    spec: RunSpec, run_dir: RunDir, *, submission: int = 1, attempt: int = 1, rank: int = 0
) -> WorkerContext:
    return WorkerContext(
        spec=spec,
        run_dir=run_dir,
        submission=submission,
        attempt=attempt,
        world_rank=rank,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_id="node",
        num_nodes=1,
        device=torch.device("cpu"),
        journal=Journal(),
        report_checkpoint=lambda name, metrics: None,
    )


@contextmanager
def small_task_alone(shared_memory: Path, offer: Callable[..., None]) -> Iterator[None]:
    """Every run trains a small regression, keeps snapshots below ``shared_memory``, and offers its
    saves to ``offer``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (snapshot, node_dir):
            patch.setattr(module, "shared_memory_root", lambda: shared_memory)
        patch.setattr(build, "build_task", lambda spec: Regression())
        patch.setattr(Saver, "save_if_due", offer)
        yield


def journal_of(ctx: WorkerContext) -> Journal:
    assert isinstance(ctx.journal, Journal)
    return ctx.journal
