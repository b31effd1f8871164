"""What people see on a terminal of 80 columns: no id and no status is broken over two lines."""

from __future__ import annotations

import asyncio

from everstep.wire import Reason, ReasonCode, RunStatus
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService
from tests.support.narrow_terminal import COLUMNS, NarrowTerminal, on_terminal

LONG = "a-name-of-a-run-that-is-longer-than-a-terminal-is-wide-" * 2


def narrow(lines: list[str]) -> list[str]:
    """Lines that a terminal does not break."""
    assert [line for line in lines if len(line) > COLUMNS] == []
    return lines


async def test_runs_keep_ids_and_statuses_whole(api: ApiService) -> None:
    running, _ = await api.running(name=LONG)
    queued = await api.create(name="short")
    message = "needs 8 x 1 CPU, which no node of this cluster has free at the moment"
    api.runs.set_reason(
        queued,
        RunStatus.QUEUED,
        Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=message),
    )
    code, lines = await asyncio.to_thread(on_terminal, "runs")
    assert code == 0
    for run_id, status in ((running, "RUNNING"), (queued, "QUEUED")):
        [line] = [line for line in narrow(lines) if run_id in line]
        assert status in line
    assert any("not shown on this narrow terminal: reason" in line for line in lines)


async def test_a_table_that_does_not_fit_is_printed_row_by_row(api: ApiService) -> None:
    ids = [await api.create(name=f"run {number}") for number in range(5)]
    code, lines = await asyncio.to_thread(on_terminal, "compare", *ids)
    assert code == 0
    for run_id in ids:
        assert len([line for line in narrow(lines) if line == f"{run_id}  QUEUED"]) == 1


async def test_the_audit_log_keeps_targets_whole(api: ApiService) -> None:
    run_id = await api.create()
    code, lines = await asyncio.to_thread(on_terminal, "audit")
    assert code == 0 and [line for line in narrow(lines) if run_id in line]


async def test_watch_keeps_the_status_whole_beside_a_long_name(api: ApiService) -> None:
    run_id, journal = await api.running(name=LONG)
    terminal = NarrowTerminal("watch", run_id)
    await asyncio.to_thread(terminal.read_until, "1/30")
    api.apply(run_id, [journal.steps(2, loss=0.25, val_accuracy=0.5)])
    await asyncio.to_thread(terminal.read_until, "2/30")
    api.apply(run_id, [journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=2)])
    assert await asyncio.to_thread(terminal.finish) == 0
    bars = narrow([line for line in terminal.lines if "/30" in line])
    assert bars and all(line.startswith(tuple(RunStatus)) for line in bars)
    assert any(line.startswith("RUNNING") and "2/30" in line for line in bars)
