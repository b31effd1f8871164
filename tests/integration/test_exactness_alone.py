"""A run without survivors goes on from what its only rank had published on the node, bit for
bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import (
    LAST_STEP,
    assert_same,
    final_state,
    make_spec,
    merged_losses,
)
from tests.integration.test_exactness_precision import TRAINEES
from tests.support.storage_places import save
from train_fn.node.node_dir import shared_memory_root
from train_fn.snapshots.store import Label, SnapshotStore, node_snapshots

ALL_THE_TIME = f"{TRAINEES}:publishing_all_the_time"
"""What is being written was copied two steps before: the weights have changed meanwhile."""


def make_text_spec(directory: Path) -> RunSpec:
    """A GPT over text, whose weights are tokens; one epoch and a half of sequences in
    micro-batches, with dropout and averages."""
    (directory / "text.txt").write_text(
        "".join(f"{number} bottles of beer on the wall, " for number in range(80))
    )
    model = {"num_layers": 1, "num_heads": 2, "width": 16, "context_length": 8, "dropout": 0.2}
    task = {
        "name": "language_modeling",
        "model": {"name": "gpt", "args": model},
        "data": {
            "name": "text_files",
            "args": {"path": str(directory / "text.txt"), "level": "char"},
        },
    }
    groups = [{"parameters": "positions.*", "lr_scale": 0.5, "weight_decay": 0.0}]
    raw = make_spec().model_dump(mode="json")
    train = raw["train"] | {
        "global_batch_size": 15,
        "micro_batch_size": 4,
        "epochs": 3,
        "max_steps": LAST_STEP,
    }
    return RunSpec.model_validate(
        raw | {"task": task, "train": train, "optimizer": raw["optimizer"] | {"groups": groups}}
    )


def published(run_dir: RunDir) -> tuple[SnapshotStore, list[Label]]:
    """What lies on the node, oldest first."""
    store = node_snapshots(run_dir, "node0", submission=1)
    return store, sorted(store.labels(), key=lambda label: (label.step, label.attempt))


def kill_alone(job: Job, tmp_path: Path) -> None:
    [outcome] = run_ranks(job, tmp_path)
    assert outcome.exit_code == -9


def state_at(step: int, tmp_path: Path) -> dict[str, Any]:
    """The state of that step in a run that nothing disturbs and that publishes nothing: read from a
    checkpoint."""
    run_dir = make_run_dir(tmp_path, f"run_until_{step}")
    store = CheckpointStore(run_dir)
    train_to_end(
        Job(
            run_dir,
            make_spec(),
            1,
            stopped=("pause", step - 1),
            setup=f"{TRAINEES}:publishing_nothing",
        ),
        tmp_path,
    )
    manifest = store.list()[-1]
    assert manifest.step == step

    def read(file: str) -> Any:
        return torch.load(io.BytesIO(store.read_file(manifest.name, file)), weights_only=True)

    model = read("model.pt")
    averages = {name: value for name, value in read("model_ema.pt").items() if name in dict(model)}
    return {**read("train_state.pt"), "model": model, "ema": averages}


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Without clocks and what a rank happened to know of checkpoints; averages of parameters only,
    as the file has them."""
    left_out = ("tail", "parent", "best")
    kept = {name: value for name, value in state.items() if name not in left_out}
    kept["ema"] = {
        name: kept["ema"][name]
        for name in sorted(kept["ema"])
        if "running" not in name and "num_batches" not in name
    }
    return kept


def restored_in(outcome: Outcome) -> dict[str, Any]:
    [restored] = outcome.of_kind(EventKind.RESTORED)
    return restored


