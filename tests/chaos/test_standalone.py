"""Under plain torchrun: a killed rank costs no step, a stop is taken up again, and the weights are
those of a run left alone."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageNotFound
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent, read_journal
from storage.run_dir import RunDir
from tests.support.service_process import wait_for

pytestmark = pytest.mark.chaos
DEADLINE_S = 180.0
SPEC = """
name: standalone
task:
  name: language_modeling
  model:
    name: gpt
    args: {num_layers: 2, num_heads: 2, width: 32, context_length: 32, dropout: 0.1}
  data: {name: text_files, args: {path: TEXT, level: char}}
train: {epochs: 2, global_batch_size: 16, micro_batch_size: 4, ema_decay: 0.9}
checkpoint: {every_steps: 1000}
scaling: {use_gpu: false}
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(
        "".join(
            f"{number} bottles of beer on the wall, {number} bottles. " for number in range(4000)
        )
    )
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.replace("TEXT", str(tmp_path / "text.txt")))
    return path


def start(
    spec: Path, tmp_path: Path, run_id: str, max_restarts: int = 0
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["--max-restarts", str(max_restarts), "-m", "train_fn.standalone", str(spec)]
    command += ["--storage", str(tmp_path / "storage"), "--run-id", run_id]
    return subprocess.Popen(
        command,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )


def run_dir_of(tmp_path: Path, run_id: str) -> RunDir:
    return RunDir(open_storage(str(tmp_path / "storage")), run_id)


def events(run_dir: RunDir) -> list[JournalEvent]:
    found: list[JournalEvent] = []
    for submission in run_dir.submissions():
        try:
            found += read_journal(run_dir, submission, None, 100_000)[0]
        except StorageNotFound:  # its writer is about to make it
            continue
    return found


def steps(run_dir: RunDir) -> list[int]:
    return [
        point["step"]
        for event in events(run_dir)
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    ]


def wait_for_step(process: subprocess.Popen[bytes], run_dir: RunDir, step: int) -> None:
    def reached() -> bool:
        if max(steps(run_dir), default=0) >= step:
            return True
        assert process.poll() is None, f"it ended before step {step}"
        return False

    wait_for(reached, DEADLINE_S, f"step {step}")


def final_weights(run_dir: RunDir) -> dict[str, Any]:
    store = CheckpointStore(run_dir)
    manifest = store.list()[-1]
    files = {
        name: torch.load(io.BytesIO(store.read_file(manifest.name, name)))
        for name in manifest.files
    }
    return {
        "step": manifest.step,
        "digest": manifest.sample_digest,
        **files["model.pt"],
        **files["model_ema.pt"],
    }


def assert_equal_to_one_left_alone(spec: Path, tmp_path: Path, broken: RunDir) -> None:
    assert start(spec, tmp_path, "whole").wait(DEADLINE_S) == 0
    expected, found = final_weights(run_dir_of(tmp_path, "whole")), final_weights(broken)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (
            torch.equal(value, found[name])
            if isinstance(value, torch.Tensor)
            else value == found[name]
        ), name


def test_a_killed_rank_costs_no_step_when_torchrun_starts_it_again(
    spec_file: Path, tmp_path: Path
) -> None:
    run_dir = run_dir_of(tmp_path, "broken")
    process = start(spec_file, tmp_path, "broken", max_restarts=1)
    try:
        wait_for_step(process, run_dir, 10)
        [started] = [event for event in events(run_dir) if event.kind is EventKind.ATTEMPT_STARTED]
        [victim] = [worker["pid"] for worker in started.data["workers"] if worker["rank"] == 1]
        os.kill(victim, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
    assert run_dir.submissions() == [1]
    restored = [event.data for event in events(run_dir) if event.kind is EventKind.RESTORED]
    assert [data["source"] for data in restored] == ["fresh", "snapshot"]
    assert restored[1]["step"] >= 10
    assert_equal_to_one_left_alone(spec_file, tmp_path, run_dir)


def test_a_stop_is_saved_by_all_ranks_and_the_same_command_goes_on(
    spec_file: Path, tmp_path: Path
) -> None:
    run_dir = run_dir_of(tmp_path, "stopped")
    process = start(spec_file, tmp_path, "stopped")
    try:
        wait_for_step(process, run_dir, 10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) != 0
    finally:
        process.kill()
    [saved] = CheckpointStore(run_dir).list()
    assert saved.step >= 10
    assert start(spec_file, tmp_path, "stopped").wait(DEADLINE_S) == 0
    [_, restored] = [event.data for event in events(run_dir) if event.kind is EventKind.RESTORED]
    assert (restored["source"], restored["step"]) == ("checkpoint", saved.step)
    assert_equal_to_one_left_alone(spec_file, tmp_path, run_dir)
