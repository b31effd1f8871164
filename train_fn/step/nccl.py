"""NCCL where peers die: their collectives neither fail nor end, and once aborted they end without a
result and without an error.

So somebody who knows (the controller, or torch's own watchdog after the time-out) aborts the
communicator, and a rank looks at it before it believes in what was added up.
``recovery/environment.py`` keeps torch from ending the process meanwhile: it holds the state that
the run goes on from.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
import torch.distributed as dist

from train_fn.errors import PeersGone

_aborted = threading.Event()

logger = logging.getLogger(__name__)


def abort_collectives() -> None:
    """Free this process from collectives that will never end; for gloo, whose collectives fail by
    themselves, nothing happens.

    Called from any thread but the one that trains.
    """
    backend = _backend()
    if backend is None:
        return
    _aborted.set()
    logger.warning("peers are gone; aborting NCCL's communicator")
    backend.abort()


def require_whole() -> None:
    """Raise PeersGone where collectives of this process were aborted: what they left in memory is
    no result.

    To be called after the device has finished them.
    """
    backend = _backend()
    if backend is None:
        return
    problem = "its peers are gone" if _aborted.is_set() else backend.get_error().name
    if problem != "SUCCESS":
        raise PeersGone(
            f"NCCL's communicator was aborted ({problem}); the step's sums are not to be used"
        )


def begin_attempt() -> None:
    """Forget what befell an earlier attempt of this process."""
    _aborted.clear()


def _backend() -> Any | None:
    """NCCL's part of the process group; None where there is none."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return None
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device("cuda"))
