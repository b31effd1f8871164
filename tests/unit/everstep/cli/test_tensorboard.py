"""``everstep tensorboard``: files are fetched once, and what is new later."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from everstep import Client
from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from tests.support.api_service import ApiService
from tests.support.command_line import everstep
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
