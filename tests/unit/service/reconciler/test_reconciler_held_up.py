"""One run's directory and journal hold up no other run, whatever they hold."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.db.events import EventStore
from service.model.run_rows import RunRow
from service.reconciler import tail as tail_module
from service.reconciler.facts import TailFact
from storage.logs.journal import read_journal
from tests.support.fake_ray import FakeRay
from tests.support.projected_events import run_row
from tests.support.reconciler_world import METRICS, STARTED, World

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")


async def two_runs(here: World, ray: FakeRay) -> tuple[str, str]:
    first, second = here.create(), here.create()
    for _ in range(3):
        await here.reconciler.tick()
    return first.id, second.id


def journal(here: World, run_id: str) -> Path:
    return Path(here.storage.files.path(f"runs/{run_id}/events/s001.jsonl"))


@pytest.mark.parametrize("kind", ["fifo", "sparse"])
async def test_a_fifo_or_a_sparse_line_in_one_runs_journal(
    here: World, ray: FakeRay, kind: str
) -> None:
    """open() waited for a writer of the FIFO, and with it the tick of all runs."""
    one, other = await two_runs(here, ray)
    path = journal(here, one)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(200 << 20)
    here.write(other, 1, *STARTED, METRICS)
    try:
        async with asyncio.timeout(20):
            await here.reconciler.tick()
        assert (here.get(other).status, here.get(other).step) == (RunStatus.RUNNING, 7)
    finally:
        if kind == "fifo":  # lets go of a reader that waits
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


async def test_a_directory_that_does_not_answer(
    here: World, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a read may wait for ever, and nothing ends it."""
    one, other = await two_runs(here, ray)
    answers, waits = threading.Event(), threading.Event()

    def reads(run_dir: Any, *args: Any, **more: Any) -> Any:
        if run_dir.run_id == one:
            waits.set()
            assert answers.wait(60)
        return read_journal(run_dir, *args, **more)

    monkeypatch.setattr("service.reconciler.tail.read_journal", reads)
    monkeypatch.setattr(tail_module, "RUN_PATIENCE_S", 0.2)
    for run_id in (one, other):
        here.write(run_id, 1, *STARTED, METRICS)
    async with asyncio.timeout(30):
        while not waits.is_set() or here.get(other).step != 7:
            await here.reconciler.tick()
    assert here.get(one).status is RunStatus.STARTING
    await here.reconciler.tick()
    assert [each.name for each in threading.enumerate()].count("journals") == 1, "one waits"
    answers.set()
    async with asyncio.timeout(30):
        while here.get(one).step != 7:
            await here.reconciler.tick()


def test_a_run_that_was_slow_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(run_row(), id=f"run_{number:012d}") for number in range(3)]
    answers, reads = threading.Event(), list[str]()

    def drain(row: RunRow) -> tuple[RunRow, TailFact]:
        reads.append(row.id)
        assert row is not rows[0] or answers.wait(30)
        return row, TailFact.DRAINED

    monkeypatch.setattr(tail_module, "RUN_PATIENCE_S", 0.5)
    drains = tail_module.Drains(drain)
    drains.read(rows)
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "journals":
            thread.join(30)
    drains.read(rows)
    assert reads[-3:] == [rows[1].id, rows[2].id, rows[0].id]


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just(10**30)
    | st.just(-1),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
