"""What must be the same on all ranks: the data, the models, what their kernels compute, and after
every step the weights.

A rank whose weights differ has computed, received or stored something wrongly. What it computed
since then is in the gradients of all, so the run goes back to a state from before. Right after code
of the user that may change weights, the code is to blame.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from everstep.wire.events import EventKind
from train_fn.checks.check import Check, Moment, checked
from train_fn.checks.trained import TrainedParameters
from train_fn.context import WorkerContext
from train_fn.errors import (
    FOUND_WITHIN,
    BadTask,
    DataChanged,
    NumericsChanged,
    PeersGone,
    few,
)
from train_fn.snapshots.election import odd_ranks
from train_fn.snapshots.store import raise_apart
from train_fn.state.contents import DRAW_ALIKE, Contents, Sketch, alike, sketch
from train_fn.state.sound_state import Numerics
from train_fn.state.train_state import TrainState
from train_fn.step.fingerprints import Fingerprints, local, word_sum
from train_fn.step.peers import Peers
from train_fn.step.report import StepTotals

logger = logging.getLogger(__name__)


@checked(Moment.RESTORED, cost="8 samples of each data set, and a small exchange")
def check_data(peers: Peers, state: TrainState, warn: Callable[[str], None]) -> None:
    """Raise DataChanged if a rank has other data than rank 0. A collective."""
    if state.contents is not None and (names := state.contents.unstable(state.contents.firsts())):
        warn(
            f"{few(names)} is another each time it is read, though all generators are seeded: the "
            "data set draws from a generator of its own, or changes its samples in place. Results "
            "depend on the number of workers and on restarts. In __getitem__ draw from torch's, "
            "numpy's or Python's global generators, and return copies"
        )
    fingerprints = peers.gather(state.fingerprint)
    if len(set(fingerprints)) > 1:
        each = ", ".join(
            f"rank {rank}: {fingerprint}" for rank, fingerprint in enumerate(fingerprints)
        )
        raise DataChanged(
            f"{state.data_name} differs between nodes ({each}); make it the same on all"
        )
    if state.contents is not None:
        require_same_samples(peers, state.contents, state.data_name, "In build_datasets ")


@checked(Moment.RESTORED, cost="8 samples of each data set, and a small exchange")
def require_same_samples(peers: Peers, contents: Contents, data_name: str, advice: str) -> None:
    """Raise DataChanged if a rank has other samples than rank 0. A collective.

    Args:
        advice: begins the sentence that says what to do.
    """
    if peers.alone:
        return
    differing = peers.gather(contents.differing(peers.share(contents.sketches, 0)))
    suspects = sorted({name for names in differing for name in names})
    if not suspects:
        return
    unstable = {name for names in peers.gather(contents.unstable(suspects)) for name in names}
    contents.forget(unstable)
    differing = [[name for name in names if name not in unstable] for names in differing]
    set_orders = peers.gather(hash("everstep"))
    for rank, names in enumerate(differing):
        if names:
            raise DataChanged(
                f"{data_name} differs between ranks: rank {rank} has another {few(names)} "
                f"than rank 0. {advice}"
                f"{DRAW_ALIKE}{_set_order(set_orders[rank] != set_orders[0])}"
            )


@checked(Moment.RESTORED, cost="a fingerprint of all weights, and a small exchange")
def check_model(peers: Peers, source: str, mine: dict[str, Sketch], *, fresh: bool) -> None:
    """Raise BadTask if a rank has built another model than rank 0. A collective.

    Weights that a restored state replaces are compared only if ``fresh``.

    Args:
        source: the method that built it.
        mine: sketches of this rank's weights.
    """
    if peers.alone:
        return
    theirs = peers.share(mine, 0)
    names = [
        name
        for name in {**theirs, **mine}
        if name not in mine or name not in theirs or not alike(mine[name], theirs[name])
    ]
    set_orders = peers.gather((few([f"`{name}`" for name in names]), hash("everstep")))
    for rank, (named, set_order) in enumerate(set_orders):
        if named:
            raise BadTask(
                f"{source} built another model on rank {rank} than on "
                f"rank 0: {named} "
                f"{'is' if fresh else 'is kept by no state, and is'} not the same. In build_model "
                f"{DRAW_ALIKE}, and let all nodes "
                f"read the same files{_set_order(set_order != set_orders[0][1])}"
            )


def _set_order(differs: bool) -> str:
    """Return a likely cause, if interpreters list sets in another order."""
    if not differs:
        return ""
    return (
        ". Sets are listed in another order on that rank than on rank 0: have the operator set "
        "PYTHONHASHSEED=0 where nodes are "
        "started, or sort them"
    )


@checked(Moment.RESTORED, cost="none: the first pass gives the numbers")
def check_numerics(
    ctx: WorkerContext, peers: Peers, state: TrainState, mine: Numerics | None
) -> None:
    """Compare every rank's fingerprint with that of the state; in a run's first attempt, and once
    micro-batches have become smaller, with that of rank 0. Report what differs. A collective.

    Raise NumericsChanged on a rank that differs, and PeersGone on the others, if
    ``train.exactness`` is elastic.
    """
    if mine is None:
        return
    ranks: list[tuple[str, Numerics]] = peers.gather((ctx.node_id, mine))
    known = None if state.numerics is None else Numerics(**state.numerics)
    is_first = known is None or known.micro_batch_size not in (None, mine.micro_batch_size)
    expected = ranks[0][1] if known is None or is_first else known
    state.numerics = expected.dump()
    differing = [
        {
            "rank": rank,
            "node_id": node_id,
            "differs": expected.differences(found),
            "kernels": expected.unlike(found),
        }
        for rank, (node_id, found) in enumerate(ranks)
        if expected.differences(found)
    ]
    if not differing:
        return
    reference = "rank 0" if is_first else "the state"
    if ctx.world_rank == 0:
        ctx.journal.emit(
            EventKind.NUMERICS_CHANGED,
            {"step": state.step, "reference": reference, "ranks": differing},
        )
    own = [entry for entry in differing if entry["rank"] == ctx.world_rank]
    if ctx.spec.train.exactness != "elastic":
        for entry in own:
            logger.warning("this rank computes other bits than %s: %s", reference, entry)
        return
    ctx.journal.flush(0.0)
    if not own:
        raise PeersGone("another rank computes other bits, and was refused")
    raise NumericsChanged(ctx.node_id, reference, expected.differences(mine), expected.unlike(mine))


# ---------------------------------------------------------------- weights


class Together(Check):
    """Compare the weights of the ranks, which must be equal to the last bit. Processors of other
    kinds may round differently, which only the log tells.

    Args:
        source: the method that trains, for errors.
    """

    costs = dict.fromkeys(
        (Moment.EVALUATED, Moment.EPOCH_HOOK, Moment.LEAVING),
        "a read of all weights and buffers, and a small exchange",
    )

    def __init__(
        self,
        ctx: WorkerContext,
        peers: Peers,
        state: TrainState,
        trained: TrainedParameters,
        source: str,
    ) -> None:
        self._ctx, self._peers, self._state = ctx, peers, state
        self._trained, self._source = trained, source
        self.fingerprints = Fingerprints(trained.parameters)
        self.must_agree = True
        """Whether the kernels of all ranks must give equal bits."""
        self._has_warned = False

    def before(self, moment: Moment) -> None:
        if moment is Moment.EVALUATED:
            self._compare(self._source, excused=False)

    def after(self, moment: Moment, source: str) -> None:
        if moment is not Moment.EVALUATED:
            self._compare(source, excused=moment is Moment.EPOCH_HOOK)

    def _compare(self, source: str, *, excused: bool) -> None:
        """Raise RanksApart, PeerApart or BadTask on every rank if trained parameters differ by more
        than other hardware explains; BadTask for other tensors of the state, and for modes. A
        collective.

        Args:
            source: the code that was run since the ranks were last compared.
            excused: whether this code may have changed weights by itself.
        """
        if self._peers.alone:
            return
        of = self._state.num_weight_parts
        if of != self._peers.world_size:  # else no rank has what another one has
            self._compare_trained(source, of, excused=excused)
        held = _tensors_of(self._state, trained=False)
        modes = {
            f"the mode of {name or 'the model'}": int(module.training)
            for name, module in self._state.model.named_modules()
        }
        _require_same(self._peers, source, held, modes)

    def _compare_trained(self, source: str, of: int, *, excused: bool) -> None:
        sums, differing = self._peers.gather(self._trained.sums()), self._trained.differing
        names = sorted(
            {name for rank, own in enumerate(sums) for name in differing(sums[rank % of], own)}
        )
        if not names:
            return
        if self.must_agree and not excused and of == 1:  # else the next gate says it
            self.raise_apart([tuple(each) for each in sums], f"weights {few(names)}")
        _require_alike(source, names, self._peers.gather(self._trained.sketches(names)), of)

    @checked(Moment.STEP, cost="digests of gradients and weights, sent with the step's report")
    def require(self, totals: StepTotals) -> None:
        """Raise RanksApart, or PeerApart on ranks that most others agree with, if ranks differed
        after the step before. All ranks decide alike, by the same totals.

        Ranks with other kernels may round differently: then it is only logged, once.
        """
        if not totals.are_ranks_apart:
            return
        step = self._state.step
        if not self.must_agree:
            if not self._has_warned:
                logger.warning(
                    "weights or gradients of the ranks differ after step %d. Their kernels differ, "
                    "or are not deterministic, so they may round differently",
                    step,
                )
            self._has_warned = True
            return
        own, of_ranks = self.fingerprints, totals.fingerprints()
        try:
            found = self._peers.gather((own.gradient, own.weights, self._trained.sums()))
        except Exception as exc:  # what is known already must not be lost
            logger.warning("the ranks could not compare which tensors differ: %s", exc)
            self.raise_apart(of_ranks, "weights or gradients")
        names = {
            name for _, _, sums in found for name in self._trained.differing(found[0][2], sums)
        }
        what = [f"weights {few(sorted(names))}"] if names else []
        if len({gradient for gradient, _, _ in found}) > 1:
            what.append(f"the summed gradient of step {step}")
        self.raise_apart(of_ranks, " and ".join(what or ["a part of the weights"]))

    def raise_apart(
        self, of_ranks: Sequence[Hashable], what: str, odd: tuple[int, ...] | None = None
    ) -> NoReturn:
        """Strike the states that may be wrong, then raise RanksApart on the ranks that differ from
        most others, and PeerApart on these. Without a majority all ranks raise RanksApart.

        Args:
            of_ranks: by rank, what is equal on ranks that agree.
            what: what differs, in words.
            odd: the ranks that are wrong, if that is known by other means.
        """
        step = self._state.step
        odd = odd_ranks(of_ranks) if odd is None else odd
        raise_apart(self._ctx, step, max(self._state.begun_at, step - FOUND_WITHIN), odd, what)


class SameAfterStep(Check):
    """Refuse an ``after_step`` that leaves other values on one rank than on others. The hook is
    part of the commit, where no rank may wait for others, so ranks are compared after it."""

    costs = dict.fromkeys(
        (Moment.AFTER_STEP, Moment.STEP),
        "a read of all tensors and an exchange, in an attempt's first step and an epoch's last",
    )

    def __init__(self, peers: Peers, state: TrainState) -> None:
        self._peers, self._state = peers, state
        self._is_first, self._is_due = True, False
        self._source = ""

    def after(self, moment: Moment, source: str) -> None:
        if moment is Moment.AFTER_STEP:
            is_last = (self._state.step + 1) % self._state.steps_per_epoch == 0
            self._is_due = not self._peers.alone and (self._is_first or is_last)
            self._is_first, self._source = False, source
        elif self._is_due:
            self._is_due = False
            _require_same(self._peers, self._source, _tensors_of(self._state))


def _tensors_of(state: TrainState, *, trained: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of the model that the run's state holds and every rank has whole, by name.

    Args:
        trained: whether those are among them that an optimizer changes.
    """
    held = {**state.model.state_dict(), **state.unsaved()}
    if state.frozen is not None:
        held = state.frozen.without(held)
    parameters = state.model.named_parameters(remove_duplicate=False)
    left_out = {name for name, value in parameters if value.requires_grad and not trained}
    return {
        name: value
        for name, value in held.items()
        if name not in left_out
        and isinstance(value, torch.Tensor)
        and local(value) is value
        and value.layout is torch.strided
        and not is_lazy(value)
    }


