"""A run's values and histories where people look for them: after Tab, and in pandas."""

from __future__ import annotations

import asyncio
import sys

import pandas
import pytest

from everstep import Client, RunHandle
from everstep.errors import UsageError
from everstep.wire import Run
from tests.support.api_service import NOON, ApiService
from tests.support.command_line import finish


@pytest.fixture
async def run(api: ApiService) -> RunHandle:
    run_id = await finish(api)
    return await asyncio.to_thread(Client(api.url, api.token("viewer")).runs.get, run_id)


async def test_tab_offers_fields_and_methods(run: RunHandle) -> None:
    assert {"status", "step", "name", "wait", "latest_metrics"} <= set(dir(run))
    assert set(Run.model_fields) <= set(dir(run))
    assert [name for name in dir(run) if not hasattr(run, name)] == []


async def test_values_have_one_name_and_histories_another(run: RunHandle) -> None:
    assert run.latest_metrics == run.run.metrics and run.latest_metrics["loss"] == 0.25
    assert run.goodput_share == run.run.goodput


async def test_metrics_are_a_table_by_step(run: RunHandle) -> None:
    table = await asyncio.to_thread(run.to_pandas)
    assert list(table.index) == [1, 2] and table.index.name == "step"
    assert list(table["loss"]) == [0.5, 0.25]
    assert pandas.isna(table["val_accuracy"][1]) and table["val_accuracy"][2] == 0.97
    assert table["at"][1] == pandas.Timestamp(NOON, unit="s", tz="UTC")


async def test_events_and_failures_are_tables(run: RunHandle) -> None:
    events = await asyncio.to_thread(run.to_pandas, "events")
    assert list(events.index) == list(range(1, len(events) + 1))
    assert events["kind"][1] == "run_created" and "failure" in set(events["kind"])
    failures = await asyncio.to_thread(run.to_pandas, "failures")
    assert list(failures["verdict"]) == ["worker_lost"] and failures["first_rank"][0] == 1


async def test_a_run_without_a_history_is_an_empty_table(api: ApiService) -> None:
    run_id = await api.create()
    client = Client(api.url, api.token("viewer"))
    run = await asyncio.to_thread(client.runs.get, run_id)
    assert len(await asyncio.to_thread(run.to_pandas)) == 0
    assert len(await asyncio.to_thread(run.to_pandas, "failures")) == 0


async def test_what_is_missing_says_what_to_do(
    run: RunHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="use one of metrics, events, failures"):
        run.to_pandas("losses")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        run.to_pandas()
