"""The checkpoint of a run's newest state, after its ranks have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from train_fn.checkpoints.cadence import committed_data
from train_fn.journal.client import ActorJournalClient
from train_fn.ray_train.left_states import LeftStates
from train_fn.recovery.history import History
from train_fn.recovery.launch import ControllerOutcome
from train_fn.snapshots.election import LastSave, newest_durable

logger = logging.getLogger(__name__)


def save_newest(
    run_dir: RunDir,
    submission: int,
    spec: RunSpec,
    outcome: ControllerOutcome,
    client: ActorJournalClient,
    read: Callable[[], History],
) -> tuple[LastSave | None, LeftStates | None]:
    """Commit the newest state if only nodes hold it. Leave the outcome as it is. Raises nothing.

    Return how that went, or None if there was nothing to save; and the states to remove from the
    nodes at the run's end, or None if they must stay: the run is paused, or its newest state is
    nowhere else.

    Args:
        read: reads the run's history up to now.
    """
    succeeded = outcome.finished and outcome.stopped is None
    if outcome.attempts <= int(succeeded):
        return None, None
    saved = None
    try:
        history = read()
        left = LeftStates(run_dir, submission, history.nodes)
        steps = [
            history.last_step,
            outcome.last_step,
            *(failure.step for failure in history.failures),
        ]
        furthest = max((step for step in steps if step is not None), default=0)
        if outcome.failed is not None or (not succeeded and newest_durable(run_dir) < furthest):
            saved = left.save_newest(spec, history.world_size)
        if saved is not None:
            logger.info("the last save: %s", saved.summary)
        if saved is not None and saved.manifest is not None:
            client.emit(
                EventKind.CHECKPOINT_COMMITTED,
                committed_data(saved.manifest),
                attempt=history.last_attempt,
            )
    except Exception:
        logger.exception(
            "the states that the run left on its nodes could not be read; they stay there"
        )
        return None, None
    is_over = succeeded or outcome.failed is not None or outcome.stopped == "cancel"
    return saved, left if is_over and (saved is None or saved.manifest is not None) else None
