"""Fail the build of a CPU image that holds a torch for CUDA, or a torchvision that does not load.

Reads TORCH_INDEX, to name it, and ANY_TORCHVISION: where that is set, torchvision is not looked at.
Everstep then uses torchvision's image transforms without its compiled operators.
"""

import os
import sys

import torch

found = [f"torch {torch.__version__} was built for CUDA"] if torch.version.cuda is not None else []
if not os.environ.get("ANY_TORCHVISION"):
    try:
        import torchvision  # noqa: F401
    except (RuntimeError, OSError) as exc:
        found.append(f"torchvision was built for another torch ({exc})")
if found:
    sys.exit(
        f"{'; '.join(found)}: the image of target cpu would be wrong. The index TORCH_INDEX "
        f"({os.environ.get('TORCH_INDEX')}) did not answer, or lacks these versions. Name one that "
        "has them by TORCH_INDEX=URL, or build the target cuda (EVERSTEP_TARGET=cuda)."
    )
