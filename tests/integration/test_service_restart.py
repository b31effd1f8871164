"""The service as an operator treats it: killed, stopped, started twice, started wrongly."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.embedded.processes import lives, members
from tests.support.digits_run import assert_every_sample_counted_once, digits, wait_for_step
from tests.support.raw_specs import TASK
from tests.support.release_home import EPOCHS, VERSIONS, unpack_home
from tests.support.service_process import ASK_S, ServiceProcess, free_port, wait_for
from tests.support.two_groups import only_in_chaos

SPEC = {
    "name": "digits",
    "task": TASK,
    "train": {"epochs": 12, "global_batch_size": 128, "micro_batch_size": 64},
    "scaling": {"min_workers": 1, "max_workers": 1},
    "checkpoint": {"every_steps": 20},
}


def serve(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``serve`` that is expected to end by itself."""
    command = [sys.executable, "-m", "everstep.cli.main", "serve", *args]
    environ = {**os.environ, "EVERSTEP_HOME": str(home), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="es-"))
    yield path
    shutil.rmtree(path)


def wait_for_success(service: ServiceProcess, run_id: str) -> None:
    def succeeded() -> bool:
        return bool(api(service, "GET", f"/v1/runs/{run_id}")["status"] == "SUCCEEDED")

    wait_for(succeeded, 180, f"the end of {run_id}", every_s=ASK_S)


def ray_jobs(service: ServiceProcess) -> dict[str, str]:
    """Status of every Ray job by id, as Ray itself tells."""
    headers = {"Authorization": f"Bearer {(service.home / 'ray_token').read_text()}"}
    answer = httpx.get(
        f"{service.cluster()['dashboard_url']}/api/jobs/", headers=headers, timeout=30
    )
    return {
        job["submission_id"]: job["status"]
        for job in answer.raise_for_status().json()
        if job["submission_id"]
    }


def journal(service: ServiceProcess, run_id: str) -> bytes:
    path = service.home / "storage" / "runs" / run_id / "events" / "s001.jsonl"
    return path.read_bytes() if path.exists() else b""


def api(service: ServiceProcess, method: str, path: str, **kwargs: Any) -> Any:
    headers = {"Authorization": f"Bearer {service.token}"}
    return (
        httpx.request(method, f"{service.url}{path}", headers=headers, timeout=30, **kwargs)
        .raise_for_status()
        .json()
    )


