"""The loader at ImageNet's shape: images a second, how long a step waits for them, and whether
memory grows over epochs.

    python -m benchmarks loader --workers 2 --step-ms 200

Writes JPEG files of about ImageNet's size to a temporary directory, then takes micro-batches as the
loop does and computes nothing but a pause of ``--step-ms`` a micro-batch. Where cores do not
suffice for that pace the share is that of a decode-bound run.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.report import summary, write
from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import ImageFolderArgs
from train_fn.data.images import load_image_folder
from train_fn.samples.loader import KeyedDataset, Loader, collate_of
from train_fn.samples.sampler import Sampler

WIDTH, HEIGHT = 500, 375
"""ImageNet's usual size."""


def write_images(root: Path, count: int) -> None:
    """Smooth noise, which compresses about as photographs do, in ten classes."""
    generator = np.random.default_rng(0)
    for number in range(count):
        directory = root / "train" / f"class{number % 10}"
        directory.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(
            generator.integers(0, 256, (HEIGHT // 6, WIDTH // 6, 3), dtype=np.uint8)
        )
        coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(
            directory / f"{number}.jpg", quality=90
        )


def resident_bytes() -> int:
    """Of this process and its loader processes; what they share counts once."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().pss for process in processes)


def measure(root: Path, workers: int, batch: int, step_s: float, epochs: int) -> dict[str, Any]:
    spec = RunSpec.model_validate(
        {
            "name": "bench-loader",
            "task": {"name": "image_classification", "model": {"name": "resnet50"}}
            | {"data": {"name": "image_folder", "args": {"root": str(root)}}},
            "train": {
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "loader": {"num_workers": workers},
            },
        }
    )
    train = load_image_folder(ImageFolderArgs(root=str(root))).train
    sampler = Sampler(len(train), batch, batch, seed=0)
    dataset = KeyedDataset(train, 0, collate_of(None), training=True)
    loader = Loader(dataset, sampler.stream(0, 0, 0, 1), spec, 1, torch.device("cpu"))
    next(loader)  # the processes have started
    waits, rates, memory = [], [], []
    for _ in range(epochs):
        began, waited, num_images = time.perf_counter(), 0.0, 0
        for _ in range(sampler.steps_per_epoch):
            asked = time.perf_counter()
            indices = next(loader).indices
            waited += time.perf_counter() - asked
            num_images += len(indices)
            time.sleep(step_s)
        took = time.perf_counter() - began
        waits.append(waited / took)
        rates.append(num_images / took)
        memory.append(resident_bytes() / 1e6)
    loader.close()
    growth = [after - before for before, after in itertools.pairwise(memory)]
    return {
        "images_per_s": summary(rates),
        "waiting_share": summary(waits),
        "memory_mb": summary(memory),
        "memory_growth_mb_per_epoch": summary(growth[1:] or growth),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        write_images(Path(directory), options.images)
        results = measure(
            Path(directory), options.workers, options.batch, options.step_ms / 1000, options.epochs
        )
    write("loader", {"options": vars(options), **results})
