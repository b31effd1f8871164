"""Ranks that train steps of another run again make them bit by bit: the learning rates are those of
the whole run, and the chain goes on from that of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from everstep.wire.run import Replay
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.support.raw_specs import TASK
from train_fn.journal.step_records import StepRecords, compare

SETUP = "tests.integration.trainees:regression"
STEPS, FROM, TO = 24, 10, 17


def spec(**fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "replayed",
            "task": TASK,
            "schedule": {"name": "cosine", "warmup_steps": 3},
            "train": {
                "epochs": 8,
                "max_steps": STEPS,
                "global_batch_size": 30,
                "micro_batch_size": 10,
                "ema_decay": 0.9,
                "loader": {"num_workers": 0},
            },
            "checkpoint": {"every_steps": 5, "keep_latest": 9},
            **fields,
        }
    )


def recorded(*outcomes: Outcome) -> StepRecords:
    found = StepRecords()
    for outcome in outcomes:
        for kind, data in outcome.events:
            if kind is EventKind.RESTORED:
                found.begin(data["step"], 2)
            elif kind is EventKind.METRICS:
                found.add(data["points"])
    return found


def test_a_replay_is_equal_also_after_a_death_and_a_change_shows(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path, "run_first")
    paused = Job(run_dir, spec(), 2, setup=SETUP, stopped=("pause", FROM - 1))
    begun = train_to_end(paused, tmp_path)  # a checkpoint is committed there
    first = recorded(begun, train_to_end(Job(run_dir, spec(), 2, attempt=2, setup=SETUP), tmp_path))
    section = {"run_id": run_dir.run_id, "from_step": FROM, "to_step": TO}
    replay, again = Replay.model_validate(section), spec(replay=section)

    child = RunDir(run_dir.storage, f"{run_dir.run_id}-replay")
    broken = run_ranks(Job(child, again, 2, killed=(1, 13), setup=SETUP), tmp_path)
    whole = train_to_end(Job(child, again, 2, attempt=2, setup=SETUP), tmp_path)
    [restored] = broken[0].of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("fork", FROM)
    found = compare(first, recorded(broken[0], whole), replay)
    assert (found.result, found.compared) == ("equal", TO - FROM), found
    ended, record = CheckpointStore(child).lineage()[-1], first.of(TO)
    assert record is not None and record.proof is not None
    assert ended.step == TO and ended.chain == record.proof["chain"]

    other = RunDir(run_dir.storage, f"{run_dir.run_id}-other")
    changed = spec(replay=section, optimizer={"name": "adamw", "lr": 0.002})
    made = recorded(train_to_end(Job(other, changed, 2, setup=SETUP), tmp_path))
    found = compare(first, made, replay)
    assert (found.result, found.step) == ("differs", FROM + 2), found
    assert set(found.differs) == {"loss", "gradient", "weights"}