def test_what_is_published_is_the_state_of_its_step_and_the_run_goes_on_from_it(
    tmp_path: Path,
) -> None:
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    spec = RunSpec.model_validate({**make_spec().model_dump(), "checkpoint": {"every_steps": 1000}})
    reference = train_to_end(Job(whole, spec, 1, setup=f"{TRAINEES}:publishing_nothing"), tmp_path)

    kill_alone(Job(broken, spec, 1, killed=(0, 18), setup=ALL_THE_TIME), tmp_path)
    store, labels = published(broken)
    assert len(labels) == 2
    newest = labels[-1]
    assert 1 < newest.step <= 16
    # At an epoch's end a state is published once the epoch is closed, and the run that is stopped
    # there has not closed it yet.
    within = [state for state in map(store.read, labels) if state["k"]]
    assert within
    for state in within:
        assert_same(comparable(state), comparable(state_at(state["step"], tmp_path)))

    # Dies again before its first publication: the next attempt stands where this one did.
    kill_alone(
        Job(broken, spec, 1, attempt=2, killed=(0, newest.step), setup=ALL_THE_TIME), tmp_path
    )
    assert published(broken)[1][-1] == newest
    kill_alone(
        Job(broken, spec, 1, attempt=3, killed=(0, newest.step + 8), setup=ALL_THE_TIME), tmp_path
    )
    later = published(broken)[1][-1]
    assert later.attempt == 3
    assert later.step > newest.step

    resumed = train_to_end(Job(broken, spec, 1, attempt=4, setup=ALL_THE_TIME), tmp_path)
    restored = restored_in(resumed)
    assert (restored["source"], restored["step"], restored["rejected"]) == (
        "snapshot",
        later.step,
        [],
    )
    assert set(range(later.step + 1, LAST_STEP + 1)) <= resumed.losses.keys()
    assert merged_losses(reference, resumed) == reference.losses
    assert_same(final_state(whole), final_state(broken))
    assert not (shared_memory_root() / broken.run_id).exists()


def test_a_newer_checkpoint_beats_an_older_snapshot(tmp_path: Path) -> None:
    run_dir, spec = make_run_dir(tmp_path), make_spec()
    once = f"{TRAINEES}:publishing_once"
    kill_alone(Job(run_dir, spec, 1, killed=(0, 14), killed_after=10, setup=once), tmp_path)
    assert [label.step for label in published(run_dir)[1]] == [1]
    resumed = train_to_end(Job(run_dir, spec, 1, attempt=2), tmp_path)
    restored = restored_in(resumed)
    assert (restored["source"], restored["step"]) == ("checkpoint", 10)


def test_a_spoilt_snapshot_is_told_of_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    run_dir, spec = make_run_dir(tmp_path), make_spec(eval_every_epochs=2)
    kill_alone(Job(run_dir, spec, 1, killed=(0, 18), setup=ALL_THE_TIME), tmp_path)
    store, labels = published(run_dir)
    path = store.directory / f"s001-a001-{labels[-1].step:09d}-r0.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    resumed = train_to_end(Job(run_dir, spec, 1, attempt=2), tmp_path)
    restored = restored_in(resumed)
    assert (restored["source"], restored["step"]) == ("snapshot", labels[-2].step)
    assert f"step {labels[-1].step} " in restored["rejected"][0]["name"]


def test_a_newer_checkpoint_that_is_spoilt_does_not_send_the_run_back_past_its_snapshot(
    tmp_path: Path,
) -> None:
    run_dir, spec = make_run_dir(tmp_path), make_spec(eval_every_epochs=2)
    kill_alone(Job(run_dir, spec, 1, killed=(0, 18), setup=ALL_THE_TIME), tmp_path)
    store, [*_, newest] = published(run_dir)
    spoilt = save(run_dir, 20).name
    (Path(CheckpointStore(run_dir).path(spoilt)) / "model.pt").write_bytes(b"spoilt")
    restored = restored_in(train_to_end(Job(run_dir, spec, 1, attempt=2), tmp_path))
    assert newest.step > 10, "the checkpoint of step 10 is sound"
    assert (restored["source"], restored["step"]) == ("snapshot", newest.step)
    assert [entry["name"] for entry in restored["rejected"]] == [spoilt]
    assert not store.directory.exists()


def test_a_run_that_the_node_cannot_keep_says_so_and_trains(tmp_path: Path) -> None:
    setup = f"{TRAINEES}:too_little_shared_memory"
    outcome = train_to_end(
        Job(make_run_dir(tmp_path), make_spec(), 1, stopped=("pause", 4), setup=setup), tmp_path
    )
    [started] = outcome.of_kind(EventKind.TRAINING_STARTED)
    assert started["snapshots"] == "published"
    [event] = outcome.of_kind(EventKind.SNAPSHOTS)
    assert (event["step"], event["snapshots"]) == (1, "none")
    assert "does not fit" in event["problem"]
