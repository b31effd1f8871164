"""Loops of users over NCCL: a script with ``es.protect``, the Trainer of Hugging Face, a
LightningModule. A rank of each is killed, and the end equals that of a twin bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.verdict import Shown
from tests.support.gallery import DEVICE_VARIABLE, REPOSITORY, Killed, run_with_twin

GALLERY = REPOSITORY / "examples" / "gallery"
KILLED = Killed(1, 14, "before")
ON_GPU = {
    "torchrun_script": (
        ('("gloo")', '("nccl")'),
        ("model.append(nn.Linear(64, 10))", "model.append(nn.Linear(64, 10)).cuda()"),
        ("model(inputs), targets", "model(inputs.cuda()), targets.cuda()"),
    ),
    "hf_trainer": (("use_cpu=True", "use_cpu=False"),),
    "lightning_module": (
        ('accelerator="cpu"', 'accelerator="cuda"'),
        ("devices=devices", "devices=1, num_nodes=devices"),
    ),
}
"""Scripts, and what stands in them for a CPU and for a GPU."""


def run(device: torch.device, directory: Path) -> Shown:
    found = []
    for name, changes in ON_GPU.items():
        source = (GALLERY / f"{name}.py").read_text()
        for for_cpu, for_gpu in changes:
            assert for_cpu in source, f"{name} has no {for_cpu}"
            source = source.replace(for_cpu, for_gpu) if device.type == "cuda" else source
        below = directory / name
        below.mkdir()
        script = below / f"{name}.py"
        script.write_text(source)
        env = {DEVICE_VARIABLE: str(device)} if device.type == "cuda" else {}
        whole, [broken] = run_with_twin(script, below, [KILLED], env)
        sources = [each["source"] for each in broken.restored]
        step = broken.restored[-1]["step"]
        assert sources == ["fresh", "snapshot"], f"{name}: {sources}\n{broken.log}"
        went_on = f"{name} went on from {step}\n{broken.log}"
        assert step in (KILLED.update - 1, KILLED.update), went_on
        assert broken.losses == whole.losses, f"{name}: other losses"
        for weight, value in whole.weights.items():
            assert torch.equal(broken.weights[weight], value), f"{name}: {weight} differs"
        found.append(f"{name} from step {step}")
    return Shown(
        f"a rank killed in each, equal bit by bit: {', '.join(found)}",
        "" if device.type == "cuda" else "NCCL",
    )
