"""A plug-in of torch's that lets gloo add CUDA tensors up, where nobody names another backend: two
ranks cannot share one GPU over NCCL."""

from __future__ import annotations

import torch.distributed as dist


def take_gpus() -> None:
    """Make gloo torch's backend for GPUs in this process."""
    dist.Backend.default_device_backend_map["cuda"] = "gloo"
