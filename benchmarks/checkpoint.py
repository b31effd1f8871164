"""What checkpoints cost and what they take to read back, beside plain torch.save, torch.load and
the plain write of the same bytes.

    python -m benchmarks checkpoint --size-mb 200 --ranks 2

Plain processes without Ray. Rank 0 trains an MLP with AdamW and saves its whole state (weights and
two moments) by the saver of the training loop; with two ranks the other one trains beside it, by
DDP over gloo. All sides write to one directory, in turn, so that a disk that is busy is busy for
all; figures are medians. A line on stderr tells how far it is, and how long a part will take.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from benchmarks.report import summary, write
from everstep.spec.parsing import parse_spec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import journal_of, one_rank
from train_fn.checkpoints.commit import MODEL_FILE, STATE_FILE, load_checkpoint
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.loop.passes import wrap
from train_fn.state.train_state import TrainState

BYTES_PER_PARAMETER = 12
"""A weight and AdamW's two moments, in float32."""
PATIENCE_S = 300.0
PARTS = ("training", "disk", "restore", "memory")


@dataclass(frozen=True)
class Options:
    size_mb: float
    ranks: int
    repeats: int
    steps: int
    batch: int
    many: int
    many_mb: float
    directory: str


class Training:
    """One rank's training, reduced to what a checkpoint depends on: state, steps, boundaries."""

    def __init__(
        self, options: Options, directory: Path, size_mb: float, rank: int = 0, ranks: int = 1
    ) -> None:
        torch.manual_seed(0)
        num_parameters = size_mb * 1e6 / BYTES_PER_PARAMETER
        width = 1024 if num_parameters > 4 * 1024**2 else 256
        layers = max(1, round(num_parameters / width**2))
        model = nn.Sequential(
            *(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh()))
        )
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._optimizer = optimizer
        self.state = TrainState(
            model,
            optimizer,
            torch.amp.GradScaler("cpu", enabled=False),
            None,
            steps_per_epoch=1000,
            fingerprint="none",
        )
        self._inputs = torch.randn(options.batch, width)
        self._called = wrap(model, torch.device("cpu")) if ranks > 1 else model
        self.context = _context(directory, rank, ranks)
        self.journal = journal_of(self.context)
        self.copies = BoundaryCopies(self.state)
        self.saver = Saver(self.context, self.state, self.copies)

    def step(self) -> None:
        self._called(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.state.step += 1

    def alter(self) -> None:
        """Another state, without the work of a step."""
        with torch.no_grad():
            next(self.state.model.parameters()).add_(1.0)
        self.state.step += 1

    def save(self) -> float:
        """Offer a save, as the loop does at a boundary; seconds that training stood still."""
        began = time.perf_counter()
        self.saver.save_if_due(due=True, is_best=False)
        return time.perf_counter() - began

    def wait_committed(self) -> None:
        if (
            not self.saver.wait_idle(time.monotonic() + PATIENCE_S)
            or self.saver.newest_committed(0) < self.state.step
        ):
            raise RuntimeError(
                f"step {self.state.step} was not committed: {self.journal.events[-1:]}"
            )


def _context(directory: Path, rank: int, ranks: int) -> WorkerContext:
    spec = {
        "name": "bench-checkpoint",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": "digits"},
        },
        "checkpoint": {"every_steps": 50, "keep_latest": 1},
    }
    alone = one_rank(parse_spec(spec), RunDir(open_storage(str(directory)), "run_bench"), rank=rank)
    return dataclasses.replace(alone, world_size=ranks, local_rank=rank, local_world_size=ranks)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def write_synced(path: Path, write_to: Callable[[io.BufferedWriter], object]) -> None:
    with path.open("wb") as file:
        write_to(file)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- what saving takes from training


@dataclass(frozen=True)
class Cycle:
    """So many steps; ``saving`` where a save was offered before the first."""

    stall_s: float
    steps_s: list[float]
    in_flight: int
    """Steps that ended before the save was committed."""

    @property
    def total_s(self) -> float:
        return self.stall_s + sum(self.steps_s)

    @property
    def lost_s(self) -> float:
        """What the save took of this cycle, measured by its later steps, which comes with less
        noise than by another cycle."""
        beside = self.in_flight + 2  # the commit, and retention after it, fall into the last two
        return (
            self.stall_s
            + sum(self.steps_s[:beside])
            - beside * statistics.median(self.steps_s[beside:])
        )


