"""``everstep tensorboard``: files are fetched once, followed while they grow, and shown by
TensorBoard itself."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from everstep import Client
from everstep.cli import observe
from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from tests.support.api_service import ApiService
from tests.support.command_line import everstep
from tests.support.service_process import free_port, wait_for
from tests.unit.train_fn.journal.test_tensorboard import Submission, read
from train_fn.journal.tensorboard_files import TensorBoardFiles

pytestmark = pytest.mark.slow


async def trained(api: ApiService) -> tuple[str, Submission, TensorBoardFiles]:
    """A run with ten points in its TensorBoard file."""
    run_id = await api.create(name="digits")
    run_dir = RunDir(api.storage, run_id)
    submission, files = Submission(run_dir, 1), TensorBoardFiles(run_dir, 1)
    submission.tell(EventKind.SUBMISSION_STARTED)
    submission.steps(*range(1, 11))
    files.update()
    return run_id, submission, files


async def test_files_are_fetched_as_far_as_they_are_new(api: ApiService, tmp_path: Path) -> None:
    run_id, submission, files = await trained(api)
    with Client() as client:
        run = await asyncio.to_thread(client.runs.get, run_id)
        first = await asyncio.to_thread(run.download_event_files, tmp_path / "tb")
        again = await asyncio.to_thread(run.download_event_files, tmp_path / "tb")
        submission.steps(11, 12)
        files.update()
        more = await asyncio.to_thread(run.download_event_files, tmp_path / "tb")
    assert first > more > 0 == again
    counts, scalars, _ = read(tmp_path / "tb")
    assert [step for step, _ in scalars["loss"]] == list(range(1, 13)) and set(counts.values()) == {
        1
    }
    other = await everstep("tensorboard", run_id, "--download", tmp_path / "cli")
    assert other.exit_code == 0 and (tmp_path / "cli" / f"digits-{run_id}").is_dir()


async def test_a_name_leads_nowhere_else(api: ApiService) -> None:
    run_id, *_ = await trained(api)
    base = f"/v1/runs/{run_id}/tensorboard"
    for name in ("..%2Fspec.json", "spec.json", "events.out.tfevents.%2E%2E%2F1"):
        assert (await api.http.get(f"{base}/{name}")).status_code in (404, 422)
    assert (await api.http.get(f"{base}/events.out.tfevents.9.x")).status_code == 404
    [file] = (await api.get(base))["items"]
    assert (await api.http.get(f"{base}/{file['name']}")).content[:8] != b""


async def test_tensorboard_shows_the_runs_until_it_is_ended(api: ApiService) -> None:
    run_id, *_ = await trained(api)
    await asyncio.to_thread(show_and_end, run_id)


def show_and_end(run_id: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "everstep.cli.main", "tensorboard", run_id, "--port", port]
    tags = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"

    def names() -> dict[str, dict[str, object]]:
        try:
            found: dict[str, dict[str, object]] = httpx.get(tags, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return found

    with subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL) as shown:
        try:
            found = wait_for(names, 120.0, "TensorBoard's answer")
            assert set(found[f"digits-{run_id}"]) == {"loss", "lr"}
        finally:
            shown.send_signal(signal.SIGINT)
            shown.wait(60)
    assert shown.returncode == 130
    with pytest.raises(httpx.ConnectError):
        httpx.get(tags, trust_env=False)


async def test_where_it_is_not_installed_the_way_out_is_said(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, *_ = await trained(api)
    monkeypatch.setattr(observe.importlib.util, "find_spec", lambda _name: None)
    refused = await everstep("tensorboard", run_id)
    assert refused.exit_code == 2 and "pip install tensorboard" in refused.stderr
