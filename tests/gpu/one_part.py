"""``python -m tests.gpu.one_part NAME DEVICE DIRECTORY``: one part of ``make gpu``, in this
process."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import torch

if __name__ == "__main__":
    name, device_type, directory = sys.argv[1:]
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device(device_type)
    part = importlib.import_module(f"tests.gpu.parts.{name}")
    try:
        part.run(device, Path(directory)).write(Path(directory) / "shown.json")
    except AssertionError as exc:
        traceback.print_exc()
        # the last line of the log is what the verdict shows
        print(f"AssertionError: {' '.join(str(exc).split()) or 'see above'}", file=sys.stderr)
        raise SystemExit(1) from exc
