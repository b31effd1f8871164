"""Every rank must have built the same data and the same model, or the run would not be one run."""

from __future__ import annotations

import logging

from train_fn.context import WorkerContext
from train_fn.errors import BadTask, DataChanged
from train_fn.loop.after_step import tensors_of
from train_fn.loop.ranks_apart import raise_apart
from train_fn.loop.replica import Replica
from train_fn.state.contents import DRAW_ALIKE, Contents, Sketch, alike, few, sketch, sketch_weights
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
