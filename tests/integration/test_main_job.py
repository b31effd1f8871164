"""A request travels the whole way: POST, Ray job, DDP ranks, checkpoints, events, API; and survives
what is killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from everstep import RunFailed
from everstep.client.runs import RunHandle
from tests.support.digits_run import assert_every_sample_counted_once, digits, wait_for_step
from tests.support.service_process import ServiceProcess, wait_for
from train_fn.ranks.process import RANK_NICENESS

ROOT = Path(__file__).parents[2]


def test_a_post_trains_to_the_end_and_the_model_stands_on_its_own(
    service: ServiceProcess, tmp_path: Path
) -> None:
    client = service.client()
    run = client.runs.create(digits("main job", epochs=8))
    run.wait(timeout_s=180)

    assert run.status == "SUCCEEDED" and run.step == run.total_steps == 8 * 12
    assert run.restarts == 0 and run.steps_lost == 0
    assert_every_sample_counted_once(run, epochs=8)
    assert [t.to_status for t in run.transitions] == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    losses = run.metrics("loss", max_points=1000)["loss"]
    assert [step for step, _, _ in losses] == list(range(1, 97))
    kinds = [event.kind for event in run.events()]
    assert [event.seq for event in run.events()] == list(range(1, len(kinds) + 1))
    assert kinds[0] == "run_created" and "checkpoint_committed" in kinds

    out = run.download_checkpoint("latest", tmp_path / "latest")
    command = [
        sys.executable,
        str(ROOT / "tests/integration/evaluate_digits.py"),
        str(out / "model.pt"),
    ]
    accuracy = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert accuracy == pytest.approx(run.run.metrics["val_accuracy"], abs=1e-9)
    assert accuracy > 0.9
    _assert_ray_dashboard_knows(service, run)
    assert {line.rank for line in run.logs()} == {None, 0, 1}
    assert all(line.attempt == 1 for line in run.logs(rank=1))


def _assert_ray_dashboard_knows(service: ServiceProcess, run: RunHandle) -> None:
    """The job carries the run's name, the run links to the job, and nobody else may look."""
    url = f"{service.cluster()['dashboard_url']}/api/jobs/"
    token = (service.home / "ray_token").read_text().strip()
    jobs = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=30).json()
    [job] = [job for job in jobs if (job.get("metadata") or {}).get("run_id") == run.id]
    assert job["metadata"]["run_name"] == run.name
    assert run.links.ray_job == f"{service.url}/ray/#/jobs/{job['submission_id']}"
    assert httpx.get(url, timeout=30).status_code in (401, 403)


def test_cancel_commits_a_checkpoint_and_frees_the_cluster(service: ServiceProcess) -> None:
    client = service.client()
    run = client.runs.create(digits("cancelled", epochs=500))
    wait_for_step(run, 15)
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")
    assert run.latest_checkpoint is not None and run.latest_checkpoint.step == run.step >= 15
    with pytest.raises(RunFailed, match="CANCELLED"):
        run.wait(timeout_s=5)
    again = client.runs.create(digits("after the cancelled one", epochs=1, workers=(3, 3)))
    again.wait(timeout_s=240)


def test_pause_and_resume_go_on_from_the_very_step(service: ServiceProcess) -> None:
    run = service.client().runs.create(digits("paused", epochs=12))
    wait_for_step(run, 20)
    run.pause()
    wait_for(lambda: run.refresh().status == "PAUSED", 120, "the pause")
    paused_at = run.step
    run.resume()
    run.wait(timeout_s=240)
    restored = [event.data["step"] for event in run.events() if event.kind == "restored"]
    assert restored == [0, paused_at]
    assert run.step == 12 * 12
    assert_every_sample_counted_once(run, epochs=12)


@pytest.mark.core
def test_a_killed_rank_costs_nothing_that_counts_and_a_broken_stream_shows_all_of_it_once(
    service: ServiceProcess,
) -> None:
    run = service.client().runs.create(digits("killed rank", epochs=20))
    wait_for_step(run, 25)
    psutil.Process(run.attempts()[-1].workers[1].pid).kill()
    seen = _follow_over_broken_connections(service, run)
    run.wait(timeout_s=180)

    assert run.restarts == 1 and run.steps_lost == 0 and run.step == 20 * 12
    assert_every_sample_counted_once(run, epochs=20)
    [failure] = run.failures()
    assert (failure.verdict, failure.first_rank, failure.steps_lost) == ("worker_lost", 1, 0)
    assert failure.rung == "snapshot"
    _assert_no_process_trains_twice(run)
    assert seen == [event.seq for event in run.events()] == list(range(1, len(seen) + 1))


