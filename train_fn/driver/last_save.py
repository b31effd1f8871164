"""What follows once a run's ranks have ended: the checkpoint of its newest state, and a replay's
comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from everstep.wire.run import Replay
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from train_fn.checkpoints.cadence import committed_data
from train_fn.checkpoints.commit import MODEL_FILE
from train_fn.driver.submission_journal import FINAL_FLUSH_S
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.step_records import StepRecords, compare
from train_fn.ray_train.group.left_states import LeftStates
from train_fn.recovery.history import History
from train_fn.recovery.launch import ControllerOutcome
from train_fn.snapshots.last_save import LastSave, newest_durable

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


# ---------------------------------------------------------------- replay

# The end of a replay: its steps are compared with those of the run that it trains again.


def report_replay(run_dir: RunDir, spec: RunSpec, client: ActorJournalClient) -> None:
    """Compare a replay's steps, from its journals, and report the result. Do nothing for another
    run.

    Raises StorageError: the next submission compares again.
    """
    if spec.replay is None:
        return
    client.flush(FINAL_FLUSH_S)
    replay = Replay(
        run_id=spec.replay.run_id, from_step=spec.replay.from_step, to_step=spec.replay.to_step
    )
    result = replayed(run_dir, replay, is_elastic=spec.train.exactness == "elastic")
    logger.info("the replay: %s", result.message)
    client.emit(EventKind.REPLAY_COMPARED, result.model_dump(mode="json"))


def replayed(run_dir: RunDir, replay: Replay, *, is_elastic: bool) -> Replay:
    """Return ``replay`` with its result, from the journals and checkpoints of both runs."""
    original = RunDir(run_dir.storage, replay.run_id)
    there, here = (StepRecords().read(each) for each in (original, run_dir))
    result = compare(there, here, replay, is_elastic=is_elastic)
    if result.result != "equal":
        return result
    one, other = (_at(each, replay.to_step) for each in (original, run_dir))
    if one is None or other is None or one.files[MODEL_FILE] == other.files[MODEL_FILE]:
        return result
    found = {
        "result": "differs",
        "step": replay.to_step,
        "differs": ("weights",),
        "message": f"the weights after step {replay.to_step} differ, in checkpoints {one.name} "
        f"of run {replay.run_id} and {other.name} of the replay",
    }
    return Replay.model_validate({**dict(result), **found})


def _at(run_dir: RunDir, step: int) -> Manifest | None:
    """Return the checkpoint of the lineage at a step, if it holds the model's weights."""
    lineage = CheckpointStore(run_dir).lineage()
    found = [each for each in lineage if each.step == step and MODEL_FILE in each.files]
    return found[-1] if found else None
