"""From the death of a rank to the next step with states of 4 MB to 4 GB, and where the seconds go.

    python -m benchmarks large_state --mb 4 400 4000 --repeats 3

Two ranks on one node over gloo, without Ray, whose part does not depend on the state's size
(``benchmarks recovery`` has it). One of them ends itself in the middle of a step. The other writes
a snapshot for the ranks of the next attempt. Most of the model is frozen, so that a step is as
short with a large state as with a small one. With
``--trained`` AdamW trains all of it: a third of the state are weights, and the first pass and the
step exchange as many gradients.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.heavy_task import HeavyTask
from benchmarks.report import summary, write
from everstep.spec.run_spec import RunSpec
from tests.integration.ranks import Job, ListJournal, make_run_dir, run_ranks
from train_fn.loop import attempt, build
from train_fn.snapshots import store, whole

KILL_STEP, LAST_STEP = 3, 9
STAGES = {
    "leave": "train_fn.loop.attempt:leave",
    "leave: write": "train_fn.snapshots.leaving:SnapshotStore.write",
    "leave: compare": "train_fn.snapshots.leaving:state_digest",
    "build": "train_fn.loop.training:Replica",
    "elect and read": "train_fn.session.session:find_newest",
    "read": "train_fn.snapshots.store:read_state",
    "check data": "train_fn.loop.training:check_data",
    "check model": "train_fn.loop.training:check_model",
    "first pass": "train_fn.loop.training:join",
    "broadcast": "train_fn.snapshots.whole:broadcast",
    "load": "train_fn.state.train_state:TrainState.load_state_dict",
    "step": "train_fn.loop.attempt:take_step",
    "step: copy": "train_fn.checkpoints.save_slot:BoundaryCopies.take",
}
"""What is timed, by the function that does it. The longest of all ranks counts."""


class Task(HeavyTask):
    """Fills its weights in the first attempt. In the next one it leaves them as memory is: what a
    task does for values that the state replaces is its own time, not Everstep's."""

    attempt = 1
    num_samples = 64

    def _init(self, num_elements: int) -> torch.Tensor:
        return super()._init(num_elements) if self.attempt == 1 else torch.empty(num_elements)


def set_up() -> None:
    """Train such a state in this process, and write down when each stage begins and ends."""
    build.build_task = lambda spec: Task(*_named(spec.name))  # type: ignore[attr-defined]
    # As on a node of several: no rank publishes its state beforehand.
    whole.WholeKeeper.after_step = lambda self, due=None: None  # type: ignore[method-assign]
    out: list[Any] = []
    prepare, asked = attempt.prepare, ListJournal.stop_requested.fget  # type: ignore[attr-defined]

    def note(stage: str, began: float) -> None:
        out[-1].write(f"{stage}\t{began}\t{time.time()}\n".encode())

    def prepare_noting(ctx: Any, progress: Any) -> Any:
        path = Path(ctx.run_dir.local_path) / f"stages-{ctx.attempt}-{ctx.world_rank}"
        path.parent.mkdir(parents=True, exist_ok=True)
        out.append(path.open("wb", buffering=0))
        gc.freeze()  # as a rank's process does
        Task.attempt = ctx.attempt
        note("begin", time.time())
        return prepare(ctx, progress)

    def asked_noting(journal: ListJournal) -> Any:
        note("asked", time.time())  # the one that dies does so now
        return asked(journal)

    attempt.prepare = prepare_noting  # type: ignore[attr-defined]
    ListJournal.stop_requested = property(asked_noting)  # type: ignore[assignment]
    for stage, place in STAGES.items():
        _time(place, functools.partial(note, stage))


def _time(place: str, note: Callable[[float], None]) -> None:
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        function = getattr(owner, name)
    except (ImportError, AttributeError):
        return

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.time()
        try:
            return function(*arguments, **named)
        finally:
            note(began)

    setattr(owner, name, timed)


def _named(name: str) -> tuple[int, bool]:
    """Size in MB, and whether all of it is trained, from a spec's name."""
    _, megabytes, what = name.split("-")
    return int(megabytes), what == "trained"


