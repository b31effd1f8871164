"""What a rank tells of its GPU, with a device that only says what it is told to."""

from __future__ import annotations

import threading
from typing import Any

import torch

from everstep.wire.events import EventKind
from train_fn.node.usage import GpuSample, GpuWatch
from train_fn.recovery.hang import ProgressTracker

CUDA = torch.device("cuda", 0)


class Gpu:
    """Answers with the looks it has, then is lost."""

    def __init__(self, *looks: GpuSample) -> None:
        self.looks = list(looks)
        self.samples: list[dict[str, Any]] = []
        self.lost = threading.Event()

    def look(self, _device: torch.device) -> GpuSample:
        if not self.looks:
            self.lost.set()
            raise RuntimeError("the GPU is lost")
        return self.looks.pop(0)

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        assert kind is EventKind.GPU_USE
        self.samples.append(data)

    def watch(self, device: torch.device = CUDA) -> GpuWatch:
        return GpuWatch(
            self.emit,
            3,
            "node-a",
            device,
            self.look,
            sample_every_s=0.001,
            first_s=0.0,
            every_s=0.0,
        )


def test_each_telling_has_the_mean_and_the_most_since_the_last() -> None:
    gpu = Gpu(GpuSample(0.5, 70, 100, 30, 250.0, 61.0), GpuSample(None, 60, 100, 40))
    with gpu.watch():
        assert gpu.lost.wait(60)
    assert [
        (sample["rank"], sample["node_id"], sample["busy"], sample["used_bytes"])
        for sample in gpu.samples
    ] == [
        (3, "node-a", 0.5, 70),
        (3, "node-a", None, 60),
    ]
    assert [(sample["total_bytes"], sample["allocated_bytes"]) for sample in gpu.samples] == [
        (100, 30),
        (100, 40),
    ]
    assert [(sample["power_w"], sample["celsius"]) for sample in gpu.samples] == [
        (250.0, 61.0),
        (None, None),
    ]


def test_ranks_on_cpus_have_no_such_thread() -> None:
    before = threading.active_count()
    with Gpu().watch(torch.device("cpu")):
        assert threading.active_count() == before


def test_what_is_told_beside_training_is_no_sign_of_life() -> None:
    progress = ProgressTracker()
    progress.note(EventKind.ATTEMPT_STARTED, 1, {})
    progress.note(EventKind.METRICS, 1, {"points": [{"step": 1, "at": 1.0, "values": {}}]})
    signs = progress.progress().num_signs
    for kind in (EventKind.GPU_USE, EventKind.RANK_USE, EventKind.PROFILE_DONE):
        progress.note(kind, 1, {"rank": 0})
    assert progress.progress().num_signs == signs, "a hang would not be noticed"
