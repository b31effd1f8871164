"""What the tests on the engine have in common: runs that train, and clients that ask meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.compose.deployment import Deployment
from tests.compose.engine import run
from tests.compose.operations_page import command
from tests.hosts.trial import Trial

EPOCHS = 45
AHEAD = 40
"""Steps that a run must make to show that it trains."""
DAILY = "Day to day"


def follow(deployment: Deployment, heading: str, part: str, **values: str) -> None:
    """Type a command of docs/operations.md in the deployment's directory."""
    typed = command(heading, part, **values)
    print("$", *typed, flush=True)
    run(*typed, cwd=deployment.directory, timeout_s=900)


def container_of(trial: Trial[Deployment], rank: int) -> str:
    """Return the container in which a rank of the newest attempt runs."""
    workers = trial.run.attempts()[-1].workers
    return str(
        trial.hosts.container_at(next(each.node_ip for each in workers if each.rank == rank))
    )


def go_on(trial: Trial[Deployment]) -> None:
    """Wait until the run has made some steps more."""
    trial.reach(trial.run.refresh().step + AHEAD)


def assert_never_interrupted(trial: Trial[Deployment]) -> None:
    """Wait for the end of a run that trained through an outage. Five saves in a row that fail are
    told as a failure, which ends nothing."""
    record = trial.finish()
    assert record["steps_lost"] == 0
    assert {failure["verdict"] for failure in record["failures"]} <= {"storage"}
    assert len(trial.run.attempts()) == 1


@contextmanager
def polled(deployment: Deployment, run_id: str) -> Iterator[list[str]]:
    """Ask for a run all the time, and yield the list of what went wrong. Raises AssertionError if
    nothing was asked."""
    problems: list[str] = []
    num_asked = 0
    over = threading.Event()

    def ask() -> None:
        nonlocal num_asked
        header = {"Authorization": f"Bearer {deployment.token}"}
        with deployment.http() as http:
            while not over.wait(0.1):
                num_asked += 1
                try:
                    answer = http.get(f"/v1/runs/{run_id}", headers=header)
                    if not answer.is_success:
                        problems.append(f"{answer.status_code} {answer.text[:200]}")
                except httpx.HTTPError as exc:
                    problems.append(repr(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield problems
    finally:
        over.set()
        asking.join(90)
    assert num_asked > 0 and not asking.is_alive()
