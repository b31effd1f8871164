"""Errors of the training function, raised on a rank.

TrainError
├── NonFiniteLoss      a global batch's loss or gradient is NaN or infinite; no rank took the step
├── NothingTrained     fp16's loss scaler leaves out every step: gradients are never finite
├── NonFiniteWeights   the weights of a state are NaN or infinite; it is neither saved nor left
├── DataMissing        a data set is not there; says where it was looked for and how to get it
├── DataChanged        the data set is not the one that the state to resume was trained on
├── ForkRefused        the checkpoint of another run that this one begins from cannot be used
├── BadTask            a task breaks its protocol
├── ScriptExited       a user's script exited with another code than 0
├── EndedItself        a user's code called os._exit
├── RankDied           a rank's process is gone; its host says how it ended
├── NumericsChanged    a node's kernels compute other bits than those of the run
├── SecretMissing      a secret of the spec is not on this node
├── StepNotWhole       a step's totals lack ranks or samples; no rank took the step
├── StateNotWhole      a state's ledger does not account for the samples of its steps
├── RanksApart         ranks that must be equal have other weights or gradients; none took the step
├── Miscomputed        an audit found that this rank computes other bits than others
├── PeersGone          what all ranks do together did not come about
│   ├── PeerApart      another rank has other weights or gradients than most
│   └── PeerMiscomputed  an audit found that another rank computes other bits
├── Replaced           a newer submission of the run has begun
├── CheckpointFailed   the final checkpoint could not be committed
└── StorageNotShared   the run's storage is not the same on all nodes

What kind of failure each of them is stands in ``recovery/evidence.py``.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from everstep.errors import KeptWhole


class TrainError(KeptWhole, Exception):
    """Base of what this package raises on purpose."""


class NonFiniteLoss(TrainError):
    """``step`` counts the steps done before the one that was refused; ``rank`` is None where
    several ranks or none are to blame. ``source`` says what computed the loss, ``what`` whether it
    is the loss itself, ``weights`` which were not finite before it."""

    def __init__(
        self,
        step: int,
        rank: int | None,
        value: float,
        source: str = "the task's loss",
        *,
        what: str = "loss",
        weights: Sequence[str] = (),
    ) -> None:
        several = "on several ranks" if what == "loss" else "on all ranks"
        where = f"on rank {rank}" if rank is not None else several
        super().__init__(
            f"the {what} of step {step + 1} is {value} {where}; the step was not taken. Lower "
            "optimizer.lr, "
            "set train.grad_clip_norm, or look for samples with non-finite values. It comes from "
            f"{source}"
            + (
                (
                    f". An earlier step's gradients were not finite: {few(weights, 5)} hold NaN or "
                    "infinity since"
                )
                if weights
                else ""
            )
        )
        self.step = step
        self.rank = rank


class NonFiniteWeights(TrainError):
    """An earlier step's gradients were NaN or infinite, though its loss was not. ``step`` counts
    the steps done."""

    def __init__(self, step: int, names: Sequence[str]) -> None:
        super().__init__(
            f"the weights after step {step} are not finite: {few(names, 5)}. They are saved "
            "nowhere; the run's last checkpoint is "
            "from before. Set train.grad_clip_norm, which refuses such a step before it is taken, "
            "lower optimizer.lr, or look in "
            "the loss for a division by zero, log or sqrt of zero"
        )
        self.step = step


class NothingTrained(TrainError):
    """Gradients of fp16 are not finite at any loss scale. ``step`` counts the steps done, left-out
    ones included."""

    def __init__(
        self, step: int, total: int, in_a_row: int, scale: float, names: Sequence[str]
    ) -> None:
        super().__init__(
            f"{in_a_row} steps in a row, {total} of {step} in all, were left out because "
            "gradients in fp16 are not finite; the "
            f"loss scale is down to {scale:g}. The gradients of "
            f"{few(names, 5) or 'no parameter at a scale of 0'} are not finite. "
            "Use train.precision: bf16 or fp32, or keep the named layers' values within fp16's "
            "65504"
        )
        self.step = step


class DataMissing(TrainError):
    """A data set, or a part of it, is not on this node."""


class DataChanged(TrainError):
    """Resuming on other data would repeat and skip samples silently."""


class ForkRefused(TrainError):
    """What ``resume_from`` names is not there, damaged, or does not fit the run; the message names
    every difference."""


class BadTask(TrainError):
    """A task returned something that its protocol does not allow."""


class RankDied(TrainError):
    """A rank's process has ended without a word. The message says how."""


