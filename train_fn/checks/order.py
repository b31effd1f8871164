"""Mistakes in the order of a user's loop under ``es.protect``.

What differs between ranks could not be trusted by one. What a commit leaves behind, as gradients
that are still being added up, is in no state. Ranks of a sharded model must meet in one order.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from train_fn.checks.check import Check, Moment, checked
from train_fn.errors import BadTask, few
from train_fn.samples.sampler import MASK64
from train_fn.step.peers import Peers

if TYPE_CHECKING:
    from train_fn.protect.arguments import LoopParts
    from train_fn.protect.commits import Updates
    from train_fn.protect.loop_state import LoopState

_LOOKED_AT = 8


class SameOnAllRanks(Check):
    """Refuse a loop whose ranks commit different states, at the first commit of an attempt."""

    costs = dict.fromkeys((Moment.STEP,), "digests of the state, in an attempt's first step")

    def __init__(self, state: LoopState, peers: Peers) -> None:
        self._state, self._peers = state, peers
        self._is_due = not peers.alone

    def after(self, moment: Moment, source: str) -> None:
        """Compare the state of the first commit between ranks. A collective."""
        if self._is_due:
            self._is_due = False
            self._compare(self._peers.gather(self._state.digests()))

    def _compare(self, of_ranks: list[dict[str, str]]) -> None:
        for rank, digests in enumerate(of_ranks):
            differing = [
                name
                for name in digests
                if not self._state.is_of_rank(name) and digests[name] != of_ranks[0].get(name)
            ]
            if differing:
                way_out = (
                    "wrap the model by DistributedDataParallel"
                    if "the trained weights" in differing
                    else "compute these from what all ranks have, as SyncBatchNorm does, or take "
                    "the mean over the ranks before state.step()"
                )
                raise BadTask(
                    f"{few(differing)} differ between rank {rank} and rank 0 after state.step(). "
                    f"es.protect keeps one state for all ranks: {way_out}"
                )


class GradientsUsed(Check):
    """Refuse a commit that leaves gradients or weights behind. A step that was left out is fine;
    gradients that are still being added up are not, as no state holds them."""

    costs = dict.fromkeys((Moment.LOSS,), "a look at eight gradients")

    def __init__(self, state: LoopState, updates: Updates) -> None:
        parts = state.parts
        self._state, self._parts, self._updates = state, parts, updates
        self._scalers = [
            name for name, each in parts.others.items() if isinstance(each, torch.amp.GradScaler)
        ]
        self._num_weights = _num_weights(parts)
        self._units: list[Any] = []
        """The modules of a sharded model that are gathered by themselves."""
        self._used: list[tuple[int, int]] = []
        """Marks of the gradients that an earlier commit has used."""

    def after(self, moment: Moment, source: str) -> None:
        self._require_summed()
        if (now := _num_weights(self._parts)) != self._num_weights:
            name = next(name for name in now if now[name] != self._num_weights[name])
            raise BadTask(
                f"the optimizer{name and f' {name!r}'} holds {now[name]} weights instead of "
                f"{self._num_weights[name]} when the loop began, so no restart could load its "
                "state. Build it with all weights that are ever trained, and let requires_grad_() "
                "say which are at present"
            )
        marks = [
            (id(weight.grad), weight.grad._version)
            for weight in self._parts.optimized()
            if weight.grad is not None
        ][:_LOOKED_AT]
        used, self._used = self._used, marks
        if self._updates.since_commit:
            return
        if self._state.weights_have_changed():
            raise BadTask(
                f"step {self._state.step + 1} changed the trained weights, but no optimizer that "
                f"es.protect was given has stepped. {self._who_steps()}"
            )
        if marks in ([], used) or self._state.changed_parts(self._scalers):
            return
        if any(
            bool(weight.grad.any()) for weight in self._parts.optimized() if weight.grad is not None
        ):
            raise BadTask(
                f"state.step() was called for step {self._state.step + 1} while gradients are "
                "being added up: no state holds them, so a restart would lose them. Call it only "
                "after optimizer.step(): with es.loader(DataLoader), once for several batches; "
                "with es.loader(dataset), raise global_batch_size and cut the batch in the loop. "
                "If the step was left out on purpose, call optimizer.zero_grad() before"
            )

    def _require_summed(self) -> None:
        """Raise BadTask if gradients of a sharded model lie where only FSDP2 sees them."""
        if self._parts.piece is None:
            return
        from train_fn.state.sharded import holds_gradients, units_in  # FSDP2 takes half a second

        self._units = self._units or units_in(self._parts.models.values())
        if holds_gradients(self._units):
            raise BadTask(
                f"state.step() was called for step {self._state.step + 1} while gradients of a "
                "sharded model wait to be summed over the ranks: no state holds them, and the "
                "optimizer did not see them. Call model.set_requires_gradient_sync(True), and "
                "set_requires_all_reduce(True), before the last backward pass of each step, let it "
                "use all layers that others have used, and call state.step() after optimizer.step()"
            )

    def _who_steps(self) -> str:
        """Return which optimizer to pass: often one that the given one holds, as SAM's base."""
        inner = [
            f"{prefix}{name}"
            for prefix, optimizer in self._parts.optimizers.items()
            for name, value in vars(optimizer).items()
            if isinstance(value, torch.optim.Optimizer)
        ]
        if inner:
            return f"It holds another one: pass that, optimizer.{inner[0]}, with torn='shadow'"
        return (
            "Pass the optimizer whose step() the loop calls, and do not put another one in its "
            "place"
        )


