"""Forward, backward and update of ResNet-50 and GPT-2 (124 million parameters) in bf16, and the
loop beside a plain script: ``python -m benchmarks gpu``."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu.step_costs import Plan, measure
from tests.gpu.verdict import Shown


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    plan = Plan.for_gpu(directory) if on_gpu else Plan.for_cpu(directory)
    lines = [measure(workload, plan, device).line for workload in plan.workloads]
    return Shown("; ".join(lines), "" if on_gpu else "the models' real sizes, bf16's speed")
