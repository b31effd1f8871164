"""The SDK in a kernel of IPython, which nbclient starts: the cells of docs/sdk.md, and a plot."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_service import ApiService
from tests.support.tools import tool
from tests.unit.everstep.client.test_notebook import SDK, examples, train

PLOT = 'ax = table["loss"].plot()'


def cells() -> list[str]:
    """Return the documentation's cells up to the table of a run, then a table and a plot."""
    found = list(examples(SDK.read_text().partition("\n## Several runs\n")[0]))
    assert "run.wait(" in "".join(found) and "to_pandas()" in found[-1]
    return [*found, "run", "table", PLOT]


def notebook(sources: list[str]) -> dict[str, Any]:
    """Return a notebook in format 4.5."""
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{number}",
                "metadata": {},
                "source": source,
                "outputs": [],
                "execution_count": None,
            }
            for number, source in enumerate(sources)
        ],
    }


async def test_the_documentation_runs_in_a_notebook_up_to_a_table_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sdk.ipynb"
    path.write_text(json.dumps(notebook(cells())))
    environ = {
        **{name: value for name, value in os.environ.items() if name != "MPLBACKEND"},
        "PYTHONPATH": str(tool("notebook") / "packages"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    program = "from nbclient.cli import main; main()"
    command = [sys.executable, "-c", program, str(path), "--inplace", "--timeout=200"]
    async with ApiService(tmp_path / "service") as api:
        api.announce(monkeypatch)
        environ |= {name: os.environ[name] for name in ("EVERSTEP_URL", "EVERSTEP_TOKEN")}
        running = asyncio.create_task(
            asyncio.to_thread(
                subprocess.run, command, env=environ, capture_output=True, text=True, timeout=240
            )
        )
        while not (api.runs.live() or running.done()):  # noqa: ASYNC110  a process has no event for it
            await asyncio.sleep(0.01)
        if not running.done():
            await train(api, api.runs.live()[0].id)
        done = await running
    assert done.returncode == 0, done.stderr
    shown = [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]
    run, table, plot = shown[-3:]
    assert "SUCCEEDED" in "".join(run[0]["data"]["text/html"])
    assert "<th>loss</th>" in "".join(table[0]["data"]["text/html"])
    assert any("image/png" in output.get("data", {}) for output in plot)
