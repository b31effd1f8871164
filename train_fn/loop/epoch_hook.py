"""A task's ``on_epoch_end``, whose changes enter the state once an epoch, whatever breaks.

The state says whether the hook has still to run. If the attempt breaks in a hook that has changed
the model by then, the rank leaves no state: it would hold a part of the changes. Rank 0 published
the state from before.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from everstep.wire.events import EventKind
from train_fn.errors import BadTask
from train_fn.loop.built_alike import require_same_weights
from train_fn.loop.reporter import Reporter
from train_fn.samples.as_built import data_sets_in
from train_fn.state.contents import few
from train_fn.state.digest import tree_digest
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.tasks.checks import where

if TYPE_CHECKING:
    from train_fn.loop.replica import Replica

logger = logging.getLogger(__name__)

TORN = "the task's on_epoch_end had changed a part of the state"
"""Why a rank leaves no state, if its attempt broke in the hook."""


def has_hook(replica: Replica) -> bool:
    return getattr(replica.task, "on_epoch_end", None) is not None


@torch.no_grad()
def call_hook(replica: Replica, reporter: Reporter) -> None:
    """Call the task's ``on_epoch_end(model, epoch, metrics)``; ``epoch`` counts from 0.

    A collective: no rank begins the next step before the hook has returned on all of them. So a
    rank whose hook takes long is not taken for a hung one by peers that wait for its gradients.
    """
    began, epoch = time.monotonic(), replica.state.closed_epochs - 1
    reporter.hand_over()
    replica.before_hook = _reach(replica)
    data = _watched_data(replica)
    replica.task.on_epoch_end(replica.state.model, epoch, dict(replica.state.metrics))  # type: ignore[attr-defined]
    if changed := data.changed():
        raise BadTask(
            f"{where(replica.task, 'on_epoch_end')} changes {few(changed)} of the training data: "
            "loader processes have copies of their own, and a restart begins with the first "
            "values. Give the data set a method set_epoch(epoch) that makes what the epoch needs; "
            "it is called in every process that reads"
        )
    replica.trained.check(where(replica.task, "on_epoch_end"))
    replica.learning_rates.note_options()
    require_same_weights(replica, where(replica.task, "on_epoch_end"))
    reporter.sign(
        EventKind.EPOCH_HOOK_DONE, {"epoch": epoch, "seconds": round(time.monotonic() - began, 3)}
    )
    reporter.start_clock()


def _watched_data(replica: Replica) -> PlainAttributes:
    """Return the present attributes of the training data, but of what is told of each epoch."""
    root = getattr(replica.train_set, "dataset", replica.train_set)
    found = [each for each in data_sets_in(root, set()) if not hasattr(each, "set_epoch")]
    return PlainAttributes({type(each).__name__: each for each in found})


def is_torn(replica: Replica) -> bool:
    """Return whether a hook that has not ended yet has changed the state."""
    return replica.before_hook not in (None, _reach(replica))


def renew_task_state(replica: Replica) -> None:
    """Save the task's state again, since ``on_epoch_end`` may have changed it, and compare it
    between ranks. A collective."""
    if not replica.task_state:
        return
    replica.state.task = replica.task_state.capture()
    digests = replica.peers.gather(tree_digest(replica.state.task))
    if len(set(digests)) > 1:
        logger.warning(
            "state_dict() of the task differs between ranks; after a restart all ranks have that "
            "of one rank. Compute it from what is the same on all ranks"
        )


def _reach(replica: Replica) -> str:
    """Return a digest of what a hook may change: the model, its modes, the optimizer's options."""
    state = replica.state
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in state.optimizer.param_groups
    ]
    modes = [module.training for module in state.model.modules()]
    return tree_digest([dict(state.model.state_dict()), state.unsaved(), modes, options])
