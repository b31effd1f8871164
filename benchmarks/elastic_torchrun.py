"""Entry point under torchrun elastic: ``torchrun --nnodes 1:2 … -m benchmarks.elastic_torchrun
WORKLOAD DIRECTORY``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.elastic_loop import train


def main(workload: str, directory: Path) -> None:
    checkpoint = directory / "checkpoint.pt"

    def load() -> dict[str, Any] | None:
        return torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None

    def save(state: dict[str, Any], rank: int) -> None:
        if rank == 0:
            torch.save(state, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)  # noqa: PTH105

    dist.init_process_group("gloo")
    train(workload, directory, load, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
