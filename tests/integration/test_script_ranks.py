"""A script on two ranks, each a process of its own: its process group, a stop that both take, and a
peer that dies. `test_own_script.py` has the same under Ray."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from everstep.spec.run_spec import RunSpec
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import tar_gz
from tests.support.one_rank import Journal
from tests.support.two_groups import only_in_chaos
from train_fn.context import WorkerContext
from train_fn.ray_train import user_function
from train_fn.recovery.evidence import StepFailed

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist


def main():
    assert not dist.is_initialized() and dist.is_torchelastic_launched()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    pathlib.Path(f"rank-{dist.get_rank()}.txt").write_text(str(int(total)))
    while sys.argv[1] == "wait":
        dist.all_reduce(total.fill_(1))
        time.sleep(0.01)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def rank_main(rank: int, storage: str, digest: str, mode: str, port: int) -> None:
    """Run the script as one rank and write how it ended."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    run_dir = RunDir(open_storage(storage), "run_two")
    code = {"archive": digest, "script": "train.py", "argv": [mode]}
    journal = Journal()
    ctx = WorkerContext(
        spec=RunSpec.model_validate({"name": "two", "code": code}),
        run_dir=run_dir,
        submission=1,
        attempt=1,
        world_rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        node_id="n",
        num_nodes=1,
        device=torch.device("cpu"),
        journal=journal,
        report_checkpoint=lambda name, metrics: None,
    )
    found = SimpleNamespace(checkpoint=None, report_call_index=0, report=lambda *_: None)
    user_function.get_train_context = lambda: found
    where = Path(storage, f"ended-{rank}")
    Path(storage, f"pid-{rank}").write_text(str(os.getpid()))
    if (Path(storage) / "stop").exists() and rank == 0:
        journal.stop_requested = "cancel"  # only rank 0 hears of it
    try:
        where.write_text(f"ended {user_function.train(ctx)}")
    except StepFailed as exc:
        where.write_text(f"failed {exc.error.kind}")


def start(storage: Path, mode: str) -> Any:
    digest = CodeStore(open_storage(str(storage))).put(tar_gz({"train.py": SCRIPT})).digest
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return mp.spawn(rank_main, (str(storage), digest, mode, port), nprocs=2, join=False)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 90
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)
    return path.read_text()


def workdir(storage: Path) -> Path:
    return storage / "runs" / "run_two" / "workdir"


def test_two_ranks_meet_in_a_group_of_their_own(tmp_path: Path) -> None:
    ranks = start(tmp_path, "once")
    while not ranks.join(timeout=90):
        pass
    for rank in (0, 1):
        assert wait_for(tmp_path / f"ended-{rank}") == "ended None"
        assert (workdir(tmp_path) / f"rank-{rank}.txt").read_text() == "2"


def test_a_stop_that_rank_0_hears_of_ends_the_script_on_both(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    ranks = start(tmp_path, "wait")
    while not ranks.join(timeout=90):
        pass
    assert [wait_for(tmp_path / f"ended-{rank}") for rank in (0, 1)] == ["ended cancel"] * 2


@pytest.mark.parametrize("victim", [0, *only_in_chaos(1)])
def test_a_rank_whose_peer_dies_leaves_without_blame(tmp_path: Path, victim: int) -> None:
    ranks = start(tmp_path, "wait")
    for rank in (0, 1):
        wait_for(workdir(tmp_path) / f"rank-{rank}.txt")
    os.kill(int((tmp_path / f"pid-{victim}").read_text()), signal.SIGKILL)
    assert wait_for(tmp_path / f"ended-{1 - victim}") == "failed collective"
    with pytest.raises(mp.ProcessExitedException):
        ranks.join(timeout=30)
