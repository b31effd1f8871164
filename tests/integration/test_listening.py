"""What every process of a run listens on, compared with the table in docs/security.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.driven_run import DrivenRun, spec
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import REPOSITORY, RayCluster
from tests.support.code_archives import tar_gz

__all__ = ["cluster", "started"]

pytestmark = pytest.mark.alone
"""Ray's dashboard and agents have fixed ports, which another cluster may hold."""

HEADING = "### What listens where"
SCRIPT = """
import pathlib, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
pathlib.Path(f"rank-{dist.get_rank()}").touch()
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def task_run(cluster: RayCluster, tmp_path: Path) -> Iterator[DrivenRun]:
    run = DrivenRun(cluster, tmp_path, spec(workers=(2, 2), train={"epochs": 1000}))
    yield run
    run.stop()


def documented() -> list[str]:
    """Return the processes of the table, as their command lines name them."""
    text = (REPOSITORY / "docs" / "security.md").read_text().partition(HEADING)[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])]


def listening(cluster: RayCluster, run: DrivenRun) -> set[tuple[str, int, str]]:
    """Return (name in the table, process id, address) of every listening socket of the cluster and
    of a run's driver. A process that the table lacks has its command line for a name."""
    assert run.driver is not None
    names, found = documented(), set()
    for process in [*cluster.processes(), psutil.Process(run.driver.pid)]:
        try:
            words = process.cmdline()
            files = [word.rpartition("/")[2] for word in words[:4]]
            fits = [name for name in names if any(file.startswith(name) for file in files)]
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    name = max(fits, key=len, default=" ".join(words))
                    found.add((name, process.pid, one.laddr.ip.removeprefix("::ffff:")))
        except psutil.Error:
            continue  # it has just ended
    return found


def test_every_process_listens_where_the_table_says(
    task_run: DrivenRun, started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    names = documented()
    task_run.start()
    task_run.wait_for_step(5)
    expected = set(names) - {"everstep serve"}
    task_run.wait_for(  # Ray's dashboard may listen late
        lambda: expected <= {name for name, *_ in listening(cluster, task_run)}, "all processes"
    )
    found = listening(cluster, task_run)
    assert {name for name, *_ in found} == expected
    assert {address for *_, address in found} == {"127.0.0.1"}, "torch's rendezvous too"
    task_run.run_dir.request_stop(1, "cancel")
    assert task_run.wait_for_end() == 0, task_run.describe()

    archive = tar_gz({"sleeps.py": SCRIPT})
    script = begin(started, cluster, tmp_path, archive, {"script": "sleeps.py"}, min_workers=2)
    work = Path(script.run_dir.work_path or "")
    script.wait_for(lambda: all((work / f"rank-{rank}").exists() for rank in (0, 1)), "the script")
    found = listening(cluster, script)
    assert {name for name, *_ in found} <= set(names)
    assert {address for *_, address in found} == {"127.0.0.1"}
    script.run_dir.request_stop(1, "cancel")
    assert script.wait_for_end() == 0, script.describe()
