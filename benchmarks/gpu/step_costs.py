"""What a step costs on one GPU: forward, backward and update apart, for the scaling model; and the
loop beside a plain script with the same model, data and optimizer.

    python -m benchmarks gpu --only gpt2 --precision bf16

ResNet-50 at 224 pixels, and GPT-2 with 124 million parameters. Each prints a verdict line.
``--device cpu`` runs the same code with small models, to see that it works. Without a GPU nothing
else is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.workloads import GPU_WORKLOADS, SMALL_WORKLOADS, Workload, write_text
from benchmarks.report import summary, write
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn.recovery.settings import take_environment
from train_fn.session.speed import Speed, declared, peak_flops_per_s
from train_fn.standalone.command import run_local
from train_fn.state.optim import build_optimizer
from train_fn.step.precision import autocast
from train_fn.tasks.builtin import build_task

WARM_UP_STEPS = 10
PARTS = ("forward_s", "backward_s", "update_s")


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    workloads: tuple[Workload, ...]
    directory: Path
    """Where the text and the runs are written."""
    precision: str = "bf16"
    steps: int = 60
    """Of which each part is timed."""
    loop_steps: int = 151
    """Steps of a run of the loop, and of the plain script. All but the first are timed; the first
    publication and one checkpoint come among them."""
    repeats: int = 3

    @classmethod
    def for_gpu(cls, directory: Path) -> Plan:
        """Return a plan for about four minutes."""
        return cls(GPU_WORKLOADS, directory)

    @classmethod
    def for_cpu(cls, directory: Path) -> Plan:
        """Return a plan that only shows that the code works."""
        return cls(SMALL_WORKLOADS, directory, steps=WARM_UP_STEPS + 4, loop_steps=7, repeats=1)


@dataclass(frozen=True)
class Timed:
    """Speed of one run, without its first step."""

    steps_per_s: float
    slowest_s: float

    @classmethod
    def of(cls, ended_at: list[float]) -> Timed:
        """Return the speed of steps that ended at these times."""
        total_s = ended_at[-1] - ended_at[0]
        slowest_s = max(later - earlier for earlier, later in pairwise(ended_at))
        return cls((len(ended_at) - 1) / total_s, slowest_s)


def _in_words(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items()) or "?"


def _median(timed: list[Timed]) -> float:
    return statistics.median(each.steps_per_s for each in timed)


@dataclass(frozen=True)
class Measured:
    """The figures of one workload."""

    name: str
    step: dict[str, Any]
    speed: Speed
    samples: int
    """Of a step."""
    loop: list[Timed] = field(default_factory=list)
    plain: list[Timed] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Return the speed of the loop over that of the plain script, by turns."""
        pairs = zip(self.loop, self.plain, strict=True)
        return [ours.steps_per_s / theirs.steps_per_s for ours, theirs in pairs]

    @property
    def line(self) -> str:
        """Return the verdict in one line."""
        costs = ", ".join(
            f"{name.removesuffix('_s')} {1000 * self.step[name]['median']:.1f} ms" for name in PARTS
        )
        return (
            f"{self.name} ({self.step['parameters'] / 1e6:.1f} million parameters): {costs}, "
            f"{self.step['samples_per_s']:.0f} samples/s; the loop at "
            f"{statistics.median(self.ratios):.3f} ({min(self.ratios):.3f} to "
            f"{max(self.ratios):.3f}) of a plain script's {_median(self.plain):.2f} steps/s, its "
            f"slowest step {max(each.slowest_s for each in self.loop):.3f} s, the script's "
            f"{max(each.slowest_s for each in self.plain):.3f} s; the loop at "
            f"{_in_words(self.figures(self.loop))}, the script at "
            f"{_in_words(self.figures(self.plain))}"
        )

    def figures(self, timed: list[Timed]) -> dict[str, float]:
        """Return tokens/s, TFLOP/s and MFU of the median run."""
        return self.speed.figures(_median(timed) * self.samples)

    def results(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loop_steps_per_s": summary([each.steps_per_s for each in self.loop]),
            "plain_steps_per_s": summary([each.steps_per_s for each in self.plain]),
            "loop_slowest_step_s": summary([each.slowest_s for each in self.loop]),
            "plain_slowest_step_s": summary([each.slowest_s for each in self.plain]),
            "ratio": summary(self.ratios),
            "loop": self.figures(self.loop),
            "plain": self.figures(self.plain),
        }


def measure(workload: Workload, plan: Plan, device: torch.device) -> Measured:
    """Measure one workload. The loop and the plain script take turns."""
    take_environment({})  # as a rank, before the device is used
    if workload.needs_text:
        write_text(plan.directory / "text.txt", workload.vocabulary, workload.num_characters)
    spec = workload.spec(plan, device)
    measured = Measured(
        workload.name,
        step_costs(spec, plan.steps, device),
        _speed(spec, device),
        spec.train.global_batch_size,
    )
    for turn in range(plan.repeats):
        measured.plain.append(time_plain(spec, device))
        measured.loop.append(time_loop(spec, plan.directory, f"{workload.name}-{turn}"))
    return measured


def _speed(spec: RunSpec, device: torch.device) -> Speed:
    """Return what samples per second of a workload are in other units, on one device."""
    task = build_task(spec)
    batch = _to(next(iter(_batches(task, spec, torch.device("cpu")))), torch.device("cpu"))
    return Speed(
        counted_flops(task, task.build_model(), batch, spec.train.global_batch_size),
        declared(task, "tokens_per_sample"),
        peak_flops_per_s(device, spec.train.precision),
    )