def run_cycle(options: Options, training: Training, *, saving: bool) -> Cycle:
    stall_s = training.save() if saving else 0.0
    saved_step, steps_s, in_flight = training.state.step, [], 0
    for _ in range(options.steps):
        steps_s.append(timed(training.step))
        in_flight += saving and training.saver.newest_committed(0) < saved_step
    if saving and in_flight > options.steps // 2:
        raise RuntimeError(
            f"the save was in flight for {in_flight} of {options.steps} steps: nothing to compare "
            "with; raise --steps"
        )
    return Cycle(stall_s, steps_s, in_flight)


def measure_training(options: Options, training: Training) -> dict[str, Any]:
    """Pairs of cycles of so many steps, with a save that is written beside them and without one,
    and torch.save between.

    Which one comes first changes with every pair, so that what drifts does not count for one side.
    """
    pairs: list[tuple[Cycle, Cycle]] = []
    synchronous_s: list[float] = []
    path = Path(options.directory) / "synchronous.pt"
    for number in range(options.repeats + 1):
        began = time.perf_counter()
        cycles = {
            saving: run_cycle(options, training, saving=saving)
            for saving in (number % 2 == 1, number % 2 == 0)
        }
        synchronous = timed(
            lambda: write_synced(path, lambda file: torch.save(training.state.state_dict(), file))
        )
        path.unlink()
        if number:  # the first one allocates and warms up
            pairs.append((cycles[False], cycles[True]))
            synchronous_s.append(synchronous)
        left_s = (options.repeats - number) * (time.perf_counter() - began)
        say(f"training: pair {number} of {options.repeats}, {left_s:.0f} s left")
    size_bytes = training.context.checkpoints.list()[-1].size_bytes
    writes_s = [
        data["write_s"] for data in training.journal.of_kind(EventKind.CHECKPOINT_COMMITTED)
    ]
    plain_s = [plain.total_s for plain, _ in pairs]
    stalls_s, lost_s = (
        [saving.stall_s for _, saving in pairs],
        [saving.lost_s for _, saving in pairs],
    )
    plain_median, stall_median = statistics.median(plain_s), statistics.median(stalls_s)
    return {
        "state_mb": round(size_bytes / 1e6, 1),
        "steps_between_saves": options.steps,
        "step_s": round(plain_median / options.steps, 4),
        "stall_s": summary(stalls_s),
        "synchronous_save_s": summary(synchronous_s),
        "stall_over_synchronous": round(stall_median / statistics.median(synchronous_s), 4),
        "cycle_without_save_s": summary(plain_s),
        "cycle_with_save_s": summary([saving.total_s for _, saving in pairs]),
        "share_stalled": round(stall_median / plain_median, 5),
        "share_lost": round(
            statistics.median(saving.total_s / plain.total_s for plain, saving in pairs) - 1, 5
        ),
        "lost_within_cycle_s": summary(lost_s),
        "share_lost_within_cycle": round(statistics.median(lost_s) / plain_median, 5),
        "steps_in_flight": statistics.median(saving.in_flight for _, saving in pairs),
        "background_write_s": summary(writes_s[1:]),
    }