class NumericsChanged(TrainError):
    """With ``train.exactness: elastic`` a rank computed another loss or other gradients of the
    run's first micro-batch than ``reference``."""

    def __init__(
        self, node_id: str, reference: str, differs: Sequence[str], kernels: Sequence[str]
    ) -> None:
        known = f" ({'; '.join(kernels)})" if kernels else ""
        super().__init__(
            f"node {node_id} computes other bits than {reference}: {' and '.join(differs)} of the "
            f"first micro-batch differ{known}. train.exactness is elastic, which needs the same "
            "kernels on all nodes, and a task that draws from the global generators only: cordon "
            "that node, or start a new run with train.exactness world_size"
        )
        self.node_id = node_id


class ScriptExited(TrainError):
    """A user's script exited with another code than 0. The message says which."""


class EndedItself(TrainError):
    """The user's code called ``os._exit`` in a rank. A note has the stack of the call."""


class SecretMissing(TrainError):
    """A rank cannot have a secret that its spec names. ``problem`` says why, without any value."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"secret {name!r} is not on this node: {problem}. The operator puts secrets on every "
            "node (EVERSTEP_SECRETS_DIR); "
            "else take it out of the spec's secrets"
        )
        self.name = name


class StepNotWhole(TrainError):
    """A step that not all ranks took part in, or that lacks samples. ``step`` counts the steps done
    before it."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(
            f"step {step + 1} is not whole and was not taken: {problem}. The run goes on from the "
            "last whole step; if this comes "
            "back, report it with the run's events"
        )
        self.step = step


class StateNotWhole(TrainError):
    """``step`` counts the steps done."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(
            f"the state of step {step} is not one of whole steps, and is not used: {problem}"
        )
        self.step = step


class CannotBuild(TrainError):
    """A process that is to join cannot build the task, which the others have built on their
    nodes."""


FOUND_WITHIN = 64
"""Steps within which ranks find that their weights differ."""


class RanksApart(TrainError):
    """Ranks that must be equal have other weights or gradients. ``step`` counts the steps done;
    states after ``trusted_step`` may hold wrong bits. ``ranks`` differ from most others; empty if
    no majority shows which are wrong."""

    def __init__(self, step: int, ranks: Sequence[int], what: str, trusted_step: int) -> None:
        who = (
            f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} differ"
            f"{'' if len(ranks) > 1 else 's'} from the others"
            if ranks
            else "the ranks differ, and no majority shows which are wrong"
        )
        super().__init__(
            f"{who} in {what} after step {step}; the next step was not taken, and the run goes "
            f"back to step {trusted_step} or before. All ranks take equal steps with equal "
            "kernels, so a processor, its memory or a link gave wrong bits. Check the node; if "
            "another one follows, look in the task for what changes weights differently on each "
            "rank, such as a hook that draws random numbers"
        )
        self.step = step
        self.ranks = tuple(ranks)
        self.trusted_step = trusted_step


class Miscomputed(TrainError):
    """An audit found results that differ. ``step`` counts the steps done, and the next one was not
    taken. ``ranks`` computed wrongly; empty if it could not be decided."""

    def __init__(self, step: int, ranks: Sequence[int], what: str) -> None:
        named = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} computed"
        super().__init__(
            f"an audit of step {step + 1} found that {named} wrongly: {what}. The step was not "
            "taken, and the run goes on from the state before it. A processor, its memory or a "
            "link gave wrong bits. Check the node"
            if ranks
            else f"an audit of step {step + 1} found results that differ, and cannot decide which "
            f"are wrong: {what}. The step was not taken. Either one of the nodes computes wrongly, "
            "or the loss or the data set uses more than the weights, the sample's index and the "
            "global random generators: check the task, or set train.audit_fraction to 0"
        )
        self.step = step
        self.ranks = tuple(ranks)


class PeersGone(TrainError):
    """A barrier was given up, because another rank will not come."""


class PeerApart(PeersGone):
    """Another rank has other weights or gradients than most. States after ``trusted_step`` may hold
    what it computed."""

    def __init__(self, message: str, trusted_step: int) -> None:
        super().__init__(message)
        self.trusted_step = trusted_step


class PeerMiscomputed(PeersGone):
    """An audit found that another rank computes wrongly."""


class Replaced(TrainError):
    """This process belongs to a submission that a newer one has taken over from; it must change
    nothing more."""


class CheckpointFailed(TrainError):
    """A checkpoint that must be durable before the rank may go on could not be committed."""


class StorageNotShared(TrainError):
    """Nodes read other bytes under one path than others wrote there. Trying again changes
    nothing."""


def few(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names as text, with the number of further ones."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def forget_frames(exc: BaseException) -> None:
    """Empty the frames of an exception and of those behind it: their variables hold the process
    group."""
    current: BaseException | None = exc
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current.__traceback__ = None
        current = current.__cause__ or current.__context__