def _assert_no_process_trains_twice(run: RunHandle) -> None:
    """Nor is one left of the attempt that broke."""
    before, after = ({worker.pid for worker in each.workers} for each in run.attempts())
    assert not before & after
    assert not [pid for pid in before if psutil.pid_exists(pid)]


def _follow_over_broken_connections(service: ServiceProcess, run: RunHandle) -> list[int]:
    """Sequence numbers of the events as a client sees them that drops its connection after every
    seventh."""
    seen: list[int] = []
    with httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {service.token}"}, timeout=30
    ) as http:
        while not run.refresh().status.terminal or any(run.events(after=seen[-1] if seen else 0)):
            headers = {
                "Accept": "text/event-stream",
                **({"Last-Event-ID": str(seen[-1])} if seen else {}),
            }
            with http.stream("GET", f"/v1/runs/{run.id}/events", headers=headers) as response:
                for line in response.iter_lines():
                    if line.startswith("id:"):
                        seen.append(int(line[3:]))
                        if len(seen) % 7 == 0:
                            break  # the connection is dropped in the middle
    return seen


@pytest.mark.core
def test_a_killed_node_shrinks_the_run_and_nothing_else(
    mended: ServiceProcess,
) -> None:
    run = mended.client().runs.create(digits("killed node", epochs=6, workers=(1, 3)))
    wait_for_step(run, 25)
    workers = run.attempts()[-1].workers
    assert len({worker.node_id for worker in workers}) == 3
    assert run.protection.node_loss == "no_steps"
    mended.kill_node(workers[-1].node_id)
    run.wait(timeout_s=240)
    assert run.step == 6 * 12 and run.steps_lost == 0
    assert run.attempts()[0].world_size == 3
    assert run.attempts()[-1].world_size == 2
    assert_every_sample_counted_once(run, epochs=6)
    assert run.failures()[0].verdict == "node_lost"


@pytest.mark.chaos
def test_ranks_run_before_all_else_each_on_the_cores_of_its_node() -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    with ServiceProcess(nodes=2, cpus_per_node=half or 1) as service:
        run = service.client().runs.create(digits("own cores", epochs=10_000))
        wait_for_step(run, 25)
        workers = run.attempts()[-1].workers
        assert [worker.rank for worker in workers] == [0, 1] and len(
            {worker.node_id for worker in workers}
        ) == 2
        own = [cores[:half], cores[half:]] if len(cores) == 2 * half else [cores, cores]
        assert sorted(_cores_of(worker.pid) for worker in workers) == own
        assert {psutil.Process(worker.pid).nice() for worker in workers} == {
            RANK_NICENESS if os.getuid() == 0 else 0
        }
        assert {os.sched_getscheduler(worker.pid) for worker in workers} == {os.SCHED_OTHER}
        run.cancel()
        wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")


def _cores_of(pid: int) -> list[int]:
    """Where every thread of a process may run."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            found.add(frozenset(os.sched_getaffinity(int(thread.name))))
    [cores] = found
    return sorted(cores)


@pytest.mark.core
def test_cli_as_a_user_calls_it(service: ServiceProcess, tmp_path: Path) -> None:
    def everstep(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "everstep"), *arguments]
        return subprocess.run(
            command,
            env={**os.environ, "EVERSTEP_HOME": str(service.home)},
            capture_output=True,
            text=True,
        )

    spec = tmp_path / "digits.yaml"
    spec.write_text(json.dumps(digits("by hand")))  # JSON is YAML
    submitted = everstep("submit", str(spec), "--set", "train.epochs=1", "--watch", "--json")
    assert submitted.returncode == 0, submitted.stderr
    run_id = json.loads(submitted.stdout.splitlines()[-1])["id"]
    shown = json.loads(everstep("show", run_id, "--json").stdout)
    assert shown["status"] == "SUCCEEDED" and shown["total_steps"] == 12
    wrong = everstep("submit", str(spec), "--set", "train.epoch=1")
    assert wrong.returncode == 2 and "train.epoch" in wrong.stderr and "epochs" in wrong.stderr
    assert "by hand" in everstep("runs").stdout
    assert everstep("download", run_id, "latest", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out" / "model.pt").stat().st_size > 0
