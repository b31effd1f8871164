"""A cluster that an operator started with ``ray start``, by its full path, as the runbook says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from everstep import Client
from tests.support.digits_run import digits
from tests.support.replica import Replica
from tests.support.service_process import free_port, wait_for

SYSTEM_PATH = "/usr/bin:/bin"
"""What a unit of systemd gets: no directory of the environment in which Everstep is."""


@pytest.fixture
def dashboard() -> Iterator[str]:
    """The dashboard's address of a cluster of one node."""
    temp_dir, port = Path(tempfile.mkdtemp(prefix="esr-")), free_port()
    options = {
        "port": free_port(),
        "dashboard-port": port,
        "dashboard-agent-listen-port": free_port(),
        "num-cpus": 2,
        "temp-dir": temp_dir,
        "object-store-memory": 100_000_000,
    }
    log = (temp_dir / "start.log").open("wb")
    ray = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--head",
            "--block",
            "--disable-usage-stats",
            *(f"--{name}={value}" for name, value in options.items()),
        ],
        # a home of its own: a token of Ray in the user's would ask everybody for one
        env={"PATH": SYSTEM_PATH, "HOME": str(temp_dir), "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=log,
    )
    log.close()
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert ray.poll() is None, (temp_dir / "start.log").read_text()
        try:
            return httpx.get(f"{url}/api/jobs/", trust_env=False).is_success
        except httpx.HTTPError:
            return False

    try:
        wait_for(answers, 120, "the start of Ray")
        yield url
    finally:
        tree = psutil.Process(ray.pid).children(recursive=True)
        ray.terminate()
        ray.wait(60)
        for process in tree:
            if process.is_running():
                process.kill()
        shutil.rmtree(temp_dir, ignore_errors=True)


def test_a_run_trains_where_the_path_of_ray_has_no_python_of_ours(
    dashboard: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    service = Replica(home, tmp_path / "storage", f"sqlite:///{home / 'everstep.db'}", dashboard)
    try:
        service.wait_until_ready(120)
        client = Client(service.url, (home / "token").read_text().strip())
        run = client.runs.create(digits("plain", epochs=1))
        run.wait(timeout_s=240)
        assert run.refresh().status == "SUCCEEDED" and not run.failures()
        check = client.wait_deployment_check(client.start_deployment_check().id, timeout_s=120)
        assert check.state == "done", check.problem
    finally:
        service.stop()