def _other_rank(options: Options, rank: int, rendezvous: str) -> None:
    """The rank that does not save: the same steps; it waits for rank 0 in the first one after each
    stop."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    training = Training(options, Path(options.directory), options.size_mb, rank, options.ranks)
    for _ in range((options.repeats + 1) * 2 * options.steps):
        training.step()
    dist.destroy_process_group()


def training_figures(options: Options) -> dict[str, Any]:
    if options.ranks == 1:
        return measure_training(
            options, Training(options, Path(options.directory), options.size_mb)
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both ranks are on this machine
    rendezvous = f"file://{options.directory}/rendezvous"
    context = torch.multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_other_rank, args=(options, rank, rendezvous))
        for rank in range(1, options.ranks)
    ]
    for process in others:
        process.start()
    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=options.ranks)
        return measure_training(
            options, Training(options, Path(options.directory), options.size_mb, 0, options.ranks)
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in others:
            process.join(10)
            process.kill()


# ---------------------------------------------------------------- the disk


def disk_figures(options: Options) -> dict[str, Any]:
    """The bytes of a checkpoint through the writer (digest, sync, manifest) and plainly (write,
    sync), in turn."""
    training = Training(options, Path(options.directory) / "disk", options.size_mb)
    buffer = io.BytesIO()
    torch.save(training.state.state_dict()["model"], buffer)
    block = buffer.getbuffer()
    data = memoryview(b"".join([block] * 3))  # weights and two moments
    store = training.context.checkpoints
    path = Path(options.directory) / "plain.bin"

    def commit(step: int) -> None:
        with store.begin(step, 1, 1) as writer:
            with writer.write_file(MODEL_FILE) as file:
                file.write(data)
            writer.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})

    plain_s, writer_s = [], []
    for step in range(1, options.repeats + 2):
        plain = timed(lambda: write_synced(path, lambda file: file.write(data)))
        path.unlink()
        written = timed(lambda step=step: commit(step))  # type: ignore[misc]
        shutil.rmtree(store.path(store.list()[-1].name))
        if step > 1:
            plain_s.append(plain)
            writer_s.append(written)
    mb = len(data) / 1e6
    return {
        "mb": round(mb, 1),
        "plain_write_mb_per_s": summary([mb / seconds for seconds in plain_s]),
        "digest_and_write_mb_per_s": summary([mb / seconds for seconds in writer_s]),
        "digest_and_write_over_plain": round(
            statistics.median(plain_s) / statistics.median(writer_s), 4
        ),
    }


# ---------------------------------------------------------------- restore


def restore_figures(options: Options) -> dict[str, Any]:
    training = Training(options, Path(options.directory) / "restore", options.size_mb)
    training.step()
    training.saver.save_now()
    run_dir = training.context.run_dir
    store = CheckpointStore(run_dir)
    [manifest] = store.list()
    paths = [Path(store.path(manifest.name)) / name for name in (STATE_FILE, MODEL_FILE)]

    def plain() -> None:
        for path in paths:
            torch.load(path, map_location="cpu", weights_only=True)

    def restore() -> None:
        """What rank 0 does to go on from a checkpoint: find the newest, read it, verify every byte,
        load it."""
        found, _, _ = store.read_newest(partial(load_checkpoint, run_dir))
        assert found is not None

    plain_s, restore_s = [], []
    for turn in range(options.repeats + 1):
        loaded, restored = timed(plain), timed(restore)
        if turn:
            plain_s.append(loaded)
            restore_s.append(restored)
    return {
        "torch_load_s": summary(plain_s),
        "restore_s": summary(restore_s),
        "restore_over_torch_load": round(
            statistics.median(restore_s) / statistics.median(plain_s), 4
        ),
    }


# ---------------------------------------------------------------- memory


def memory_figures(options: Options) -> dict[str, Any]:
    """Resident memory over many saves; growth and slope are those of the second half."""
    training = Training(options, Path(options.directory) / "memory", options.many_mb)
    training.step()  # makes the optimizer's moments
    process, resident_mb = psutil.Process(), []
    every = max(1, options.many // 50)
    began = time.perf_counter()
    for number in range(1, options.many + 1):
        training.alter()
        training.save()
        training.wait_committed()
        if number % every == 0:
            resident_mb.append(process.memory_info().rss / 1e6)
        if number % max(1, options.many // 10) == 0:
            left_s = (time.perf_counter() - began) / number * (options.many - number)
            say(f"memory: {number} of {options.many} saves, {left_s:.0f} s left")
    second = resident_mb[len(resident_mb) // 2 :]
    tenth = max(1, len(second) // 5)
    slope = (
        statistics.linear_regression(range(len(second)), second).slope if len(second) > 1 else 0.0
    )
    return {
        "saves": options.many,
        "state_mb": options.many_mb,
        "resident_mb": [round(value, 1) for value in resident_mb],
        "growth_mb": round(
            statistics.median(second[-tenth:]) - statistics.median(second[:tenth]), 2
        ),
        "slope_kb_per_save": round(slope * 1000 / every, 3),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--size-mb", type=float, default=200, help="state: weights and two moments")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50, help="steps between two saves")
    parser.add_argument(
        "--batch", type=int, default=64, help="samples a rank and step; more make longer steps"
    )
    parser.add_argument("--many", type=int, default=1000, help="saves of the memory test")
    parser.add_argument(
        "--many-mb", type=float, default=None, help="state of the memory test; by default --size-mb"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=PARTS,
        help=f"some of {','.join(PARTS)}",
    )
    parser.add_argument(
        "--directory", default=".", help="where to write: the disk that is to be measured"
    )
    given = vars(parser.parse_args(argv))
    only = given.pop("only")
    if unknown := set(only) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    given["many_mb"] = given["many_mb"] or given["size_mb"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(
        prefix="bench-checkpoint-", dir=given["directory"]
    ) as directory:
        options = Options(**{**given, "directory": str(Path(directory).absolute())})
        figures = {
            "training": training_figures,
            "disk": disk_figures,
            "restore": restore_figures,
            "memory": memory_figures,
        }
        write("checkpoint", {part: figures[part](options) for part in only})
