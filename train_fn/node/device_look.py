"""``python -m train_fn.node.device_look RANK DEVICE DIRECTORY``: check a node and its GPU, and
print the result as one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

from train_fn.node.preflight import check_node

if __name__ == "__main__":
    rank, device, directory = sys.argv[1:]
    found = check_node(int(rank), torch.device(device), Path(directory))
    print(json.dumps(dataclasses.asdict(found)))
