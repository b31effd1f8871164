"""The table behind curves: complete, of one's own project, and no formula for a spreadsheet."""

from __future__ import annotations

import csv
from pathlib import Path

from sqlalchemy import insert

from service.db.tables import metrics
from tests.support.api_service import NOON, ApiService
from tests.support.web_browser import Browser


async def test_a_table_has_every_value_of_a_long_series(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        run_id, journal = await api.running(name="mine")
        api.apply(run_id, [journal.steps(2, loss=None), journal.steps(3, **{"=1+1": 0.1})])
        points = [
            {"run_id": run_id, "name": "loss", "step": step, "at": NOON + step, "value": step / 7}
            for step in range(10, 12_010)
        ]
        with api.database.write() as connection:
            connection.execute(insert(metrics), points)
        viewer = await Browser.logged_in(api, api.token("viewer", "default"))
        answer = await viewer.http.get(f"/curves.csv?run={run_id}&name=loss&name==1%2B1")
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert "attachment" in answer.headers["content-disposition"]
        head, first, gap, *rest, last = csv.reader(answer.text.splitlines())
        assert head == ["run_id", "run", "metric", "step", "time", "value"]
        assert first[:4] == [run_id, "mine", "loss", "1"] and first[5] == "0.5"
        assert gap[3:] == ["2", first[4], ""]
        assert [float(row[5]) for row in rest] == [step / 7 for step in range(10, 12_010)]
        assert last[2:4] == ["'=1+1", "3"]
        stranger = await Browser.logged_in(api, api.token("viewer", "elsewhere"))
        assert (await stranger.http.get(f"/curves.csv?run={run_id}&name=loss")).status_code == 404
        assert (
            await viewer.http.get(f"/curves.csv?run={run_id}&name={'x' * 200}")
        ).status_code == 422
