"""The look at nodes before runs are put on them: what fails or is far slower is told, and what is
merely noisy is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from train_fn.node.preflight import NodeFigures, check_node, unfit
from train_fn.ray_train.worker_actor import EverstepTrainWorker

CPU = torch.device("cpu")


def test_a_sound_node_is_fit_and_what_fails_is_told(tmp_path: Path) -> None:
    figures = check_node(0, CPU, tmp_path)
    assert figures.problems == []
    assert figures.seconds.keys() == {"matmul", "memory", "disk"}
    assert all(0 < seconds < 30 for seconds in figures.seconds.values())
    assert unfit([figures]) == {}
    [problem] = check_node(3, CPU, tmp_path / "absent").problems
    assert problem.startswith("disk: ") and "absent" in problem


def node(rank: int, **seconds: float) -> NodeFigures:
    return NodeFigures(rank, seconds)


def test_who_is_far_slower_is_named() -> None:
    found = [node(rank, matmul=0.03, link=0.03) for rank in range(4)]
    assert unfit(found) == {}
    found[2].seconds["link"] = 0.3
    found[1].seconds["matmul"] = 0.14
    assert unfit(found) == {2: ["link takes 0.300 s, 10 times what the others need"]}
    tiny = [node(0, disk=0.001), node(1, disk=0.019)]
    assert unfit(tiny) == {}, "both are fast"


def test_a_host_measures_its_node_once_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that joins is checked while the others train, and they are not measured again."""
    measured = []

    def measure(name: str, number: int, *_: object) -> NodeFigures:
        measured.append((name, number))
        return NodeFigures(number)

    monkeypatch.setattr(ray, "get_gpu_ids", list)
    process = SimpleNamespace(_figures=None, _call_elsewhere=measure)
    figures = EverstepTrainWorker.check_node(process, 0)
    figures.seconds["link"] = 1.0  # as who compares nodes adds it
    assert EverstepTrainWorker.check_node(process, 2) == NodeFigures(2)
    assert measured == [("train_fn.node.preflight:check_own", 0)]
