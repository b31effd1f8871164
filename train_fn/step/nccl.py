"""Handle dead peers under NCCL. Collectives with a dead peer neither fail nor end. Once aborted,
they end without a result and without an error.

So the controller, or torch's watchdog after the timeout, aborts the communicator. A rank checks the
communicator before it uses the result of a collective. ``recovery/settings.py`` keeps torch from
ending the process meanwhile, since the process holds the state that the run resumes from.

Only gloo is known to fail by itself. Any other backend is treated like NCCL.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from train_fn.errors import PeersGone
from train_fn.recovery.hang import CollectiveCounts, read_counts

_FAIL_BY_THEMSELVES = frozenset({"gloo"})

ABORT_S = 10.0
"""Longest wait for an abort. NCCL's abort may hang; then the process can only be ended."""

ARRIVED, _ALL_ARRIVED = "everstep/arrived", "everstep/all-arrived"
"""Keys of a group's store."""
_LOOK_S, _LONGEST_LOOK_S = 0.005, 0.1

_aborted = threading.Event()
_have_met = False
"""Whether all ranks of the attempt's group have come to its first collective."""
_keep_first: Callable[[], None] | None = None

logger = logging.getLogger(__name__)


def group_backend(device: torch.device) -> str:
    """Return the backend for ranks on such devices: NCCL on GPUs, gloo on CPUs, or the one that a
    torch plug-in has registered instead."""
    return dist.get_default_backend_for_device(device)


def fails_by_itself() -> bool:
    """Return whether the collectives of this process fail by themselves once a peer is gone. True
    without a process group, since there are no collectives then."""
    return not dist.is_initialized() or is_known_to_fail(backend_of(dist.group.WORLD))


def backend_of(group: dist.ProcessGroup | None) -> str:
    """Return the name of the backend that a group uses for the tensors of a training.

    A group that was made without a name, or with one for each kind of device, has several. Ranks
    with GPUs use that of the GPU.
    """
    name: str = dist.get_backend(group)
    if name in dist.Backend.backend_capability:
        return name
    config = dist.distributed_c10d._world.pg_backend_config[group or dist.group.WORLD]  # type: ignore[index]
    by_device = dict(pair.split(":", 1) for pair in str(config).split(",") if ":" in pair)
    device = "cuda" if torch.cuda.is_available() and "cuda" in by_device else "cpu"
    return by_device[device]


def is_known_to_fail(backend: str) -> bool:
    """Return whether a backend's collectives fail by themselves once a peer is gone."""
    return backend in _FAIL_BY_THEMSELVES


def abort_collectives() -> None:
    """Abort collectives that would never end. Do nothing if they fail by themselves.

    Any thread but the training thread may call this. The callback of ``keep_before_abort`` runs
    first.
    """
    group = dist.group.WORLD  # read once: the training thread may be leaving it
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
    """Set the callback that keeps the state before an abort, which may take long; None removes
    it."""
    global _keep_first
    _keep_first = keep


def within_limit(abort: Callable[[], None]) -> bool:
    """Call ``abort`` on its own thread, and wait for it at most ``ABORT_S`` seconds. Return whether
    it has ended."""
    thread = threading.Thread(target=abort, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        logger.error("the abort of the communicator has not ended within %g s", ABORT_S)
    return not thread.is_alive()


def require_peers() -> None:
    """Raise PeersGone if this process has aborted its group. Call this before each collective.

    Before the first one, wait at the group's store until all ranks are here. NCCL makes the
    communicator in that collective, and no abort ends that while a peer is missing.
    """
    global _have_met
    if _aborted.is_set():
        raise _lost_before()
    group = dist.group.WORLD
    if _have_met or group is None:
        return
    if fails_by_itself():
        _have_met = True  # nobody has to, and every step asks
        return
    store = dist.distributed_c10d._get_default_store()
    if store.add(ARRIVED, 1) == group.size():
        store.set(_ALL_ARRIVED, "")
    pause_s = _LOOK_S
    while not store.check([_ALL_ARRIVED]):
        if _aborted.wait(pause_s):
            raise _lost_before()
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
    _have_met = True


def _lost_before() -> PeersGone:
    return PeersGone("the communicator was aborted before this collective: its peers are gone")


def require_whole() -> None:
    """Raise PeersGone if collectives of this process were aborted, since their output is not a
    result.

    Call this after the device has finished them.
    """
    if fails_by_itself():
        return
    group = dist.group.WORLD
    assert group is not None
    error = _inner(group).get_error().name
    # Read `_aborted` after the error: it is set before the abort ends any collective.
    problem = "its peers are gone" if _aborted.is_set() else error
    if problem != "SUCCESS":
        raise PeersGone(
            f"the communicator of {backend_of(group)} was aborted ({problem}); what its "
            "collectives left is not to be used"
        )


def begin_attempt() -> None:
    """Reset marks of an earlier group of this process, and its callback."""
    global _have_met
    _aborted.clear()
    _have_met = False
    keep_before_abort(None)


def end_groups() -> None:
    """Abort the groups of this process, since destroying them would wait for their collectives."""
    for group in list(dist.distributed_c10d._world.pg_map):
        inner = _inner(group)
        if backend_of(group) not in _FAIL_BY_THEMSELVES and inner is not _outer(group):
            inner.abort()  # torch aborts only the wrapper, which does nothing
    dist.distributed_c10d._abort_process_group()


def unwrapped(backend: Any) -> Any:
    """Return the backend inside the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL adds.

    The wrapper reports no errors, and aborting it does nothing.
    """
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return backend


def _inner(group: dist.ProcessGroup) -> Any:
    """Return the part of a process group that does the work."""
    return unwrapped(_outer(group))


def _outer(group: dist.ProcessGroup) -> Any:
    device = dist.Backend.backend_capability[backend_of(group)][0]
    return group._get_backend(torch.device(device))


# ---------------------------------------------------------------- flight recorder

# Read torch's flight recorder in this process. It records the collectives of every process group,
# whatever the backend, unless TORCH_FR_BUFFER_SIZE is 0.


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
