"""Read torch's flight recorder in this process. It records the collectives of every process group,
whatever the backend, unless TORCH_FR_BUFFER_SIZE is 0."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from train_fn.recovery.collective_trace import CollectiveCounts, read_counts


def collective_counts() -> CollectiveCounts | None:
    """Return how far this process is in the collectives of its group of all ranks; None without a
    group, or if the group's numbers do not tell that. Does not wait for the device."""
    if not dist.is_initialized():
        return None
    group: Any = dist.distributed_c10d._get_default_group()
    try:
        enqueued = group._get_sequence_number_for_group()
    except RuntimeError:  # a backend that does not number its collectives
        return None
    recorder: Any = _distributed_c10d
    # A build for GPUs records NCCL's collectives apart from those of other backends.
    is_nccl = dist.get_backend() == "nccl"
    dump = recorder._dump_nccl_trace_json if is_nccl else recorder._dump_fr_trace_json
    return read_counts(enqueued, dump(includeCollectives=True))
