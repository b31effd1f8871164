"""Packages that a run brings, on a real cluster: installed once, found again after a kill, and only
those that are allowed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from everstep import RunFailed
from tests.support.code_archives import TASK, tar_gz
from tests.support.digits_run import wait_for_step
from tests.support.service_process import ServiceProcess, wait_for
from tests.support.wheels import add_wheel, only_from
from train_fn.user_code.packages import packages_dir

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

PACKAGE, NEEDED = "everstep_try_slope", "everstep_try_number"
ALLOWED = f"{PACKAGE}>=1"
OWN_TASK = f"from {PACKAGE} import slope\n{TASK}".replace("* 2\n", "* slope()\n")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Its operator allows one package, which needs another one, to one project; its nodes know an
    index of these two."""
    index = tmp_path_factory.mktemp("index")
    add_wheel(
        index,
        PACKAGE,
        "1.5",
        requires=(NEEDED,),
        source=f"from {NEEDED} import number\n\n\ndef slope():\n    return number\n",
    )
    add_wheel(index, NEEDED, "2.0", source="number = 2\n")
    installed = packages_dir([ALLOWED])  # of every node, for all are this machine
    shutil.rmtree(installed, ignore_errors=True)
    env = {"EVERSTEP_ALLOW_PIP": f"default:{PACKAGE}", **only_from(index)}
    with ServiceProcess(nodes=2, args=("--drills",), env=env) as running:
        yield running
    shutil.rmtree(installed, ignore_errors=True)


def spec(service: ServiceProcess, *requirements: str, **sections: Any) -> dict[str, Any]:
    with service.client() as client:
        digest = client.code.upload_packed(tar_gz({"task.py": OWN_TASK})).digest
    code = {"archive": digest, "task": "task:Line", "args": {"length": 20_000}}
    scaling = {"min_workers": 1, "max_workers": 2}
    return {
        "name": "slope",
        "code": code,
        "runtime_env": {"pip": list(requirements)},
        "scaling": scaling,
        **sections,
    }


def test_a_run_trains_with_its_package_and_finds_it_again_after_a_kill(
    service: ServiceProcess,
) -> None:
    with service.client() as client:
        run = client.runs.create(spec(service, ALLOWED, train={"epochs": 10_000}))
        wait_for_step(run, 20)
        drill = run.drill("kill_worker", rank=1).wait(180)
        assert drill.state == "recovered" and drill.report is not None, drill.problem
        assert (drill.report.verdict, drill.report.steps_lost) == ("worker_lost", 0)
        run.cancel()
        wait_for(lambda: run.refresh().status.terminal, 120, "the cancel")

        again = client.runs.create(spec(service, ALLOWED, train={"epochs": 1}))
        again.wait(timeout_s=180)
        installs = [
            line.message
            for each in (run, again)
            for line in each.logs()
            if line.message.startswith("installing ")
        ]
        assert len(installs) == 1, (
            "both nodes are this machine, which has it since the first rank asked"
        )
        assert f"{PACKAGE}==1.5" in installs[0] and f"{NEEDED}==2.0" in installs[0]


def test_a_version_that_the_index_does_not_have_is_told(service: ServiceProcess) -> None:
    with service.client() as client:
        run = client.runs.create(spec(service, f"{PACKAGE}>=99"))
        with pytest.raises(RunFailed) as failed:
            run.wait(timeout_s=180)
    failure = failed.value.failure
    assert failure is not None and failure.verdict == "user_error"
    message = str(failure.exception)
    assert "runtime_env.pip: pip failed on this node: " in message
    assert f"No matching distribution found for {PACKAGE}>=99" in message
