"""ResNet-50 and GPT-2 as specs that need no download, and small ones of the same kind for a CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from everstep.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from benchmarks.gpu.step_costs import Plan

GPT2_VOCABULARY = 50_257
"""With the token for the end of a text."""
NUM_CHARACTERS = 2_000_000
_SURROGATES = range(0xD800, 0xE000)


@dataclass(frozen=True)
class Workload:
    """A model with its data. ``batch`` is in samples."""

    name: str
    model: dict[str, Any]
    batch: int
    vocabulary: int = 0
    """Different tokens of the text to train on; 0 for images."""
    num_characters: int = NUM_CHARACTERS

    @property
    def needs_text(self) -> bool:
        return self.vocabulary > 0

    def spec(self, plan: Plan, device: torch.device) -> RunSpec:
        """Return the request. Nothing is evaluated while the steps are timed."""
        return RunSpec.model_validate(
            {
                "name": f"bench-{self.name}",
                "task": self._text(plan) if self.needs_text else self._images(),
                "optimizer": {"name": "adamw", "lr": 1e-4},
                "train": {
                    "epochs": 1000,
                    "max_steps": plan.loop_steps,
                    "global_batch_size": self.batch,
                    "micro_batch_size": self.batch,
                    "precision": plan.precision,
                    "eval_every_epochs": 1000,
                },
                "scaling": {"use_gpu": device.type == "cuda"},
                "checkpoint": {"every_steps": 2 * plan.loop_steps // 3},
            }
        )

    def _images(self) -> dict[str, Any]:
        data = {"name": "digits", "args": {"augment": False}}
        return {"name": "image_classification", "model": self.model, "data": data}

    def _text(self, plan: Plan) -> dict[str, Any]:
        path = str(plan.directory / "text.txt")
        args = {"path": path, "level": "char", "val_fraction": 0.0}
        data = {"name": "text_files", "args": args}
        return {"name": "language_modeling", "model": self.model, "data": data}


def write_text(path: Path, vocabulary: int, num_characters: int = NUM_CHARACTERS) -> None:
    """Write a text of so many different characters, the end of the text included, in an order that
    means nothing."""
    points = (point for point in range(0x100, 0x10FFFF) if point not in _SURROGATES)
    characters = [chr(next(points)) for _ in range(vocabulary - 1)]
    drawn = random.Random(0).choices(characters, k=max(0, num_characters - len(characters)))
    path.write_text("".join(characters + drawn), encoding="utf-8")


def _gpt(layers: int, heads: int, width: int, context: int) -> dict[str, Any]:
    args = {
        "num_layers": layers,
        "num_heads": heads,
        "width": width,
        "context_length": context,
    }
    return {"name": "gpt", "args": args}


GPU_WORKLOADS = (
    Workload("resnet50", {"name": "resnet50", "args": {"image_size": 224}}, 256),
    Workload("gpt2", _gpt(12, 12, 768, 1024), 16, GPT2_VOCABULARY),
)
SMALL_WORKLOADS = (
    Workload("resnet50", {"name": "mini_resnet", "args": {"width": 8}}, 16),
    Workload("gpt2", _gpt(2, 2, 32, 32), 8, 100, 20_000),
)
