"""What ranks compare before they train together (data, models, what their kernels compute), and
what an evaluation may not do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from everstep.wire.events import EventKind
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, DataChanged, NumericsChanged, PeersGone
from train_fn.loop.after_step import tensors_of
from train_fn.loop.audit import raise_apart
from train_fn.loop.replica import Replica
from train_fn.state.contents import DRAW_ALIKE, Contents, Sketch, alike, few, sketch, sketch_weights
from train_fn.state.sound_state import Numerics
from train_fn.step.peers import Peers
from train_fn.tasks.checks import where

logger = logging.getLogger(__name__)


def check_data(replica: Replica) -> None:
    """Raise DataChanged if a rank has other data than rank 0. A collective."""
    peers, state = replica.peers, replica.state
    if state.contents is not None and (names := state.contents.unstable(state.contents.firsts())):
        replica.warn(
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


def require_same_weights(replica: Replica, source: str, ctx: WorkerContext | None = None) -> None:
    """Raise BadTask on every rank if trained parameters differ between ranks by more than other
    hardware explains. A collective.

    Equal ranks take equal steps, so that they stay equal. Processors of different kinds may round
    differently, which only the log tells.

    Args:
        source: the code that was run since the ranks were last compared.
        ctx: None right after code of the user that may change weights. Else ranks whose kernels
            give equal bits may not differ at all: RanksApart or PeerApart is raised.
    """
    if not replica.peers.alone:
        require_same_sums(replica, source, replica.peers.gather(replica.trained.sums()), ctx)


def require_same_sums(
    replica: Replica, source: str, sums: list[list[int]], ctx: WorkerContext | None
) -> None:
    """``require_same_weights``, given what ``trained.sums()`` returned on each rank."""
    names = sorted({name for other in sums for name in replica.trained.differing(sums[0], other)})
    if not names:
        return
    if ctx is not None and replica.must_agree:
        raise_apart(ctx, replica, [tuple(each) for each in sums], f"weights {few(names)}")
    _require_alike(source, names, replica.peers.gather(replica.trained.sketches(names)))


def require_same_after_step(replica: Replica) -> None:
    """Raise BadTask on every rank if ``after_step`` has just left other values on one of them than
    on others. A collective in the first step of an attempt and in the last one of each epoch, else
    nothing."""
    hook = replica.after_step
    if hook is None or hook.sums is None:
        return
    mine, hook.sums = hook.sums, None
    before, after = zip(*replica.peers.gather(mine), strict=True)
    names = sorted(
        name
        for name in {name for each in after for name in each}
        if len({each.get(name) for each in after}) > 1
        and len({each.get(name) for each in before}) == 1
    )
    if names:
        tensors = tensors_of(replica.state)
        found = {name: sketch(tensors[name]) for name in names if name in tensors}
        _require_alike(hook.source, names, replica.peers.gather(found))


def _require_alike(source: str, names: list[str], sketches: list[dict[str, Sketch]]) -> None:
    """Raise BadTask if the named tensors differ between ranks by more than other hardware
    explains."""
    unlike = [
        name
        for name in names
        if not all(name in other and alike(sketches[0][name], other[name]) for other in sketches)
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


def check_weights(replica: Replica, *, fresh: bool) -> None:
    """Raise BadTask if a rank has built another model than rank 0. A collective.

    Weights that a restored state replaces are compared only if ``fresh``. What a rank has trained
    in an earlier attempt of its process is compared as it was built.
    """
    peers = replica.peers
    if peers.alone:
        return
    mine = replica.parts.built_weights
    if fresh:
        mine = sketch_weights(replica.state.model, all_of_it=True)
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
                f"{where(replica.task, 'build_model')} built another model on rank {rank} than on "
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


# ---------------------------------------------------------------- same numerics

# Compare what the ranks' kernels compute, between ranks and with the attempts before.


def check_numerics(ctx: WorkerContext, replica: Replica) -> None:
    """Compare every rank's fingerprint with that of the state; in a run's first attempt, with that
    of rank 0. Report what differs. A collective.

    Raise NumericsChanged on a rank that differs, and PeersGone on the others, if
    ``train.exactness`` is elastic.
    """
    mine, state = replica.parts.numerics, replica.state
    if mine is None:
        return
    ranks: list[tuple[str, Numerics]] = replica.peers.gather((ctx.node_id, mine))
    is_first = state.numerics is None
    expected = Numerics(**state.numerics) if state.numerics is not None else ranks[0][1]
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
    if replica.exchange is None:
        for entry in own:
            logger.warning("this rank computes other bits than %s: %s", reference, entry)
        return
    ctx.journal.flush(0.0)
    if not own:
        raise PeersGone("another rank computes other bits, and was refused")
    raise NumericsChanged(ctx.node_id, reference, expected.differences(mine), expected.unlike(mine))


# ---------------------------------------------------------------- evaluation checks

# Refuse evaluations that change the weights, or the samples that they measure.


def require_weights_unchanged(replica: Replica, before: list[int]) -> None:
    """Raise BadTask if evaluation changed what is trained. Each rank measures other micro-batches,
    so ranks would train different models from then on."""
    replica.trained.check_values(
        before,
        _measuring(replica.task),
        "Each rank evaluates a part of the data, so ranks would train different models from then "
        "on. Work on a copy of the model, or change weights in on_epoch_end",
    )


def with_samples_unchanged(
    task: Any, read: Callable[[], Generator[tuple[int, Any]]]
) -> Generator[tuple[int, Any]]:
    """Yield what ``read`` yields. Raise BadTask if the caller changes a batch in place, and with it
    the samples of the data set: every evaluation would measure other data."""
    with closing(read()) as batches:
        for number, batch in batches:
            loaded = sketch(batch)
            yield number, batch
            if not alike(loaded, sketch(batch)) and _reads_changed(read, loaded):
                raise BadTask(
                    f"{_measuring(task)} changes its batch in place, "
                    "and with it the samples: the batch shares memory with the data set. "
                    "Work on a copy, x = x.clone(), or copy samples in collate"
                )


def _reads_changed(read: Callable[[], Generator[tuple[int, Any]]], loaded: Sketch) -> bool:
    """Whether the same samples, read again, are others than ``loaded``. A data set that draws from
    a generator of its own is never the same, so they are read twice."""
    again, once_more = (_sketch_of_first(read) for _ in range(2))
    return alike(again, once_more) and not alike(again, loaded)


def _sketch_of_first(read: Callable[[], Generator[tuple[int, Any]]]) -> Sketch:
    with closing(read()) as batches:
        return sketch(next(batches)[1])


def _measuring(task: Any) -> str:
    name = "metrics" if hasattr(task, "metrics") else "loss"
    return f"{where(task, name)}, called to evaluate the model,"