def recover(megabytes: int, options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Kill a rank of two, start the next attempt, and return the seconds of each stage."""
    name = f"large-{megabytes}-{'trained' if options.trained else 'frozen'}"
    spec = RunSpec.model_validate(
        {
            "name": name,
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet"},
                "data": {"name": "digits"},
            },
            "train": {
                "global_batch_size": 8,
                "micro_batch_size": 4,
                "max_steps": LAST_STEP,
                "loader": {"num_workers": 0},
            },
            "checkpoint": {"every_steps": None},
        }
    )
    run_dir = make_run_dir(directory, name)
    job = functools.partial(Job, run_dir, spec, 2, one_node=True, setup=f"{__name__}:set_up")
    run_ranks(job(killed=(1, KILL_STEP)), directory)
    run_ranks(job(attempt=2, killed=(1, KILL_STEP + 3)), directory)
    snapshot_store = store.node_snapshots(run_dir, "node", 1)
    snapshot_store.remove_all()
    return _seconds(Path(str(run_dir.local_path)))


def _seconds(run: Path) -> dict[str, float]:
    """Return the seconds of each stage from what the ranks have noted."""
    before, after = (_stages(run, number) for number in (1, 2))
    died_at = max(began for began, _ in before[1]["asked"])
    firsts = [{stage: times[0] for stage, times in rank.items()} for rank in after]
    end = max(rank["step"][1] for rank in firsts)
    seconds = {
        "total": end - died_at,
        "notice": before[0]["leave"][0][0] - died_at,
        "start": max(rank["begin"][0] for rank in firsts) - before[0]["leave"][0][1],
    }
    for stage in STAGES:
        ranks = after
        if stage.startswith("leave"):
            ranks = [before[0]]
        times = [rank[stage][0] for rank in ranks if stage in rank]
        if times:
            seconds[stage] = max(end - began for began, end in times)
    steps = before[0]["step"][1:-1]
    seconds["an undisturbed step"] = statistics.median(end - began for began, end in steps)
    return seconds


def _stages(run: Path, number: int) -> list[dict[str, list[tuple[float, float]]]]:
    """Begin and end of each stage's calls, for each rank of an attempt."""
    ranks = []
    for rank in range(2):
        found: dict[str, list[tuple[float, float]]] = {}
        for line in (run / f"stages-{number}-{rank}").read_text().splitlines():
            stage, began, ended = line.split("\t")
            found.setdefault(stage, []).append((float(began), float(ended)))
        ranks.append(found)
    return ranks


def bandwidth() -> dict[str, float]:
    """GB/s of one thread: a copy between memory that is in use, and one into fresh memory."""
    size = 512 << 20
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def rate(copy: Callable[[], object]) -> float:
        rates = []
        for _ in range(5):
            began = time.perf_counter()
            copy()
            rates.append(size / (time.perf_counter() - began) / 1e9)
        return statistics.median(rates)

    return {"memcpy": rate(lambda: np.copyto(target, source)), "fresh": rate(source.copy)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, nargs="+", default=[4, 400, 4000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trained", action="store_true")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"gb_per_s": bandwidth()}
    print("GB/s", results["gb_per_s"], flush=True)
    found: dict[int, list[dict[str, float]]] = {megabytes: [] for megabytes in options.mb}
    for _ in range(options.repeats):
        for megabytes in options.mb:
            with tempfile.TemporaryDirectory(prefix="bench-") as directory:
                seconds = recover(megabytes, options, Path(directory))
            print(megabytes, {stage: round(s, 3) for stage, s in seconds.items()}, flush=True)
            found[megabytes].append(seconds)
    for megabytes, runs in found.items():
        results[f"{megabytes} MB"] = {
            stage: summary([run[stage] for run in runs]) for stage in runs[0]
        }
    base = results[f"{options.mb[0]} MB"]["total"]["median"]
    for megabytes in options.mb:
        ideal_s = base + megabytes / 1e3 / results["gb_per_s"]["memcpy"]
        total_s = results[f"{megabytes} MB"]["total"]["median"]
        results[f"{megabytes} MB"]["over ideal"] = round(total_s / ideal_s, 2)
    write(f"large_state{'_trained' if options.trained else ''}", results)