def _num_weights(parts: LoopParts) -> dict[str, int]:
    return {
        name: sum(len(group["params"]) for group in optimizer.param_groups)
        for name, optimizer in parts.optimizers.items()
    }


# ---------------------------------------------------------------- sharded

# FSDP2 gathers weights, and sums gradients, in the order in which a rank uses its modules. Where
# ranks leave out different layers of one size, or call full_tensor() of different weights, torch
# would mix the two without an error. So they compare what they gathered and summed before anything
# is changed. Where one rank makes a pass alone, all would wait, or gloo would end the processes. So
# in an attempt's first two steps they also compare before each time that they meet. An attempt that
# was ended since its ranks waited is followed by one that begins with the same step.

_GROUPS = "fsdp._fully_shard._fsdp_param_group"
_MEETINGS = (
    (_GROUPS, "foreach_all_gather"),
    (_GROUPS, "foreach_reduce"),
    ("tensor._api", "redistribute_local_tensor"),
    ("tensor._dispatch", "redistribute_local_tensor"),
    ("tensor._redistribute", "redistribute_local_tensor"),
)
"""Modules and functions by which FSDP2 and DTensors meet other ranks."""
_GRADIENTS = 1 + len(_MEETINGS)
_OWN: dict[str, Any] = {}
"""These functions as torch has them."""
_SPREAD = 0x9E3779B97F4A7C15


