"""The look at nodes before runs are put on them: what fails or is far slower is told, and what is
merely noisy is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist

from train_fn.node import preflight
from train_fn.node.preflight import (
    NodeFigures,
    check_node,
    check_space,
    main,
    report,
    time_links,
    unfit,
)
from train_fn.ray_train.worker_actor import EverstepTrainWorker

CPU = torch.device("cpu")


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sound_node_is_fit(tmp_path: Path, process_group: None) -> None:
    figures = check_node(0, CPU, tmp_path)
    time_links(figures, 1, CPU)
    assert figures.problems == []
    assert figures.seconds.keys() == {
        "matmul",
        "memory",
        "disk",
        "sum_4k",
        "sum_1024k",
        "sum_16384k",
    }
    assert all(0 < seconds < 30 for seconds in figures.seconds.values())
    assert unfit([figures]) == {}


def test_what_fails_or_lacks_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "KEPT_FREE_BYTES", 1 << 60)
    figures = check_node(3, CPU, tmp_path / "absent")
    check_space(figures, tmp_path / "absent")
    assert any(problem.startswith("disk: ") and "absent" in problem for problem in figures.problems)
    assert (
        sum(
            "are free of its" in problem or "are available" in problem
            for problem in figures.problems
        )
        == 2
    )
    assert "rank 3 on " in report([figures], unfit([figures])) and "  UNFIT: disk: " in report(
        [figures], unfit([figures])
    )


def node(rank: int, **seconds: float) -> NodeFigures:
    return NodeFigures(rank, f"host{rank}", seconds)


def test_who_is_far_slower_is_named_and_a_shared_sum_blames_nobody() -> None:
    found = [node(rank, matmul=0.03, link=0.03, sum_4k=9.0 if rank else 0.1) for rank in range(4)]
    assert unfit(found) == {}
    found[2].seconds["link"] = 0.3
    assert unfit(found) == {2: ["link takes 0.300 s, 10 times what the others need"]}
    found[1].seconds["matmul"] = 0.14
    assert list(unfit(found)) == [2] and sorted(unfit(found, far_slower=4)) == [1, 2]
    tiny = [node(0, disk=0.001), node(1, disk=0.019)]
    assert unfit(tiny) == {}, "both are fast"


def test_without_torchrun_or_an_interface_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main([]) == 2 and "start this by torchrun" in capsys.readouterr().err
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "ens7",
    }.items():
        monkeypatch.setenv(name, value)
    assert (
        main([]) == 2
        and "GLOO_SOCKET_IFNAME=ens7 names no network interface" in capsys.readouterr().err
    )


def test_a_host_measures_its_node_once_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that joins is checked while the others train, and they are not measured again."""
    measured = []

    def measure(name: str, number: int, *_: object) -> NodeFigures:
        measured.append((name, number))
        return NodeFigures(number, "host")

    monkeypatch.setattr(ray, "get_gpu_ids", list)
    process = SimpleNamespace(_figures=None, _call_elsewhere=measure)
    figures = EverstepTrainWorker.check_node(process, 0)
    figures.seconds["link"] = 1.0  # as who compares nodes adds it
    assert EverstepTrainWorker.check_node(process, 2) == NodeFigures(2, "host")
    assert measured == [("train_fn.node.preflight:check_own", 0)]
