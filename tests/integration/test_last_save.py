"""A run that ends FAILED keeps its newest state, and nothing of it stays in any node's memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.code import pack
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.code import CodeStore
from storage.filesystem import open_storage
from tests.integration import straight_line
from tests.integration.driven_run import DrivenRun
from tests.integration.driven_run import spec as driven_spec
from tests.integration.ray_cluster import RayCluster
from tests.integration.straight_line import LR, NUM_SAMPLES, by_plain_torch
from train_fn.node.node_dir import shared_memory_root

pytestmark = pytest.mark.timeout(600)

Begin = Callable[..., DrivenRun]


@pytest.fixture
def cluster(two_nodes: RayCluster) -> RayCluster:
    return two_nodes


@pytest.fixture
def begin(cluster: RayCluster, tmp_path: Path) -> Iterator[Begin]:
    """Start a run of the straight line over two ranks, which saves no checkpoint by itself before
    its end."""
    digest = CodeStore(open_storage(str(tmp_path))).put(pack(Path(straight_line.__file__))).digest
    runs = []

    def start(max_steps: int, args: dict[str, Any], **sections: Any) -> DrivenRun:
        train = {
            "max_steps": max_steps,
            "epochs": max_steps,
            "eval_every_epochs": 1000,
            "global_batch_size": NUM_SAMPLES,
        }
        spec = driven_spec(
            workers=(2, 2),
            code={"archive": digest, "task": "straight_line:StraightLine", "args": args},
            task=None,
            train={**train, "micro_batch_size": NUM_SAMPLES // 2, "grad_clip_norm": None},
            optimizer={"name": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0},
            checkpoint={"every_steps": 100_000},
            **sections,
        )
        run = DrivenRun(cluster, tmp_path, spec)
        runs.append(run)
        run.start()
        return run

    yield start
    for run in runs:
        run.stop()


def line_in(run: DrivenRun, name: str) -> tuple[float, float]:
    model = torch.load(
        io.BytesIO(CheckpointStore(run.run_dir).read_file(name, "model.pt")), weights_only=True
    )
    return float(model["slope"]), float(model["offset"])


def check_kept(run: DrivenRun, method: str, steps: int) -> str:
    """The run failed by its user's error, and its checkpoint is the state that plain torch has
    after so many steps; its name."""
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    finished = run.last(EventKind.FINISHED).data
    assert (finished["outcome"], finished["reason"]["code"]) == ("failed", "user_error"), (
        run.describe()
    )
    [manifest] = CheckpointStore(run.run_dir).lineage()
    assert manifest.step == steps, run.describe()
    assert [event.data["step"] for event in run.of(EventKind.CHECKPOINT_COMMITTED)] == [steps]
    message = finished["reason"]["message"]
    assert f"LookupError: {method} is broken" in message, "the first error is the reason"
    assert message.endswith(f"; step {steps} is kept as checkpoint {manifest.name}")
    assert line_in(run, manifest.name) == pytest.approx(by_plain_torch(steps), rel=1e-5)
    assert not (shared_memory_root() / run.run_dir.run_id).exists(), (
        "every node removes what the run left"
    )
    return manifest.name


@pytest.mark.chaos
def test_a_validation_that_raises_at_the_end_leaves_the_last_step_to_go_on_from(
    begin: Begin,
) -> None:
    run = begin(10, {"broken": "metrics"})
    check_kept(run, "metrics", 10)
    again = begin(12, {}, resume_from={"run_id": run.run_dir.run_id, "step": 10})
    assert again.wait_for_end() == 0, again.describe()
    assert again.last(EventKind.FINISHED).data["outcome"] == "succeeded", again.describe()
    assert [step for step, _ in again.steps()] == [11, 12]
    newest = CheckpointStore(again.run_dir).lineage()[-1]
    assert line_in(again, newest.name) == pytest.approx(by_plain_torch(12), rel=1e-5)
