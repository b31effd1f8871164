"""The end of a replay: its steps are compared with those of the run that it trains again."""

from __future__ import annotations

import logging

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from everstep.wire.run import Replay
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from train_fn.checkpoints.commit import MODEL_FILE
from train_fn.driver.submission_journal import FINAL_FLUSH_S
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.step_records import StepRecords, compare

logger = logging.getLogger(__name__)


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
