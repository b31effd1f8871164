"""Every kind of secret is planted into a deployment that works, and looked for in everything that
it puts out.

A rank's secret that user code prints, logs and raises; the token of an administrator, one that the
API made, Ray's token, a password of the database and credentials of an object store. Looked at:
what the storage, the home and Ray's logs hold, the database's dump, every answer of the API to GET,
every page, Ray's jobs and actors, and the command lines of all processes.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.embedded.processes import members
from tests.support import postgres_server
from tests.support.service_process import ServiceProcess, wait_for
from train_fn.node.secrets import MASK

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

RANK_SECRET, PASSWORD, CLOUD_KEY = (
    "hunter2-of-the-rank",
    "hunter2-of-the-database",
    "hunter2-of-the-bucket",
)
TASK = """
import logging, os, sys, warnings
from digits_script import Digits, Net
import torch.nn.functional as F

class Telltale:
    def __init__(self):
        self.calls = 0

    def build_model(self):
        print("printed", os.environ["HUB_TOKEN"])
        print("inherited:", *sorted(os.environ))
        sys.stderr.write("written " + os.environ["HUB_TOKEN"] + "\\n")
        logging.getLogger("task").warning("logged %s", os.environ["HUB_TOKEN"])
        warnings.warn("warned " + os.environ["HUB_TOKEN"])
        return Net(16)

    def build_datasets(self):
        return {"train": Digits(train=True), "val": None}

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 20:
            raise ValueError("cannot log in with " + os.environ["HUB_TOKEN"])
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    programs = postgres_server.binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install -y postgresql")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "hub").write_text(f"{RANK_SECRET}\n")
    with postgres_server.running(programs) as server, server.database("template0") as url:
        env = {
            "EVERSTEP_DATABASE": url.replace("everstep@", f"everstep:{PASSWORD}@"),
            "EVERSTEP_SECRETS_DIR": str(tmp_path / "secrets"),
            "AWS_SECRET_ACCESS_KEY": CLOUD_KEY,
        }
        with ServiceProcess(nodes=1, env=env) as process:
            yield process


def test_no_secret_is_in_anything_that_a_deployment_puts_out(
    service: ServiceProcess, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "own_task", code)
    (code / "telltale.py").write_text(textwrap.dedent(TASK))
    client = service.client()
    made = client.tokens.create("ci", role="submitter", project="default").token
    archive = client.code.upload(code).digest
    run = client.runs.create(
        {
            "name": "telltale",
            "code": {"archive": archive, "task": "telltale:Telltale"},
            "secrets": {"HUB_TOKEN": "hub"},
            "train": {"epochs": 3, "global_batch_size": 50},
            "recovery": {"max_user_errors": 0},
        }
    )
    wait_for(lambda: run.refresh().status.terminal, 180, f"the end of {run.id}")
    secrets = {
        "a rank's secret": RANK_SECRET,
        "the database's password": PASSWORD,
        "the bucket's key": CLOUD_KEY,
        "the administrator's token": service.token,
        "a token that was made": made,
        "Ray's token": (service.home / "ray_token").read_text().strip(),
    }
    outputs = {
        **api_answers(service, run.id),
        **pages(service, run.id),
        **ray_answers(service),
        **command_lines(service),
    }
    outputs |= {"the database": dump(service)}
    outputs |= files(service.home, {"token", "ray_token"}) | files(
        Path(service.cluster()["temp_dir"]), set()
    )
    everything = "\n".join(outputs.values())
    for word in ("printed", "written", "logged", "warned", "cannot log in with"):
        assert f"{word} {MASK}" in everything, (
            f"what the task has {word} came through, without the value"
        )
    [inherited] = {
        tuple(line.message.split()[1:])
        for line in run.logs()
        if line.message.startswith("inherited: ")
    }
    assert "HUB_TOKEN" in inherited and {"EVERSTEP_DATABASE", "AWS_SECRET_ACCESS_KEY"}.isdisjoint(
        inherited
    )
    found = [
        (what, where)
        for what, value in secrets.items()
        for where, text in outputs.items()
        if value in text
    ]
    assert found == []


def api_answers(service: ServiceProcess, run_id: str) -> dict[str, str]:
    """Every route that is read with GET, filled in for the run."""
    answers = {}
    with httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {service.token}"}, timeout=30
    ) as http:
        paths = http.get("/openapi.json").json()["paths"]
        for path in (path for path, methods in paths.items() if "get" in methods):
            filled = re.sub(
                r"\{(\w+)\}",
                lambda match: {"run_id": run_id, "project": "default"}.get(match[1], "latest"),
                path,
            )
            answers[f"GET {filled}"] = http.get(filled).text
    assert sum(run_id in text for text in answers.values()) >= 5
    return answers


def pages(service: ServiceProcess, run_id: str) -> dict[str, str]:
    """Pages as a browser that is logged in sees them."""
    paths = ["/runs", "/cluster", "/queue", "/fork", "/docs", f"/compare?run={run_id}"]
    paths += [
        f"/runs/{run_id}{rest}"
        for rest in ("", "/checkpoints", "/events", "/logs", "/spec", "/curves.json")
    ]
    with httpx.Client(base_url=service.url, timeout=30, follow_redirects=True) as http:
        assert (
            http.post(
                "/login", data={"token": service.token}, headers={"Origin": service.url}
            ).status_code
            == 200
        )
        answers = {f"page {path}": http.get(path).text for path in paths}
    assert run_id in answers["page /runs"], "the browser is logged in"
    return answers


def ray_answers(service: ServiceProcess) -> dict[str, str]:
    """What Ray tells of jobs, actors, tasks, workers and nodes."""
    headers = {"Authorization": f"Bearer {(service.home / 'ray_token').read_text().strip()}"}
    url = service.cluster()["dashboard_url"]
    paths = [
        "/api/jobs/",
        *(
            f"/api/v0/{what}?detail=1"
            for what in ("actors", "tasks", "workers", "nodes", "runtime_envs")
        ),
    ]
    answers: dict[str, Any] = {
        f"Ray {path}": httpx.get(url + path, headers=headers, timeout=60).text for path in paths
    }
    assert "train_fn.driver" in answers["Ray /api/jobs/"]
    return answers


def command_lines(service: ServiceProcess) -> dict[str, str]:
    """What ``ps`` shows of the service and of the cluster."""
    lines = {}
    for process in itertools.chain(
        service.processes(), members(Path(service.cluster()["temp_dir"]))
    ):
        try:
            lines[f"process {process.pid}"] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    assert any("service.process.serve" in line for line in lines.values()) and any(
        "raylet" in line for line in lines.values()
    )
    return lines


def dump(service: ServiceProcess) -> str:
    """Every row of the database. Its server of these tests asks for no password."""
    url = service.env["EVERSTEP_DATABASE"].replace("+psycopg", "")
    found = subprocess.run(
        ["pg_dump", f"--dbname={url}"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "telltale" in found.stdout
    return found.stdout


def files(root: Path, left_out: set[str]) -> dict[str, str]:
    """Every file below a directory, but those that are there to hold a secret."""
    found = {}
    for path in root.rglob("*"):
        if (
            path.is_file()
            and not path.is_symlink()
            and path.relative_to(root).as_posix() not in left_out
        ):
            found[str(path)] = path.read_bytes().decode(errors="replace")
    assert found
    return found
