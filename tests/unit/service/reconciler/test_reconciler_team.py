"""The queue of a team through whole ticks: quotas, preemption, and replicas that lead by turns."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import text

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from everstep.wire.team import Quotas
from service.db.engine import Database
from service.db.lease import LEASE_S, LeaseLost
from service.db.runs import RunStore
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.postgres_server import PostgresServer
from tests.support.reconciler_world import World, world
from tests.support.service_process import wait_for

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")


async def test_a_quota_becomes_the_driver_s_limit(here: World) -> None:
    here.projects.put("vision", Quotas(max_workers=2))
    run = here.create(project="vision", scaling={"min_workers": 1, "max_workers": 8})
    await here.reconciler.tick()
    assert here.get(run.id).workers_limit == 2
    run_dir = RunDir(here.storage, run.id)
    assert (run_dir.workers_limit(), run_dir.read_spec().scaling.max_workers) == (2, 8)
    free = here.create()
    here.projects.put("vision", Quotas())
    await here.reconciler.tick()
    assert (
        here.get(free.id).workers_limit is None
        and RunDir(here.storage, free.id).workers_limit() is None
    )


async def test_a_preempted_run_makes_room_and_comes_back(here: World, ray: FakeRay) -> None:
    scaling = {"min_workers": 2, "max_workers": 2}
    low = here.create(scaling=scaling, priority=-1)
    await here.reconciler.tick()
    here.write(low.id, 1, (EventKind.ATTEMPT_STARTED, {"world_size": 2, "workers": []}))
    urgent = here.create(scaling=scaling, priority=1)
    await here.reconciler.tick()
    assert (here.get(low.id).status, here.get(low.id).preempted_by) == (
        RunStatus.STOPPING,
        urgent.id,
    )
    await here.reconciler.tick()
    assert RunDir(here.storage, low.id).stop_requested(1) == "pause"
    stopped = {
        "outcome": "stopped",
        "reason": {"code": "paused_by_user", "message": "stopped by request: pause"},
        "step": 5,
    }
    here.write(low.id, 1, (EventKind.FINISHED, stopped), first=2)
    ray.end(f"{low.id}-s001", "SUCCEEDED")
    for _ in range(2):
        await here.reconciler.tick()
    assert (here.get(low.id).status, here.get(low.id).step) == (RunStatus.QUEUED, 5)
    assert here.get(urgent.id).status == RunStatus.STARTING
    here.write(
        urgent.id, 1, (EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 1})
    )
    ray.end(f"{urgent.id}-s001", "SUCCEEDED")
    for _ in range(2):
        await here.reconciler.tick()
    assert (here.get(low.id).status, here.get(low.id).submission) == (RunStatus.STARTING, 2)
    assert ray.submissions == [f"{low.id}-s001", f"{urgent.id}-s001", f"{low.id}-s002"]


async def test_an_elastic_run_shrinks_for_another_one_and_grows_again(
    here: World, ray: FakeRay
) -> None:
    ray.nodes.append(ray.node("n2", {"CPU": 1.0}))
    low = here.create(scaling={"min_workers": 1, "max_workers": 3}, priority=-1)
    await here.reconciler.tick()
    run_dir, started = RunDir(here.storage, low.id), EventKind.ATTEMPT_STARTED
    here.write(low.id, 1, (started, {"world_size": 3, "workers": []}))
    urgent = here.create(scaling={"min_workers": 2, "max_workers": 2})
    await here.reconciler.tick()
    found = here.get(low.id)
    assert (found.status, found.stop_requested) == (RunStatus.STARTING, None)
    assert (
        found.shrunk == {"to": 1, "by": urgent.id, "at": here.now} and run_dir.workers_limit() == 1
    )
    run_dir.write_workers_limit(None)
    here.restart()
    await here.reconciler.tick()
    assert run_dir.workers_limit() == 1, "a process that took over tells again"
    here.write(low.id, 1, (EventKind.ATTEMPT_ENDED, {"cause": "resized", "last_step": 5}), first=2)
    here.write(low.id, 1, (started, {"world_size": 1, "workers": []}), first=3)
    for _ in range(2):
        await here.reconciler.tick()
    assert here.get(urgent.id).status == RunStatus.STARTING and here.get(low.id).shrunk is not None
    here.write(
        urgent.id, 1, (EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 1})
    )
    for _ in range(2):
        await here.reconciler.tick()
    assert here.get(low.id).shrunk is None and run_dir.workers_limit() is None
    limits = [
        (event.data["limit"], event.data["by"])
        for event in here.events.of_kinds(low.id, {EventKind.WORKERS_LIMITED})
    ]
    assert limits == [(1, urgent.id), (None, None)]


async def test_one_replica_reconciles_and_one_that_stood_still_does_no_harm(
    tmp_path: Path, ray: FakeRay, postgresql: PostgresServer
) -> None:
    async with AsyncExitStack() as stack:
        url = stack.enter_context(postgresql.database())
        first, second = [
            await stack.enter_async_context(world(tmp_path, ray.url, url)) for _ in range(2)
        ]
        run = first.create()
        assert await first.reconciler.tick() != ()
        assert await second.reconciler.tick() == (), "it stands by"
        with first.database.write() as connection:
            connection.execute(
                text("UPDATE leases SET expires_at = expires_at - :s"), {"s": LEASE_S + 1}
            )
        waiting = first.create()
        await second.reconciler.tick()
        assert second.get(waiting.id).status == RunStatus.STARTING
        stale = RunStore(first.database.guarded(first.leadership.check), first.clock)  # type: ignore[union-attr]
        with pytest.raises(LeaseLost):
            stale.claim_submission(run.id, 1)
        assert await first.reconciler.tick() == (), "now it knows"
        await second.reconciler.close()
        third = first.create()
        ray.nodes.append(ray.node("n2", {"CPU": 4.0}))
        await first.reconciler.tick()
        assert first.get(third.id).status == RunStatus.STARTING, (
            "given back in order, taken at once"
        )
        assert len(ray.submissions) == 3


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_leader_that_is_stopped_or_killed_is_replaced_within_ten_seconds(
    number: signal.Signals, tmp_path: Path, ray: FakeRay, postgresql: PostgresServer
) -> None:
    with postgresql.database() as url:
        database = Database(url)

        def holder() -> str:
            with database.read() as connection:
                found = connection.execute(text("SELECT holder FROM leases")).scalar_one_or_none()
            return str(found).split(":")[1] if found else ""

        command = [
            sys.executable,
            "-m",
            "tests.support.reconciler_world",
            str(tmp_path),
            ray.url,
            url,
        ]
        replicas = {
            str(process.pid): process for process in (subprocess.Popen(command) for _ in range(2))
        }
        try:
            wait_for(lambda: holder() in replicas, 60, "a first leader")
            leader = replicas[holder()]
            os.kill(leader.pid, number)
            wait_for(lambda: holder() != str(leader.pid), 10, "the next leader")
            made = asyncio.run(_created(tmp_path, ray.url, url))
            wait_for(lambda: ray.submissions, 10, "a start by the next leader")
            if number == signal.SIGSTOP:
                leader.send_signal(signal.SIGCONT)
                time.sleep(2)  # it wakes, finds its lease gone, and stands by
                assert leader.poll() is None and holder() != str(leader.pid)
            assert ray.submissions == [f"{made}-s001"]
        finally:
            for process in replicas.values():
                process.kill()
                process.wait(60)
            database.close()


async def _created(home: Path, ray_url: str, url: str) -> str:
    async with world(home, ray_url, url) as made:
        return made.create().id
