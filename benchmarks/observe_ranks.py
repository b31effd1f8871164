"""Two ranks of the training loop as plain processes, with all that observes them or with none of
it."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.context import JournalClient, WorkerContext

WORLD_SIZE = 2
WARMUP_STEPS = 200
GIVE_UP_S = 900.0


class Timed:
    """A journal client that notes when steps were done, prints a line of each, and passes on to
    another one, where there is one."""

    def __init__(self, behind: JournalClient | None) -> None:
        self._behind = behind
        self.at: dict[int, float] = {}

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.METRICS:
            for point in data["points"]:
                self.at[point["step"]] = point["at"]
            print(f"step {data['points'][-1]['step']}: loss {data['points'][-1]['values']['loss']}")
        if self._behind is not None:
            self._behind.emit(kind, data)

    @property
    def stop_requested(self) -> Stop | None:
        return None

    def flush(self, timeout_s: float) -> bool:
        return self._behind is None or self._behind.flush(timeout_s)


class NoClock:
    """In place of the step clock: no hooks, and no times."""

    def __init__(self, parameters: object, device: object) -> None:
        pass

    def gate(self) -> float:
        return 0.0

    def restart(self) -> None:
        pass


def steps_per_s(directory: Path, steps: int, *, observed: bool) -> float:
    """Train so many steps; how many were made a second after the warm-up. Raises RuntimeError where
    a rank fails."""
    from train_fn.journal.tensorboard_files import TensorBoardFiles

    directory.mkdir(parents=True)
    workload = {**WORKLOADS["digits"], "checkpoint": {"every_steps": 10**9, "every_s": None}}
    workload["train"] = {**workload["train"], "max_steps": WARMUP_STEPS + steps}
    spec = RunSpec.model_validate(workload)
    run_dir = RunDir(open_storage(str(directory / "storage")), "run_observe")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, spec, run_dir, str(directory), observed))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    files = TensorBoardFiles(run_dir, 1)  # the driver's part
    if observed:
        files.start()
    for rank in ranks:
        rank.join(GIVE_UP_S)
    if observed:
        files.close(60)
    if any(rank.exitcode != 0 for rank in ranks):
        raise RuntimeError(f"the ranks ended with {[rank.exitcode for rank in ranks]}")
    at = dict(json.loads((directory / "steps.json").read_text()))
    return steps / float(at[WARMUP_STEPS + steps] - at[WARMUP_STEPS])


def _rank(rank: int, spec: RunSpec, run_dir: RunDir, directory: str, observed: bool) -> None:
    import torch
    import torch.distributed as dist

    from train_fn.journal.rank_log import RankLog
    from train_fn.journal.server import open_local_journal
    from train_fn.loop import training
    from train_fn.loop.attempt import train

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    behind = log = None
    if observed:
        behind = open_local_journal(run_dir, 1, 1, rank, threading.Event(), lambda line: None)
        log = RankLog(run_dir, 1, 1, rank)
        log.start()
    else:
        training.StepClock = NoClock  # type: ignore[assignment, attr-defined]
        training.watch_stragglers = lambda ctx, replica, *, by_speed: None
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=WORLD_SIZE
    )
    journal = Timed(behind)
    train(
        WorkerContext(
            spec=spec,
            run_dir=run_dir,
            submission=1,
            attempt=1,
            world_rank=rank,
            world_size=WORLD_SIZE,
            local_rank=rank,
            local_world_size=WORLD_SIZE,
            node_id="node",
            num_nodes=1,
            device=torch.device("cpu"),
            journal=journal,
            report_checkpoint=lambda name, metrics: None,
        )
    )
    if behind is not None and log is not None:
        behind.close(60)
        log.close()
    dist.destroy_process_group()
    if rank == 0:
        Path(directory, "steps.json").write_text(json.dumps(list(journal.at.items())))
