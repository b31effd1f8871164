"""Collectives between the ranks of an attempt. With one rank every call returns at once, so callers
need no special case.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train_fn.errors import BadTask, StepNotWhole
from train_fn.step.nccl import (
    end_groups,
    fails_by_itself,
    require_peers,
    require_whole,
    within_limit,
)

_NEVER_SENT = 0x7E5EE5
"""Tag of a message that nobody sends."""
_GATHERED, _SHARED = 0xE5EA, 0xE5EB
"""Marks before the sizes of what ``gather`` and ``share`` exchange."""
_SIZE_BITS = 40


@dataclass(frozen=True)
class Peers:
    """Run collectives between this rank and its peers. All ranks make the calls in the same order.

    A call raises PeersGone if this process has aborted its group.
    """

    rank: int
    world_size: int
    device: torch.device

    @cached_property
    def on_cpu(self) -> bool:
        """Return whether the device is a CPU. Cached, since every step reads it."""
        return self.device.type == "cpu"

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        """Start to overwrite ``tensor`` with that of rank ``source``. Wait for the returned work
        before reading it."""
        if self.alone:
            return None
        require_peers()
        work: dist.Work | None = dist.broadcast(tensor, source, async_op=True)
        return work

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start to overwrite ``tensor`` with its sum over all ranks. Wait for the returned work
        before reading it."""
        if self.alone:
            return None
        require_peers()
        work: dist.Work | None = dist.all_reduce(tensor, async_op=True)
        return work

    @cached_property
    def others(self) -> list[int]:
        """Return the ranks of the peers. Each rank begins with another one, so that not all send
        to the same."""
        return [(self.rank + offset) % self.world_size for offset in range(1, self.world_size)]

    @property
    def has_cheap_messages(self) -> bool:
        """Return whether messages between two ranks cost no more than their part in a collective,
        and fail by themselves if the other one is gone."""
        return self._fails_by_itself

    def start_send(self, tensor: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Start to send the bytes of a contiguous ``tensor`` to rank ``to``."""
        work = dist.isend(tensor.view(torch.uint8), to, tag=tag)
        assert work is not None
        return work

    def start_receive(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work:
        """Start to overwrite a contiguous ``tensor`` with the bytes that rank ``source`` sends with
        the same tag. Wait for the returned work before reading it."""
        work = dist.irecv(tensor.view(torch.uint8), source, tag=tag)
        assert work is not None
        return work

    def start_all_gather(
        self, rows: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> dist.Work:
        """Start to overwrite ``rows``, flat, with the contiguous ``own`` of every rank, by rank.
        ``group`` is one of the same ranks, beside that of the attempt: no abort ends it."""
        if group is None:
            require_peers()
        # torch 2.14 gives it a new name, and warns of the old one
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: dist.Work = gather(
            rows.view(torch.uint8), own.view(torch.uint8), group=group, async_op=True
        )
        return work

    def start_all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, counts: list[int], sizes: list[int]
    ) -> dist.Work:
        """Start to send a part of the flat ``sent`` to each rank, and to receive one from each.

        Args:
            counts: elements that come from each rank.
            sizes: elements that go to each rank.
        """
        require_peers()
        unit = sent.element_size()
        work: dist.Work | None = dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [unit * count for count in counts],
            [unit * size for size in sizes],
            async_op=True,
        )
        assert work is not None
        return work

    def result(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the CPU once the collective that writes it has finished.

        Raise PeersGone if the collective was aborted.
        """
        if tensor.is_cuda:
            # CUDA locks out every other thread while it copies to memory that is not pinned; one of
            # them may have to keep the state (`loop/leave.py`)
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            arrived.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        else:
            arrived = tensor.cpu()
        self.require_whole()
        return arrived

    def exchange(self, own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
        """Return the bytes of every rank, by rank, each of the size of ``own``. A collective.
        ``group`` is as in ``start_all_gather``, and one of gloo's."""
        if self.alone:
            return [own]
        row = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        row = row.to(self.device) if group is None else row
        rows = row.new_empty(self.world_size, len(row))
        self.start_all_gather(rows.view(-1), row, group).wait()
        arrived = self.result(rows) if group is None else rows
        return [bytes(each.numpy()) for each in arrived]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (any picklable object), by rank. Nothing is unpickled
        before it is known to be complete.

        Raise BadTask if a collective of the user's code was met.
        """
        if self.alone:
            return [value]
        require_peers()
        data = self._pickled(value)
        length = torch.tensor([_marked(_GATHERED, data.numel())], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length)
        num_bytes = [_size_after(_GATHERED, each) for each in self.result(torch.cat(lengths))]
        padded = torch.nn.functional.pad(data, (0, max(num_bytes) - data.numel()))
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(rows, padded)
        arrived = [self.result(row) for row in rows]
        return [_unpickled(row[:size]) for row, size in zip(arrived, num_bytes, strict=True)]

    def share(self, value: Any, source: int) -> Any:
        """Return the ``value`` of rank ``source``, and ignore the other ranks'. Nothing is
        unpickled before it is known to be complete.

        Raise BadTask if a collective of the user's code was met.
        """
        if self.alone:
            return value
        require_peers()
        data = self._pickled(value if self.rank == source else None)
        length = torch.tensor([_marked(_SHARED, data.numel())], device=self.device)
        dist.broadcast(length, source)
        num_bytes = _size_after(_SHARED, self.result(length))
        if self.rank != source:
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(data, source)
        arrived = self.result(data)
        return value if self.rank == source else _unpickled(arrived)

    def require_whole(self) -> None:
        """Raise PeersGone if an earlier collective was aborted. Call this after the device has
        finished them."""
        if not self.alone and not self._fails_by_itself:
            require_whole()

    @cached_property
    def _fails_by_itself(self) -> bool:
        """Return ``nccl.fails_by_itself()``, cached like ``on_cpu``."""
        return fails_by_itself()

    def _pickled(self, value: Any) -> torch.Tensor:
        data = bytearray(pickle.dumps(value))
        return torch.frombuffer(data, dtype=torch.uint8).to(self.device)


def _marked(mark: int, num_bytes: int) -> int:
    return mark << _SIZE_BITS | num_bytes


def _size_after(mark: int, number: torch.Tensor) -> int:
    """Return the size behind its mark. Raise BadTask without that mark: the number is not ours."""
    found, num_bytes = divmod(int(number), 1 << _SIZE_BITS)
    if found != mark:
        raise BadTask(
            "a collective of the task's code was met where the ranks exchange what they agree on: "
            "some ranks call it and others do not, or it is on a process group of an earlier "
            "attempt. Call collectives on all ranks alike, and keep no process group"
        )
    return num_bytes


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def end_process_group() -> bool:
    """Close the connections of this process, if there are any, so that peers notice at once. Return
    whether they are closed: an abort may hang."""
    if not dist.is_initialized():
        return True
    if not fails_by_itself():
        return within_limit(end_groups)
    close_connections()
    dist.destroy_process_group()
    return True


def close_connections() -> None:
    """Make the collectives of this process fail whose backend lets them fail. Any thread may call
    this."""
    if dist.is_initialized() and fails_by_itself():
        for group in list(dist.distributed_c10d._world.pg_map):
            _close_connections(group)


def _close_connections(group: dist.ProcessGroup) -> None:
    """Make every pending gloo collective of this process fail, and those of its peers with it.

    Destroying the group would wait for these collectives first. They wait for peers that do the
    same, or that are in a collective which this rank has left, so no rank would ever finish. When a
    message does not arrive in time, gloo closes all connections of the group.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            # The message did not arrive, or this connection is already closed.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


# ---------------------------------------------------------------- whole exchange

# Complete DDP's gradient all-reduce when a backward pass did not reach every parameter.
#
# DDP all-reduces a bucket once all of its parameters have a gradient. A parameter that this rank's
# last micro-batch does not use never becomes ready. Its bucket and those after it are then not
# reduced on this rank, while the other ranks wait or go on without it. Such a parameter contributes
# zero, or the gradient from the rank's earlier micro-batches.

_UNREADY = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""How torch's reducer names such parameters: by their index among those that it reduces."""


class _Reach(torch.autograd.Function):
    """Let a backward pass reach parameters without adding to their gradients. DDP's hooks run as
    they do after a gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def finish_exchange(
    wrapped: DistributedDataParallel,
    exchanged: Sequence[nn.Parameter],
    step: int,
    check_flags: Callable[[], None],
) -> None:
    """Include the parameters that the last backward pass did not reach in the all-reduce. Costs
    next to nothing if it reached all.

    Args:
        exchanged: the parameters that DDP all-reduces, in DDP's order.
        step: steps done, for the error.
        check_flags: raises BadTask if the task froze a parameter, since no backward pass reaches
            it.

    Raises:
        StepNotWhole: the exchange could not be completed.
    """
    problem = _unfinished(wrapped)
    if problem is None:
        return
    check_flags()
    found = _UNREADY.search(problem)
    missing = [exchanged[int(place)] for place in found[1].split()] if found else []
    if not missing or not all(parameter.requires_grad for parameter in missing):
        raise StepNotWhole(step, problem)
    _Reach.apply(*missing).backward()  # type: ignore[no-untyped-call]
    problem = _unfinished(wrapped)
    if problem is not None:
        raise StepNotWhole(step, problem)


def fill_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give a zero gradient to parameters that no micro-batch used, as the all-reduce does. So the
    optimizer treats a parameter the same at every world size."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def bucket_sizes(wrapped: nn.Module | None) -> list[int]:
    """Return the bytes of DDP's gradient buckets, in the order in which backward fills them; an
    empty list without DDP."""
    if not isinstance(wrapped, DistributedDataParallel):
        return []
    known = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = str(known.get("rebuilt_bucket_sizes") or known.get("bucket_sizes") or "")
    return [int(size) for size in sizes.split(",") if size.strip()]


def _unfinished(wrapped: DistributedDataParallel) -> str | None:
    """Return torch's error if the gradient all-reduce is not complete; None if it is."""
    try:
        wrapped.reducer._check_reducer_finalized()
    except RuntimeError as exc:
        return str(exc)
    return None


# ---------------------------------------------------------------- used parameters

# Find the parameters that no micro-batch of a step used, so that the optimizer skips them at every
# world size, as plain torch does on one rank.


class UsedParameters:
    """Note which parameters got a gradient from this rank's micro-batches since the last
    ``drop_unused``.

    The exchange of gradients gives every parameter one, of zero if no rank used it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers) -> None:
        self._parameters, self._peers = parameters, peers
        self._used: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    def remove_hooks(self) -> None:
        """Note nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, number: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # the hook also runs where a backward gives nothing
            self._used.add(number)

    def __len__(self) -> int:
        return len(self._used)

    def forget(self) -> None:
        """Forget what was used since the last ``drop_unused``."""
        self._used.clear()

    def drop_unused(self) -> None:
        """Remove the gradients of parameters that no rank used. A collective."""
        flags = torch.zeros(len(self._parameters), dtype=torch.int32)
        flags[list(self._used)] = 1
        self.forget()
        flags = flags.to(self._peers.device)
        work = self._peers.start_sum(flags)
        if work is not None:
            work.wait()
        for parameter, uses in zip(
            self._parameters, self._peers.result(flags).tolist(), strict=True
        ):
            if not uses:
                parameter.grad = None
