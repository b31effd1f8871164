"""Accuracy of a downloaded model.pt on the held-out digits, computed without Everstep: model, data
and split are written out here.

python evaluate_digits.py model.pt
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

State = dict[str, torch.Tensor]


def norm(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return F.group_norm(x, len(weight) // 16, weight, bias)


def mini_resnet(state: State, x: torch.Tensor) -> torch.Tensor:
    """Logits [n, 10] of images [n, 1, 8, 8] by the weights' names alone."""
    x = F.relu(norm(state, "stem.1", F.conv2d(x, state["stem.0.weight"], padding=1)))
    for number in range(6):
        block, stride = f"blocks.{number}", 2 if number in (2, 4) else 1
        y = F.relu(
            norm(
                state,
                f"{block}.norm1",
                F.conv2d(x, state[f"{block}.conv1.weight"], stride=stride, padding=1),
            )
        )
        y = norm(state, f"{block}.norm2", F.conv2d(y, state[f"{block}.conv2.weight"], padding=1))
        if f"{block}.shortcut.weight" in state:
            x = F.conv2d(x, state[f"{block}.shortcut.weight"], stride=stride)
        x = F.relu(x + y)
    return F.linear(x.mean(dim=(2, 3)), state["classifier.weight"], state["classifier.bias"])


def main(path: str) -> None:
    digits = load_digits()
    images, labels = digits.images.astype(np.float32), digits.target
    num_held_out = math.ceil(0.2 * len(labels))
    held_out = np.argsort(labels, kind="stable")[
        np.arange(num_held_out) * len(labels) // num_held_out
    ]
    x = torch.from_numpy((images[held_out] / 16 - 0.305) / 0.376).unsqueeze(1)
    with torch.no_grad():
        predicted = mini_resnet(torch.load(path, weights_only=True), x).argmax(dim=1)
    print((predicted.numpy() == labels[held_out]).mean())


if __name__ == "__main__":
    main(sys.argv[1])
