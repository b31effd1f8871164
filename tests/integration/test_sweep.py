"""A study on a real service: its command is killed, a node is lost, and no trial trains twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
SWEEP = (sys.executable, "-m", "everstep.cli.main", "sweep")
SETS = ("train.epochs=9", "scaling.max_workers=1", "task.model.args.width=8")
PATIENCE_S = 300.0


def test_a_study_goes_on_after_its_command_and_a_node_were_killed(tmp_path: Path) -> None:
    with ServiceProcess(nodes=2) as service, service.client() as client:
        env = {**os.environ, "EVERSTEP_URL": service.url, "EVERSTEP_TOKEN": service.token}
        given = [ROOT / "examples" / "digits.yaml", *(f"--set={each}" for each in SETS)]
        given += ["--metric=val_accuracy", "--grid=optimizer.lr=1e-3,3e-3,1e-2,3e-2"]
        first = subprocess.Popen(
            [*SWEEP, *given, "--parallel=2", "--study=lr"], cwd=tmp_path, env=env
        )
        training = wait_for(
            lambda: next((run for run in client.runs.list(tag="study=lr") if run.step > 3), None),
            PATIENCE_S,
            "a trial that trains",
        )
        first.kill()
        first.wait()
        service.kill_node(training.attempts()[-1].workers[0].node_id)
        service.refill()
        second = subprocess.run(
            [*SWEEP, "--study=lr", "--json"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert second.returncode == 0, second.stderr
        trials = json.loads(second.stdout)["trials"]
        assert {each["state"] for each in trials} == {"COMPLETE"}
        runs = {run.id: run for run in client.runs.list(tag="study=lr")}
        assert sorted(runs) == sorted(each["run"] for each in trials) and len(runs) == 4
        assert sorted(run.tags["trial"] for run in runs.values()) == ["0", "1", "2", "3"]
        assert runs[training.id].restarts >= 1, "the trial recovered as any run does"
