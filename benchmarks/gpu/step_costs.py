"""What a step costs on one GPU: forward, backward and update apart, for the scaling model; and the
loop beside a plain one.

    python -m benchmarks gpu --model resnet50 --batch 256 --precision bf16

Says so and measures nothing where there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import summary, write
from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn.models.image_models import build_image_model
from train_fn.standalone.local import run_local
from train_fn.state.optim import build_optimizer
from train_fn.step.precision import autocast, build_scaler
from train_fn.tasks.image_classification import ImageClassification

CLASSES = 1000


def make_spec(model: str, batch: int, precision: str, steps: int, data: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "bench-gpu",
            "task": {"name": "image_classification", "model": {"name": model}, "data": data},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "train": {
                "epochs": 1000,
                "max_steps": steps,
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "precision": precision,
            }
            | {"eval_every_epochs": 1000},
            "scaling": {"use_gpu": True},
            "checkpoint": {"every_steps": 50},
        }
    )


def step_costs(spec: RunSpec, image_size: int, repeats: int) -> dict[str, Any]:
    """Seconds of each part by CUDA's own clock, over ``repeats`` steps after a warm-up; images are
    random and lie on the device."""
    device, precision = torch.device("cuda", 0), spec.train.precision
    torch.backends.cudnn.benchmark = True
    model = build_image_model(
        spec.task.model, in_channels=3, num_classes=CLASSES, image_size=image_size
    )  # type: ignore[arg-type]
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer, scaler = build_optimizer(spec.optimizer, model), build_scaler(precision, device)
    size = spec.train.global_batch_size
    images = torch.randn(size, 3, image_size, image_size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.randint(CLASSES, (size,), device=device)
    parts: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "update_s": []}
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(repeats + 10):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        with autocast(precision, device):
            loss = F.cross_entropy(model(images), labels)
        marks[1].record()
        scaler.scale(loss).backward()
        marks[2].record()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        marks[3].record()
        torch.cuda.synchronize(device)
        if step >= 10:
            for name, (begin, end) in zip(parts, pairwise(marks), strict=True):
                parts[name].append(begin.elapsed_time(end) / 1000)
    medians = {name: statistics.median(values) for name, values in parts.items()}
    return {
        **{name: summary(values) for name, values in parts.items()},
        "samples_per_s": round(size / sum(medians.values()), 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "scaling_options": " ".join(
            f"--{name.replace('_', '-')} {value:.5f}" for name, value in medians.items()
        ),
    }


def loop_steps_per_s(spec: RunSpec, warmup_steps: int) -> float:
    """Everstep's loop on this GPU, events and checkpoints on."""
    with tempfile.TemporaryDirectory() as directory:
        run_local(spec, directory, "bench")
        events = read_journal(RunDir(open_storage(directory), "bench"), 1, None, 100_000)[0]
    times = [
        point["at"] for event in events if event.kind == "metrics" for point in event.data["points"]
    ][warmup_steps:]
    return (len(times) - 1) / (times[-1] - times[0])


def plain_steps_per_s(spec: RunSpec, warmup_steps: int) -> float:
    """The same model and data in a loop as tutorials write it."""
    device = torch.device("cuda", 0)
    task = ImageClassification(spec.task)  # type: ignore[arg-type]
    images, labels = task.data.train.fetch(0, None, torch.arange(len(task.data.train)).numpy())  # type: ignore[attr-defined]
    dataset = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(
        dataset, spec.train.global_batch_size, shuffle=True, pin_memory=True
    )
    model = task.build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    times: list[float] = []
    while len(times) < (spec.train.max_steps or 0):
        for batch in loader:
            x, y = (part.to(device, non_blocking=True) for part in batch)
            with autocast(spec.train.precision, device):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            times.append(time.time())
    times = times[warmup_steps:]
    return (len(times) - 1) / (times[-1] - times[0])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device on this machine: nothing was measured", file=sys.stderr)
        return
    folder = {"name": "fashion_mnist", "args": {"augment": False}}
    costs = step_costs(
        make_spec(options.model, options.batch, options.precision, 1, folder),
        options.image_size,
        options.steps,
    )
    small = make_spec("mini_resnet", 128, options.precision, 600, folder)
    ours, theirs = [], []
    for _ in range(options.repeats):
        theirs.append(plain_steps_per_s(small, 200))
        ours.append(loop_steps_per_s(small, 200))
    write(
        "gpu",
        {
            "device": torch.cuda.get_device_name(0),
            "options": vars(options),
            "step": costs,
            "loop_steps_per_s": summary(ours),
            "plain_steps_per_s": summary(theirs),
            "ratio": summary([a / b for a, b in zip(ours, theirs, strict=True)]),
        },
    )
