"""NCCL where peers die: their collectives neither fail nor end, and once aborted they end without a
result and without an error.

So somebody who knows (the controller, or torch's own watchdog after the time-out) aborts the
communicator, and a rank looks at it before it believes in what was added up.
``recovery/environment.py`` keeps torch from ending the process meanwhile: it holds the state that
the run goes on from.

Only gloo is known to fail by itself. Any other backend is treated as NCCL is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from train_fn.errors import PeersGone

_FAIL_BY_THEMSELVES = frozenset({"gloo"})

ABORT_S = 10.0
"""Longest wait for an abort. NCCL's own may hang, and what is left is to end the process."""

_aborted = threading.Event()
_keep_first: Callable[[], None] | None = None

logger = logging.getLogger(__name__)


def group_backend(device: torch.device) -> str:
    """Return the backend for a group of ranks on such devices: NCCL on GPUs, gloo on CPUs, or what
    a plug-in of torch's has put in its place."""
    return dist.get_default_backend_for_device(device)


def fails_by_itself() -> bool:
    """Return whether a collective of this process fails once a peer is gone. Without a process
    group there is none to fail."""
    return not dist.is_initialized() or is_known_to_fail(dist.get_backend())


def is_known_to_fail(backend: str) -> bool:
    """Return whether a backend's collectives fail by themselves once a peer is gone."""
    return backend in _FAIL_BY_THEMSELVES


def abort_collectives() -> None:
    """Free this process from collectives that will never end; where they fail by themselves,
    nothing happens.

    Called from any thread but the one that trains. What ``keep_before_abort`` was given is called
    first.
    """
    group = dist.group.WORLD  # the training thread may be leaving it
    if group is None or fails_by_itself():
        return
    _aborted.set()
    logger.warning("peers are gone; aborting the communicator of %s", group.name())
    if (keep := _keep_first) is not None:
        try:
            keep()
        except Exception:
            logger.exception("the state could not be kept before the abort")
    within_limit(lambda: _inner(group).abort())


def keep_before_abort(keep: Callable[[], None] | None) -> None:
    """Have the state kept before an abort, which may take long; None for no more."""
    global _keep_first
    _keep_first = keep


def within_limit(abort: Callable[[], None]) -> None:
    """Call ``abort`` on a thread of its own, and wait ``ABORT_S`` for it at most."""
    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        logger.error("the abort of the communicator has not ended within %g s", ABORT_S)


def require_whole() -> None:
    """Raise PeersGone where collectives of this process were aborted: what they left in memory is
    no result.

    To be called after the device has finished them.
    """
    if fails_by_itself():
        return
    group = dist.group.WORLD
    assert group is not None
    error = _inner(group).get_error().name
    # read after that: whoever aborts says so before anything ends
    problem = "its peers are gone" if _aborted.is_set() else error
    if problem != "SUCCESS":
        raise PeersGone(
            f"the communicator of {dist.get_backend()} was aborted ({problem}); what its "
            "collectives left is not to be used"
        )


def begin_attempt() -> None:
    """Forget what befell an earlier attempt of this process."""
    _aborted.clear()
    keep_before_abort(None)


def end_groups() -> None:
    """Abort this process's groups, whatever their collectives wait for: to destroy them would wait,
    too."""
    for group in list(dist.distributed_c10d._world.pg_map):
        inner = _inner(group)
        if dist.get_backend(group) not in _FAIL_BY_THEMSELVES and inner is not _outer(group):
            inner.abort()  # torch aborts the wrapper, which does nothing
    dist.distributed_c10d._abort_process_group()


def unwrapped(backend: Any) -> Any:
    """Return the backend inside of the one that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it.

    The outer one knows no errors, and to abort it does nothing.
    """
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def _inner(group: dist.ProcessGroup) -> Any:
    """Return the part of a process group that does the work."""
    return unwrapped(_outer(group))


def _outer(group: dist.ProcessGroup) -> Any:
    device = dist.Backend.backend_capability[dist.get_backend(group)][0]
    return group._get_backend(torch.device(device))