def counted_flops(task: Any, model: torch.nn.Module, batch: Any, num_samples: int) -> float | None:
    """Return the FLOPs that a sample takes forward and backward, from shapes alone; None if they
    cannot be counted, or there are none."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def stand_in(*inputs: Any, **named: Any) -> Any:
        return functional_call(model, shaped, inputs, named)

    try:
        shaped = {name: _shape_of(value) for name, value in held.items()}
        trained = [each for each in shaped.values() if each.requires_grad]
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            loss_sum, _ = task.loss(stand_in, _shapes_in(batch))
            torch.autograd.grad(loss_sum, trained, allow_unused=True)
    except Exception:  # a figure less, and nothing else
        return None
    return counter.get_total_flops() / num_samples or None


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind that has no values."""
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )


def _shapes_in(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return _shape_of(batch)
    if isinstance(batch, dict):
        return {name: _shapes_in(value) for name, value in batch.items()}
    return type(batch)(map(_shapes_in, batch)) if type(batch) in (list, tuple) else batch


def step_costs(spec: RunSpec, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds of each part of a step by the device's own clock, after a warm-up."""
    on_gpu = device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    task = build_task(spec)
    model = task.build_model().to(device)
    optimizer = build_optimizer(spec.optimizer, model)
    batch = _to(next(iter(_batches(task, spec, device))), device)
    seconds: dict[str, list[float]] = {name: [] for name in PARTS}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        marks = [_mark(device)]
        with autocast(spec.train.precision, device):
            loss_sum, weight = task.loss(model, batch)
        marks.append(_mark(device))
        (loss_sum / weight).backward()
        marks.append(_mark(device))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(_mark(device))
        if on_gpu:
            torch.cuda.synchronize(device)
        if step >= WARM_UP_STEPS:
            for name, (begin, end) in zip(PARTS, pairwise(marks), strict=True):
                seconds[name].append(_between(begin, end))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        **{name: summary(values) for name, values in seconds.items()},
        "samples_per_s": round(spec.train.global_batch_size / sum(medians.values()), 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "scaling_options": " ".join(
            f"--{name.replace('_', '-')} {value:.5f}" for name, value in medians.items()
        ),
    }


def time_loop(spec: RunSpec, directory: Path, run_id: str) -> Timed:
    """Return the speed of Everstep's loop on this device, with events, one checkpoint and the
    published snapshots."""
    ended = run_local(spec, str(directory), run_id, say=lambda line: None)
    if ended.code != 0:
        raise RuntimeError(f"the run {run_id} ended with {ended.code}; see its journal")
    events = read_journal(RunDir(open_storage(str(directory)), run_id), 1, None, 100_000)[0]
    points = [
        point
        for event in events
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    ]
    saved = [each.data["step"] for each in events if each.kind is EventKind.CHECKPOINT_COMMITTED]
    steps = spec.train.max_steps
    if len(points) != steps or saved != [spec.checkpoint.every_steps, steps]:
        raise RuntimeError(f"the run {run_id} has {len(points)} steps, and saved those of {saved}")
    return Timed.of([float(point["at"]) for point in points])


def time_plain(spec: RunSpec, device: torch.device) -> Timed:
    """Return the speed of the same model, data and optimizer in a loop as tutorials write
    it."""
    task = build_task(spec)
    model = task.build_model().to(device)
    optimizer = build_optimizer(spec.optimizer, model)
    loader = _batches(task, spec, device)
    times: list[float] = []
    while len(times) < (spec.train.max_steps or 0):
        for batch in loader:
            with autocast(spec.train.precision, device):
                loss_sum, weight = task.loss(model, _to(batch, device))
            loss = loss_sum / weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            times.append(time.time())
    return Timed.of(times[: spec.train.max_steps])


def _batches(task: Any, spec: RunSpec, device: torch.device) -> DataLoader[Any]:
    """Return the training set as a tutorial would load it: whole, in memory, in batches."""
    train = task.build_datasets()["train"]
    samples = train.fetch(0, None, torch.arange(len(train)).numpy())
    dataset = TensorDataset(*(samples if isinstance(samples, tuple) else (samples,)))
    size, pinned = spec.train.global_batch_size, device.type == "cuda"
    return DataLoader(dataset, size, shuffle=True, drop_last=True, pin_memory=pinned)


def _to(batch: list[torch.Tensor], device: torch.device) -> Any:
    """Return a batch of the plain loader as the task wants it, on the device."""
    moved = tuple(part.to(device, non_blocking=True) for part in batch)
    return moved if len(moved) > 1 else moved[0]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=[each.name for each in GPU_WORKLOADS])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device on this machine: nothing was measured", file=sys.stderr)
        return
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as directory:
        make = Plan.for_gpu if device.type == "cuda" else Plan.for_cpu
        default = make(Path(directory))
        chosen = [each for each in default.workloads if options.only in (None, each.name)]
        repeats = options.repeats if device.type == "cuda" else default.repeats
        plan = replace(
            default, workloads=tuple(chosen), precision=options.precision, repeats=repeats
        )
        results: dict[str, Any] = {}
        for workload in plan.workloads:
            measured = measure(workload, plan, device)
            print(measured.line, flush=True)
            results[workload.name] = measured.results()
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu, small models"
    write("gpu", {"device": name, "options": vars(options), **results})