def _require_same(
    peers: Peers,
    source: str,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, int] | None = None,
) -> None:
    """Raise BadTask if ranks differ in one of these by more than other hardware explains. A
    collective."""
    mine = {**(numbers or {}), **{name: word_sum(value) for name, value in tensors.items()}}
    of_ranks = peers.gather(mine)
    names = sorted(
        name
        for name in {name for each in of_ranks for name in each}
        if len({each.get(name) for each in of_ranks}) > 1
    )
    if names:
        found = {name: sketch(tensors[name]) for name in names if name in tensors}
        _require_alike(source, names, peers.gather(found))


@checked(
    *(Moment.STEP, Moment.EVALUATED, Moment.EPOCH_HOOK, Moment.LEAVING),
    cost="fingerprints of the tensors that differ",
)
def _require_alike(
    source: str, names: list[str], sketches: list[dict[str, Sketch]], of: int = 1
) -> None:
    """Raise BadTask if the named tensors differ between ranks by more than other hardware explains:
    between those that have the same one of ``of`` parts."""
    unlike = [
        name
        for name in names
        if not all(
            name in own and alike(sketches[rank % of][name], own[name])
            for rank, own in enumerate(sketches)
        )
    ]
    if unlike:
        raise BadTask(
            f"{source} left different values on the ranks: {few(unlike)}. Every rank must change "
            "the model in the same way: let only the optimizer and on_epoch_end change it, and "
            "draw random numbers from a generator with a fixed seed. If no code of yours does "
            "it, a device computes wrongly"
        )
    logger.warning(
        "the weights of the ranks differ in their last bits: %s. Nodes with other processors round "
        "differently",
        few(names),
    )


class StatelessHooks(Check):
    """Refuse a communication hook of DDP that keeps a state. Each rank has its own, such as the
    errors that compressed gradients left, and no checkpoint holds them."""

    costs = dict.fromkeys((Moment.LOSS,), "a look at a list")

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._wrapped = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
        ]

    def after(self, moment: Moment, source: str) -> None:
        for wrapped in self._wrapped:
            for hook, state in getattr(wrapped, "_comm_hooks", ()):
                if state is not None and not isinstance(state, ProcessGroup):
                    raise BadTask(
                        f"the communication hook {getattr(hook, '__name__', hook)} of the model "
                        f"keeps a state of its own ({type(state).__name__}), which no checkpoint "
                        "holds: after a restart the weights would be others. Register one that "
                        "keeps none, such as fp16_compress_hook, or leave it out"
                    )