@pytest.mark.core
def test_a_killed_service_leaves_the_run_alone_and_the_next_one_adopts_it(
    mended: ServiceProcess,
) -> None:
    jobs_before = ray_jobs(mended).keys()
    run_id = api(mended, "POST", "/v1/runs", json=SPEC)["id"]
    wait_for(
        lambda: api(mended, "GET", f"/v1/runs/{run_id}")["step"] >= 5,
        120,
        "step 5",
        every_s=ASK_S,
    )
    cluster = mended.cluster()
    mended.kill()
    size = len(journal(mended, run_id))
    wait_for(
        lambda: len(journal(mended, run_id)) > size + 500,
        120,
        "training that goes on without a service",
    )

    mended.start()
    assert mended.cluster()["address"] == cluster["address"]
    wait_for_success(mended, run_id)
    run = api(mended, "GET", f"/v1/runs/{run_id}")
    assert (run["submission"], run["restarts"], run["step"]) == (1, 0, run["total_steps"])
    assert ray_jobs(mended).keys() - jobs_before == {f"{run_id}-s001"}
    events = api(mended, "GET", f"/v1/runs/{run_id}/events?limit=1000")["items"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    [series] = api(mended, "GET", f"/v1/runs/{run_id}/metrics?names=loss&max_points=1000")[
        "series"
    ].values()
    assert [point[0] for point in series] == list(range(1, run["total_steps"] + 1)), (
        "every step once, over both services"
    )


@pytest.mark.chaos
def test_a_kill_between_row_and_job_makes_one_job(mended: ServiceProcess) -> None:
    jobs_before = ray_jobs(mended).keys()
    expected = set()
    for point in ("after_claim", "after_submit"):
        mended.kill()
        process = mended.launch(env={"EVERSTEP_CRASH_POINT": point})
        wait_for(lambda: _answers(mended), 120, "the API")
        run_id = api(mended, "POST", "/v1/runs", json={**SPEC, "train": {"max_steps": 3}})["id"]
        assert process.wait(60) == -signal.SIGKILL

        mended.start()
        wait_for_success(mended, run_id)
        assert api(mended, "GET", f"/v1/runs/{run_id}")["submission"] == 1
        expected.add(f"{run_id}-s001")
    assert ray_jobs(mended).keys() - jobs_before == expected


@pytest.mark.core
def test_a_killed_head_and_a_damaged_checkpoint_cost_the_steps_since_the_one_before(
    mended: ServiceProcess,
) -> None:
    with mended.tidy_client() as client:
        run = client.runs.create(digits("killed head", epochs=400))
        wait_for_step(run, 25)
        ranks = [worker.pid for worker in run.attempts()[-1].workers]
        mended.kill()  # it would start another cluster at once
        cluster = mended.cluster()
        os.kill(cluster["gcs_pid"], signal.SIGKILL)
        wait_for(lambda: not any(map(psutil.pid_exists, ranks)), 120, "the end of all ranks")
        keeper = (cluster["keeper_pid"], cluster["temp_dir"])
        wait_for(lambda: not lives(*keeper), 120, "the keeper's end")
        assert list(members(cluster["temp_dir"])) == []
        before, damaged = sorted(
            (mended.home / "storage" / "runs" / run.id / "checkpoints").glob("step-*")
        )[-2:]
        model = bytearray((damaged / "model.pt").read_bytes())
        model[len(model) // 2] ^= 1
        (damaged / "model.pt").write_bytes(model)

        mended.start()
        restored = wait_for(
            lambda: [e.data for e in run.events() if e.kind == "restored" and e.data["step"]],
            180,
            "a restore from a checkpoint",
            every_s=ASK_S,
        )
        [data] = restored
        assert (data["source"], data["checkpoint"]) == ("checkpoint", before.name)
        assert [each["name"] for each in data["rejected"]] == [damaged.name]
        wait_for_step(run, int(data["step"]) + 15)
        assert run.refresh().submission == 2
        verdicts = {str(failure.verdict) for failure in run.failures()}
        assert verdicts == {"control_plane", "storage"}, "the dead driver, the damaged checkpoint"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.chaos
def test_a_home_of_an_earlier_version_is_served_and_its_paused_run_goes_on(version: str) -> None:
    service = ServiceProcess(nodes=2)
    unpack_home(version, service.home)
    with service, service.client() as client:
        [paused] = client.runs.list(status=["PAUSED"])
        step = paused.step
        paused.resume()
        paused.wait(timeout_s=180)
        assert [e.data["step"] for e in paused.events() if e.kind == "restored"] == [0, step]
        assert_every_sample_counted_once(paused, epochs=EPOCHS)


def test_a_graceful_stop_leaves_no_process_and_the_next_start_goes_on_and_takes_runs_at_once(
    mended: ServiceProcess,
) -> None:
    run_id = api(mended, "POST", "/v1/runs", json=SPEC)["id"]
    wait_for(
        lambda: api(mended, "GET", f"/v1/runs/{run_id}")["latest_checkpoint"],
        120,
        "a checkpoint",
        every_s=ASK_S,
    )
    temp_dir = mended.cluster()["temp_dir"]
    token = mended.token
    assert len(list(members(temp_dir))) > 5
    process = mended.process
    assert process is not None
    # Somebody follows events: the stop does not wait for them.
    headers = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream"}
    with httpx.stream(
        "GET", f"{mended.url}/v1/runs/{run_id}/events", headers=headers, timeout=60
    ) as stream:
        follower = stream.iter_lines()
        assert next(follower).startswith("id:")
        process.send_signal(signal.SIGTERM)
        for _ in follower:
            pass
    assert process.wait(60) == 0
    assert list(members(temp_dir)) == []
    assert mended.processes() == []
    assert not Path(temp_dir).exists()
    assert not (mended.home / "cluster.json").exists() and not (mended.home / "url").exists()

    # The next start begins another cluster. The API answers, and takes runs, before that is there.
    mended.launch()
    wait_for((mended.home / "url").exists, 120, "the API's start")
    wait_for(lambda: _answers(mended), 120, "the API's first answer")
    has_begun = (mended.home / "cluster.json").exists()
    assert not has_begun or mended.cluster()["state"] == "starting"
    assert mended.token == token
    early = api(mended, "POST", "/v1/runs", json={**SPEC, "name": "early"})["id"]
    assert api(mended, "GET", f"/v1/runs/{early}")["status"] == "QUEUED"
    for each, submission in ((run_id, 2), (early, 1)):
        wait_for_success(mended, each)
        run = api(mended, "GET", f"/v1/runs/{each}")
        assert (run["submission"], run["step"]) == (submission, run["total_steps"])


@pytest.mark.chaos
def test_a_sigterm_while_the_cluster_starts_leaves_nothing(home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "everstep.cli.main",
        "serve",
        "--port",
        str(free_port()),
        "--nodes",
        "1",
    ]
    process = subprocess.Popen(
        command, env={**os.environ, "EVERSTEP_HOME": str(home)}, stderr=subprocess.DEVNULL
    )
    wait_for((home / "cluster.json").exists, 120, "the cluster's start")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not (home / "cluster.json").exists()
    found = [p for p in psutil.process_iter() if _home_of(p) == str(home)]
    assert found == []


def test_a_service_whose_cluster_cannot_start_ends_and_says_where_to_look(home: Path) -> None:
    port = str(free_port())
    ended = serve(home, "--port", port, RAY_gcs_server_port_wait_time_s="not a number")
    assert ended.returncode == 2
    assert "everstep serve: the embedded Ray cluster did not start; see" in ended.stderr
    assert not (home / "cluster.json").exists() and not (home / "url").exists()
    assert [p for p in psutil.process_iter() if _home_of(p) == str(home)] == []


def _answers(service: ServiceProcess) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{service.url}/healthz", timeout=30, trust_env=False).is_success
    return False


def _home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("EVERSTEP_HOME")
    except psutil.Error:
        return None


def test_a_port_in_use_is_named(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = serve(home, "--port", str(port))
    assert refused.returncode == 2
    assert str(port) in refused.stderr and "--port" in refused.stderr
    assert not (home / "cluster.json").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--storage", "/proc/nowhere"), "--storage"),
        *only_in_chaos(
            (("--ray-address", "http://127.0.0.1:9"), "--ray-address"),
            (("--storage", "ftp://host/dir"), "ftp"),
            (("--database", "sqlite:////proc/nowhere/db"), "--database"),
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(
    home: Path, args: tuple[str, ...], said: str
) -> None:
    refused = serve(home, "--port", str(free_port()), *args)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (home / "cluster.json").exists()