class CallOrder:
    """Digest what this rank has done since ``take``, in order: the weights of these models that it
    gathers, and those whose gradients it sums. The newest one of a process counts. A collective."""

    def __init__(
        self, models: Iterable[nn.Module], peers: Peers, source: str | None = None
    ) -> None:
        self._weights = [*dict.fromkeys(each for model in models for each in model.parameters())]
        self._numbers = {id(each): _GRADIENTS + at for at, each in enumerate(self._weights, 1)}
        self._digest, self._in_memory = 0, dict[int, list[int]]()
        self._peers, self._group = peers, None if peers.alone else dist.new_group(backend="gloo")
        self.source = source
        """What runs while ranks compare the digest each time before they meet; else None."""
        for kind, (place, name) in enumerate(_MEETINGS, 1):
            module = importlib.import_module(f"torch.distributed.{place}")
            own = _OWN.setdefault(name, getattr(module, name))
            setattr(module, name, _noted(own, kind, weakref.ref(self)))

    def meet(self, kind: int, what: Any, old: Any, new: Any) -> None:
        """Note that this rank meets others: for weights of FSDP2's, or for its rows of a DTensor,
        which go from an ``old`` layout to a ``new`` one."""
        if not isinstance(what, torch.Tensor):
            numbers = [self._numbers.get(id(each.sharded_param), 0) for each in what]
        elif all(
            a == b or a.is_replicate() for a, b in zip(old.placements, new.placements, strict=True)
        ):
            return
        else:
            numbers = [*old.shape, *self._sharing(what)]
        self._note(kind, *numbers)
        self._compare(self._digest)

    def arrive(self) -> None:
        """Say that this rank has run the code. Call it before the ranks exchange anything else.
        Raises BadTask if others are about to meet in it. A collective while ranks compare."""
        self._compare(_RETURNED)

    @checked(
        *(Moment.FIRST_PASS, Moment.TRIED, Moment.LOSS, Moment.EVALUATED, Moment.EPOCH_HOOK),
        cost="a small exchange before each collective of the sharded model, in two steps of an "
        "attempt and in on_epoch_end",
    )
    def _compare(self, digest: int) -> None:
        if self.source is None:
            return
        rows = self._peers.exchange(digest.to_bytes(8, "little"), self._group)
        digests = [int.from_bytes(each, "little") for each in rows]
        if len(set(digests)) == 1:
            return
        rank = next(rank for rank, each in enumerate(digests) if each != _RETURNED)
        other = next(at for at, each in enumerate(digests) if each != digests[rank])
        does = "has returned" if digests[other] == _RETURNED else "does something else"
        raise BadTask(
            f"{self.source} calls the sharded model, or gathers a weight of it, on rank {rank}, "
            f"while rank {other} {does}. Do it on all ranks in the same order, and let one of them "
            "write or print what it finds, or do not shard the model"
        )

    def _sharing(self, rows: torch.Tensor) -> list[int]:
        """Return the numbers of the weights and gradients whose memory these rows use."""
        memory = rows.untyped_storage()._cdata
        found = self._in_memory.get(memory, [])
        if not found or any(self._memory(number) != memory for number in found):
            self._in_memory = {}
            for number in range(2 * len(self._weights)):
                self._in_memory.setdefault(self._memory(number), []).append(number)
        return self._in_memory.get(memory, [])

    def _memory(self, number: int) -> int:
        """Return the address of a weight's rows, or of its gradient's if the number is odd."""
        held = self._weights[number // 2].grad if number % 2 else self._weights[number // 2]
        own: Any = getattr(held, "_local_tensor", held)  # a tenth of what to_local() costs
        return 0 if own is None else own.untyped_storage()._cdata

    def _note(self, *numbers: int) -> None:
        for number in numbers:
            self._digest = (self._digest + number + 1) * _SPREAD & MASK64

    def take(self) -> int:
        """Return the digest, and which weights have gradients in it. Begin anew."""
        with_gradient = [each for each in self._weights if each.grad is not None]
        self._note(_GRADIENTS, *(self._numbers[id(each)] for each in with_gradient))
        digest, self._digest, self._in_memory = self._digest, 0, {}
        return digest


def _noted(own: Any, kind: int, order: weakref.ref[CallOrder]) -> Any:
    def meet(*args: Any, **kwargs: Any) -> Any:
        if (there := order()) is not None:
            there.meet(kind, *args[:3])
        return own(*args, **kwargs)

    return meet


_RETURNED = 0


@contextmanager
def met_by_all(order: CallOrder | None, source: str) -> Iterator[None]:
    """Raise BadTask inside the block where a rank is about to meet others for the sharded model,
    and they do not come. A collective, unless there is no order."""
    if order is None:
        yield
        return
    order.take()
    order.source = source
    try:
        yield
        order.arrive()
    finally:
        order.source = None


@checked(Moment.LOSS, Moment.EVALUATED, cost="a digest of what FSDP2 gathers and sums")
def require_same_order(orders: Sequence[int], source: str, when: str) -> None:
    """Raise BadTask if ranks have called modules in another order. All ranks decide alike."""
    if differing := [rank for rank, order in enumerate(orders) if order != orders[0]]:
        raise BadTask(
            f"{source} called other modules of the sharded model, or in another order, on rank "
            f"{differing[0]} than on rank 0 {when}: torch mixes such gradients. Let nothing that "
            "differs between ranks or samples decide which modules are called or gathered, and "
            "which gradients are summed or dropped"
        )
