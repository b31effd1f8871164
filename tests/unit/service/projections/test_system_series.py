"""What ranks report about hosts and GPUs becomes series of their own, beside a run's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from everstep.wire.events import EventKind
from tests.support.api_service import NOON, ApiService
from tests.support.web_browser import Browser

HOST = {
    "node_id": "node-1",
    "cpu_cores": 1.5,
    "rss_bytes": 3_000_000,
    "net_in_bytes_per_s": 200,
    "net_out_bytes_per_s": 50,
    "seconds": 60.0,
}
GPU: dict[str, Any] = {
    "node_id": "node-1",
    "name": "A100",
    "busy": 0.5,
    "used_bytes": 10,
    "total_bytes": 20,
    "allocated_bytes": 5,
    "seconds": 60.0,
}


async def test_they_are_kept_by_time_and_drawn_by_rank(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        run_id, journal = await api.running()
        journal.at = NOON + 10.4
        api.apply(
            run_id,
            [
                journal.event(EventKind.RANK_USE, rank=0, **HOST),
                journal.event(EventKind.RANK_USE, rank=1, **HOST | {"cpu_cores": 0.25}),
                journal.event(EventKind.GPU_USE, rank=0, **GPU),
                journal.event(EventKind.RANK_USE, rank=64, **HOST),
                journal.event(EventKind.RANK_USE, rank=0, **HOST | {"cpu_cores": "many"}),
            ],
        )
        journal.at = NOON + 70.4
        warm = GPU | {"power_w": 250.5, "celsius": 61}
        api.apply(run_id, [journal.event(EventKind.GPU_USE, rank=0, **warm)])
        listed = (await api.get(f"/v1/runs/{run_id}/metrics"))["series"]
        assert list(listed) == ["loss"]
        assert list((await api.get(f"/v1/runs/{run_id}"))["metrics"]) == ["loss"]
        names = "system.cpu_cores.rank0,system.cpu_cores.rank1,system.gpu_celsius.rank0"
        found = (await api.get(f"/v1/runs/{run_id}/metrics?names={names}"))["series"]
        assert found == {
            "system.cpu_cores.rank0": [[10, NOON + 10.4, 1.5]],
            "system.cpu_cores.rank1": [[10, NOON + 10.4, 0.25]],
            "system.gpu_celsius.rank0": [[70, NOON + 70.4, 61.0]],
        }
        assert "system.cpu_cores.rank64" not in api.series.names(run_id)
        browser = await Browser.logged_in(api, api.token("viewer"))
        drawn = json.loads((await browser.http.get(f"/runs/{run_id}/curves.json")).text)
        titles = {chart["title"]: chart.get("labels") for chart in drawn["charts"]}
        assert titles["CPU"] == ["rank 0", "rank 1"] and titles["GPU temperature"] == ["rank 0"]
        busy = drawn["series"]["system.gpu_busy_percent.rank0"]
        assert [value for _, _, value in busy] == [50.0, 50.0]
        assert drawn["num_charts"] == 1
        compared = await browser.http.get(f"/runs/{run_id}/curves.json?system=false")
        assert set(json.loads(compared.text)["series"]) == {"loss"}, "hosts are not compared"
