"""Form the process group of forked ranks, in place of Ray's own backend for torch, which would do
so in the hosts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from train_fn.recovery.launch import Meeting


class RankGroup(Backend):  # type: ignore[misc]
    """Let all ranks meet at the first one's node."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Form the group. Raises RayError."""
        actors = [worker.actor for worker in worker_group.get_workers()]
        timeout_s = backend_config.timeout_s
        address, port = ray.get(actors[0].open_store.remote(timeout_s))
        meeting = Meeting(address, port, backend_config.backend, timeout_s)
        ray.get([actor.join.remote(meeting) for actor in actors])


@dataclass
class RankGroupConfig(TorchConfig):  # type: ignore[misc]
    """Ray's settings of torch, for forked ranks."""

    @property
    def backend_cls(self) -> type[Backend]:
        return RankGroup

    @property
    def train_func_context(self) -> Any:
        """Return a context that does nothing: Ray's would open the GPU in the host."""
        return nullcontext
