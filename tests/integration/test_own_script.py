"""Scripts for torchrun on a real cluster, unchanged: killed, failing, stopped, and as a package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.code import pack
from everstep.wire.events import EventKind
from storage.logs.rank_logs import read_rank_logs
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import RayCluster
from tests.support.code_archives import tar_gz

__all__ = ["cluster", "started"]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_script"
PACKAGE_TRAIN = """
import argparse, os, signal, time
import torch, torch.distributed as dist
from .parts import NAME
import ray.train

signal.signal(signal.SIGTERM, lambda *_: None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--sleep", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "EVERSTEP_ATTEMPT")
    print(NAME, int(total), *(f"{name}={os.environ[name]}" for name in names), __name__)
    shared = os.environ["EVERSTEP_SHARED_DIR"] == os.getcwd()
    print("elastic", dist.is_torchelastic_launched(), shared)
    print("ray", ray.train.get_context().get_world_rank() == dist.get_rank())
    while args.sleep:
        time.sleep(0.01)
    dist.barrier()
    if args.code and dist.get_rank() == 1:
        raise SystemExit(args.code)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def messages(run: DrivenRun, attempt: int) -> list[str]:
    lines, _ = read_rank_logs(run.run_dir)
    return [line.message for line in lines if line.attempt == attempt]


def package() -> bytes:
    files = {
        "pkg/__init__.py": "",
        "pkg/parts.py": "NAME = 'parts'\n",
        "pkg/train.py": PACKAGE_TRAIN,
    }
    return tar_gz(files)


def test_a_script_goes_on_at_its_own_checkpoint_after_a_rank_died(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    code = {"script": "train.py", "argv": ["--epochs", "400"]}
    run = begin(started, cluster, tmp_path, pack(EXAMPLE), code, min_workers=2)
    run.wait_for(lambda: any("epoch 5:" in line for line in messages(run, 1)), "epoch 5")
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    run.check_sequence()
    assert [(e.data["verdict"], e.data["step"]) for e in run.of(EventKind.FAILURE)] == [
        ("worker_lost", None)
    ]
    assert [e.data["source"] for e in run.of(EventKind.RESTORED)] == ["fresh", "own_files"]
    assert run.last(EventKind.RECOVERED).data["steps_lost"] is None
    begun = {int(line.split()[-1]) for line in messages(run, 2) if "begins at epoch" in line}
    assert len(begun) == 1 and 6 <= begun.pop() <= 400
    assert any("epoch 399:" in line for line in messages(run, 2))
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"
    assert run.run_dir.work_path is not None
    assert Path(run.run_dir.work_path, "snapshot.pt").is_file()


def test_a_package_finds_torchrun_s_environment_and_is_cancelled_at_once(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    code = {"script": "pkg/train.py", "argv": ["--sleep"]}
    run = begin(started, cluster, tmp_path, package(), code, min_workers=2)
    run.wait_for(lambda: sum(m == "ray True" for m in messages(run, 1)) == 2, "both ranks")
    found = messages(run, 1)
    lines = [m for m in found if m.startswith("parts 2 LOCAL_RANK=")]
    assert len(lines) == 2
    assert all(
        m.endswith("TORCHELASTIC_RESTART_COUNT=0 EVERSTEP_ATTEMPT=1 __main__") for m in lines
    )
    assert found.count("elastic True True") == 2
    run.run_dir.request_stop(1, "cancel")
    assert run.wait_for_end() == 0, run.describe()
    assert run.last(EventKind.FINISHED).data["reason"]["code"] == "cancelled_by_user"
    assert run.of(EventKind.FAILURE) == []


def test_the_example_runs_under_torchrun_unchanged(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(EXAMPLE / "train.py"), "--epochs", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout and (tmp_path / "snapshot.pt").is_file()
