"""What a run through twenty deaths tells of them: who died first, and every line that was printed,
in order and once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from everstep import LogLine
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

NUM_RANKS = 3
NUM_DRILLS = 20
DURABLE_S = 2.0
"""How long before a death, or a stop, a printed line may be lost to it."""
TASK = '''
import time

import torch
from torch import nn


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24_000

    def __getitem__(self, index):
        return torch.full((8,), index / 24_000), torch.tensor([index**2 / 24_000**2])


class Talking:
    """Prints a numbered line in each forward pass."""

    def __init__(self):
        self.number = 0

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def build_datasets(self):
        return {"train": Squares(), "val": None}

    def loss(self, model, batch):
        self.number += 1
        print(f"pass {self.number}")
        time.sleep(0.02)
        inputs, targets = batch
        return (model(inputs) - targets).square().sum(), len(targets)
'''


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess(nodes=NUM_RANKS, args=("--drills",)) as process:
        yield process


def start(service: ServiceProcess, directory: Path) -> RunHandle:
    (directory / "talking.py").write_text(TASK)
    client = service.client()
    spec: dict[str, Any] = {
        "name": "talking",
        "code": {
            "archive": client.code.upload(directory / "talking.py").digest,
            "task": "talking:Talking",
        },
        "optimizer": {"name": "sgd", "lr": 0.01},
        "train": {
            "epochs": 1_000_000,
            "global_batch_size": 30,
            "micro_batch_size": 10,
            "eval_every_epochs": 1_000_000,
        },
        "scaling": {"min_workers": NUM_RANKS, "max_workers": NUM_RANKS},
        "checkpoint": {"every_steps": 500},
        "recovery": {"hang_timeout_s": 10},
    }
    run = client.runs.create(spec)
    wait_for(lambda: run.refresh().step >= 30, 120, "the first steps")
    return run


def numbers(lines: list[LogLine]) -> dict[tuple[int, int], list[int]]:
    """The numbers that each rank of each attempt printed, in the order in which they are given."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for line in lines:
        if line.rank is not None and line.message.startswith("pass "):
            found[line.attempt, line.rank].append(int(line.message.split()[1]))
    return found


def test_the_first_rank_is_the_one_that_was_hit_and_no_line_is_lost_or_repeated(
    service: ServiceProcess, tmp_path: Path
) -> None:
    run = start(service, tmp_path)
    followed: list[LogLine] = []
    follower = threading.Thread(
        target=lambda: followed.extend(service.client().runs.get(run.id).logs(follow=True)),
        daemon=True,
    )
    follower.start()
    random = Random(20)
    hit: list[tuple[str, int]] = []
    for _ in range(NUM_DRILLS):
        kind, rank = (
            random.choices(("kill_worker", "hang_worker"), (18, 2))[0],
            random.randrange(NUM_RANKS),
        )
        drill = run.drill(kind, rank=rank).wait(240)
        assert drill.state == "recovered", (drill.state, drill.problem)
        hit.append(("hang" if kind == "hang_worker" else "worker_lost", rank))
    run.cancel()
    wait_for(lambda: run.refresh().status.terminal, 120, "the cancel")
    follower.join(60)
    assert not follower.is_alive(), "following ends with the run"

    failures = run.failures()
    assert [(failure.verdict, failure.first_rank) for failure in failures] == hit
    kept = list(run.logs())
    seqs = [line.seq for line in followed]
    assert seqs == sorted(set(seqs)), "no line twice"
    found, read_later = numbers(followed), numbers(kept)
    assert found == read_later, "who followed saw what was kept"
    for (attempt, rank), printed in found.items():
        assert printed == list(range(1, len(printed) + 1)), f"attempt {attempt}, rank {rank}"
    done = steps_by_time(run)
    for struck in (event for event in run.events() if event.kind == "drill_started"):
        for rank in range(NUM_RANKS):
            durable = sum(
                step_at <= struck.at.timestamp() - DURABLE_S for step_at in done[struck.attempt]
            )
            assert len(found[struck.attempt, rank]) >= durable, (
                f"attempt {struck.attempt}, rank {rank}: lines of its last steps"
            )


def steps_by_time(run: RunHandle) -> dict[int, list[float]]:
    """When each attempt did its own steps, in unix seconds: what it reports again of the one before
    it is left out."""
    found: dict[int, list[float]] = defaultdict(list)
    began: dict[int, float] = {}
    for event in run.events():
        if event.kind == "restored":
            began[event.attempt] = event.at.timestamp()
        for point in event.data["points"] if event.kind == "metrics" else ():
            if point["at"] >= began[event.attempt]:
                found[event.attempt].append(point["at"])
    return found
