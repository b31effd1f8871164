"""Every rank must have built the same data and the same model, or the run would not be one run."""

from __future__ import annotations

from train_fn.errors import BadTask, DataChanged
from train_fn.loop.replica import Replica
from train_fn.state.contents import DRAW_ALIKE, alike, few, sketch_weights
from train_fn.tasks.checks import told


def check_data(replica: Replica) -> None:
    """Raise DataChanged if a rank has other data than rank 0. A collective."""
    peers, state = replica.peers, replica.state
    fingerprints = peers.gather(state.fingerprint)
    if len(set(fingerprints)) > 1:
        each = ", ".join(
            f"rank {rank}: {fingerprint}" for rank, fingerprint in enumerate(fingerprints)
        )
        raise DataChanged(
            f"{state.data_name} differs between nodes ({each}); make it the same on all"
        )
    if peers.alone or state.contents is None:
        return
    contents = state.contents
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
                f"{state.data_name} differs between ranks: rank {rank} has another {few(names)} "
                "than rank 0. In build_datasets "
                f"{DRAW_ALIKE}{_set_order(set_orders[rank] != set_orders[0])}"
            )


def check_weights(replica: Replica, *, fresh: bool) -> None:
    """Raise BadTask if a rank has built another model than rank 0. A collective.

    Weights that a restored state replaces are compared only if ``fresh``.
    """
    peers = replica.peers
    if peers.alone:
        return
    mine = sketch_weights(replica.state.model, all_of_it=fresh)
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
                f"{told(replica.task, 'build_model')} built another model on rank {rank} than on "
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