WELL = {
    EventKind.ATTEMPT_STARTED: {
        "world_size": 2,
        "workers": [{"rank": 0, "node_id": "n", "node_ip": "i", "pid": 1}],
    },
    EventKind.RESTORED: {
        "step": 3,
        "epoch": 0,
        "source": "checkpoint",
        "checkpoint": None,
        "rejected": [{"name": "x", "problem": "y"}],
    },
    EventKind.TRAINING_STARTED: {
        "total_steps": 10,
        "steps_per_epoch": 10,
        "snapshots": "none",
        "guarantee": "all",
    },
    EventKind.METRICS: {"points": [{"step": 7, "at": 1.0, "values": {"loss": 0.5}}]},
    EventKind.EVALUATED: {"step": 7, "epoch": 0, "metrics": {"accuracy": 0.5}},
    EventKind.CHECKPOINT_COMMITTED: {
        "step": 7,
        "epoch": 0,
        "name": "step-000000007.s001.a001",
        "size_bytes": 1,
        "metrics": {},
    },
    EventKind.CHECKPOINT_FAILED: {
        "step": 7,
        "error": "e",
        "failed_in_a_row": 3,
        "max_failed_saves": 3,
        "retry_s": 1,
    },
    EventKind.FAILURE: {"verdict": "storage", "exception": "e", "action": "a"},
    EventKind.RECOVERED: {"steps_lost": 1},
    EventKind.WAITING: {"code": "c", "message": "m", "missing": {}},
    EventKind.SNAPSHOTS: {"step": 1, "snapshots": "none", "problem": None},
}


@st.composite
def spoilt_lines(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Events of which each has one value that is something else than it should be, at any depth."""
    lines = []
    for n, kind in enumerate(
        draw(st.lists(st.sampled_from(list(WELL)), min_size=1, max_size=6)), 1
    ):
        line = {
            "n": n,
            "at": 1.0,
            "kind": kind.value,
            "submission": 1,
            "attempt": 1,
            "source": "driver",
            "source_n": n,
        }
        line["data"] = json.loads(json.dumps(WELL[kind]))
        node: Any = line
        for _ in range(draw(st.integers(1, 4))):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(node[key], dict | list) or not draw(st.booleans()):
                node[key] = draw(ODD)
                break
            node = node[key]
        lines.append(line)
    return lines


async def test_a_journal_of_odd_values_stops_no_look(here: World, ray: FakeRay) -> None:
    """``workers: [5]`` in one run's journal made every tick fail, for all runs."""
    loop = asyncio.get_running_loop()
    one, other = await two_runs(here, ray)
    count = 0

    async def look(lines: list[dict[str, Any]]) -> None:
        nonlocal count
        count += 1
        path = journal(here, one)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        here.write(
            other,
            1,
            (EventKind.METRICS, {"points": [{"step": count, "at": 1.0, "values": {"loss": 0.5}}]}),
            first=count,
        )
        await here.reconciler.tick()
        assert here.get(other).step == count
        with here.database.write() as connection:
            connection.exec_driver_sql(
                "UPDATE runs SET journal_submission = 0, journal_n = 0, journal_cursor = NULL, "
                "row_version = row_version + 1 "
                f"WHERE id = '{one}'"
            )

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(spoilt_lines())
    def play(lines: list[dict[str, Any]]) -> None:
        asyncio.run_coroutine_threadsafe(look(lines), loop).result(60)

    await asyncio.to_thread(play)


async def test_a_journal_with_a_gap_stops_no_look(here: World, ray: FakeRay) -> None:
    one, other = await two_runs(here, ray)
    here.write(one, 1, *STARTED, METRICS)
    path = journal(here, one)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    here.write(other, 1, *STARTED, METRICS)
    await here.reconciler.tick()
    assert here.get(other).step == 7


async def test_a_journal_that_cannot_be_applied_stops_no_look(
    here: World, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await two_runs(here, ray)
    for run_id in (one, other):
        here.write(run_id, 1, *STARTED, METRICS)
    apply = EventStore.apply_journal

    def fails(store: EventStore, run_id: str, *rest: Any) -> RunRow:
        if run_id == one:
            raise ZeroDivisionError
        return apply(store, run_id, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(EventStore, "apply_journal", fails)
        await here.reconciler.tick()
    assert (here.get(one).step, here.get(other).step) == (0, 7)
    await here.reconciler.tick()
    assert here.get(one).step == 7, "it is tried again"
