"""Checkpoints over HTTP, with real checkpoints in storage."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import threading
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from everstep.wire import Checkpoint
from everstep.wire.events import EventKind
from service.api.blocking import LONG_STORAGE
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal


def save(api: ApiService, run_id: str, journal: Journal, step: int, **metrics: float) -> Manifest:
    """A checkpoint in storage, and its event."""
    writer = CheckpointStore(RunDir(api.storage, run_id)).begin(
        step, journal.submission, journal.attempt
    )
    for name, content in (("model.pt", b"weights" * 100_000), ("train_state.pt", b"state")):
        with writer.write_file(name) as stream:
            stream.write(content)
    manifest = writer.commit(
        epoch=0, parent=None, world_size=2, sample_digest="s", metrics=dict(metrics)
    )
    event = journal.event(
        EventKind.CHECKPOINT_COMMITTED,
        step=step,
        epoch=0,
        name=manifest.name,
        size_bytes=manifest.size_bytes,
        digest=manifest.digest,
        metrics=dict(metrics),
        stall_s=0.0,
        write_s=0.1,
    )
    api.apply(run_id, [event])
    return manifest


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def test_checkpoints_are_listed_and_found(api: ApiService) -> None:
    run_id, journal = await api.running(checkpoint={"best_metric": "accuracy"})
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/latest")) == (404, "not_found")
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/best")) == (404, "not_found")
    manifests = [
        save(api, run_id, journal, step, accuracy=accuracy)
        for step, accuracy in ((10, 0.8), (20, 0.9), (30, 0.7))
    ]
    items = [
        Checkpoint.model_validate(item)
        for item in (await api.get(f"/v1/runs/{run_id}/checkpoints"))["items"]
    ]
    assert [(item.step, item.state, item.digest, item.size_bytes) for item in items] == [
        (manifest.step, "committed", manifest.digest, manifest.size_bytes) for manifest in manifests
    ]
    for which, step in (("latest", 30), ("best", 20), ("10", 10), ("0010", 10)):
        assert (await api.get(f"/v1/runs/{run_id}/checkpoints/{which}"))["step"] == step
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/11")) == (404, "not_found")
    assert (await api.get(f"/v1/runs/{run_id}"))["latest_checkpoint"]["step"] == 30


async def test_best_without_a_metric_says_what_to_do(api: ApiService) -> None:
    run_id, journal = await api.running()
    save(api, run_id, journal, 10)
    answer = await api.http.get(f"/v1/runs/{run_id}/checkpoints/best")
    assert code(answer) == (404, "not_found")
    assert "checkpoint.best_metric" in answer.json()["detail"]


@pytest.mark.parametrize(
    "which", ["newest", "-1", "1.5", "9" * 20, "%E0%A5%A7", "step-000000010.s001.a001"]
)
async def test_what_names_no_checkpoint(api: ApiService, which: str) -> None:
    run_id = await api.create()
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/{which}")) == (
        422,
        "invalid_request",
    )


async def test_an_archive_is_the_checkpoint(api: ApiService) -> None:
    run_id, journal = await api.running()
    manifest = save(api, run_id, journal, 10)
    answer = await api.http.get(f"/v1/runs/{run_id}/checkpoints/latest/archive")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["x-everstep-digest"] == f"sha256:{manifest.digest}"
    assert (
        answer.headers["content-disposition"]
        == f'attachment; filename="{run_id}-step-000000010.s001.a001.tar"'
    )
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == ["manifest.json", "model.pt", "train_state.pt"]
        for name, entry in manifest.files.items():
            stream = archive.extractfile(name)
            assert stream is not None and blake3(stream.read()).hexdigest() == entry.blake3
        stream = archive.extractfile("manifest.json")
        assert stream is not None and json.loads(stream.read())["digest"] == manifest.digest


async def test_an_archive_comes_in_parts(api: ApiService) -> None:
    run_id, journal = await api.running()
    manifest = save(api, run_id, journal, 10)
    path = f"/v1/runs/{run_id}/checkpoints/10/archive"
    whole = await api.http.get(path)
    size, etag = len(whole.content), whole.headers["etag"]
    assert (whole.headers["accept-ranges"], whole.headers["content-length"]) == ("bytes", str(size))
    assert etag == f'"{manifest.digest}"'
    for asked, begin, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=1000-200000", 1000, 200_001),
        ("bytes=300000-", 300_000, size),
        (f"bytes=500-{size + 99}", 500, size),
        ("bytes=-100", size - 100, size),
        (f"bytes=-{size + 1}", 0, size),
    ):
        part = await api.http.get(path, headers={"Range": asked, "If-Range": etag})
        assert part.status_code == 206, asked
        assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}"
        assert part.content == whole.content[begin:end], asked
    for headers in (
        {"Range": "bytes=5-", "If-Range": '"another"'},
        {"Range": "bytes=9-5"},
        {"Range": "bytes=0-1,5-6"},
        {"Range": "bytes=-"},
        {"Range": "lines=1-2"},
    ):
        answer = await api.http.get(path, headers=headers)
        assert (answer.status_code, answer.content) == (200, whole.content), headers
    for asked in (f"bytes={size}-", "bytes=-0"):
        beyond = await api.http.get(path, headers={"Range": asked})
        assert code(beyond) == (416, "range_not_satisfiable")
        assert beyond.headers["content-range"] == f"bytes */{size}"


async def test_an_archive_of_what_is_gone(api: ApiService) -> None:
    run_id, journal = await api.running()
    manifest = save(api, run_id, journal, 10)
    api.storage.files.delete_dir(f"runs/{run_id}/checkpoints/{manifest.name}")
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/10/archive")) == (
        404,
        "not_found",
    )
    api.apply(run_id, [journal.event(EventKind.CHECKPOINT_DELETED, step=10, name=manifest.name)])
    answer = await api.http.get(f"/v1/runs/{run_id}/checkpoints/10/archive")
    assert code(answer) == (404, "not_found") and "deleted" in answer.json()["detail"]
    assert (await api.get(f"/v1/runs/{run_id}/checkpoints/10"))["state"] == "deleted"
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/latest")) == (404, "not_found")
    assert code(await api.http.post(f"/v1/runs/{run_id}/checkpoints/10/verify")) == (
        409,
        "checkpoint_deleted",
    )


async def test_a_corrupt_archive_breaks_off(api: ApiService, tmp_path: Path) -> None:
    run_id, journal = await api.running()
    manifest = save(api, run_id, journal, 10)
    path = tmp_path / "storage" / "runs" / run_id / "checkpoints" / manifest.name / "model.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    with pytest.raises(httpx.RemoteProtocolError):
        await api.http.get(f"/v1/runs/{run_id}/checkpoints/10/archive")
    (path.parent / "manifest.json").write_text("{}")
    assert code(await api.http.get(f"/v1/runs/{run_id}/checkpoints/10/archive")) == (
        409,
        "corrupt_checkpoint",
    )


async def test_verifying(api: ApiService, tmp_path: Path) -> None:
    run_id, journal = await api.running()
    manifest = save(api, run_id, journal, 10)
    api.clock.now += 5
    assert (await api.get(f"/v1/runs/{run_id}/checkpoints/10"))["verified_at"] is None
    sound = await api.http.post(f"/v1/runs/{run_id}/checkpoints/latest/verify")
    assert sound.status_code == 200
    assert (sound.json()["state"], sound.json()["problem"], sound.json()["verified_at"]) == (
        "committed",
        None,
        "2026-05-28T20:26:45.000Z",
    )
    path = tmp_path / "storage" / "runs" / run_id / "checkpoints" / manifest.name / "model.pt"
    path.write_bytes(b"short")
    broken = await api.http.post(f"/v1/runs/{run_id}/checkpoints/10/verify")
    assert broken.status_code == 200
    assert broken.json()["state"] == "corrupt" and "model.pt" in broken.json()["problem"]
    assert (await api.get(f"/v1/runs/{run_id}/checkpoints/10"))["state"] == "corrupt"
    path.unlink()
    assert (
        "model.pt"
        in (await api.http.post(f"/v1/runs/{run_id}/checkpoints/10/verify")).json()["problem"]
    )
    path.write_bytes(b"weights" * 100_000)
    assert (await api.http.post(f"/v1/runs/{run_id}/checkpoints/10/verify")).json()[
        "state"
    ] == "committed"


async def test_verifying_leaves_threads_for_other_requests(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, journal = await api.running()
    save(api, run_id, journal, 10)
    go_on, begun = threading.Event(), threading.Semaphore(0)
    verify = CheckpointStore.verify

    def slow(self: CheckpointStore, name: str) -> None:
        begun.release()
        assert go_on.wait(60)
        verify(self, name)

    monkeypatch.setattr(CheckpointStore, "verify", slow)
    path = f"/v1/runs/{run_id}/checkpoints/10/verify"
    tasks = [asyncio.create_task(api.http.post(path)) for _ in range(10)]
    try:
        async with asyncio.timeout(60):
            while LONG_STORAGE.statistics().tasks_waiting < 8:  # noqa: ASYNC110  the server's own tasks
                await asyncio.sleep(0.02)
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        assert not begun.acquire(blocking=False), "two at a time"
        assert (await api.http.get(f"/v1/runs/{run_id}/logs")).status_code == 200
        assert not any(task.done() for task in tasks)
    finally:
        go_on.set()
    assert {answer.json()["state"] for answer in await asyncio.gather(*tasks)} == {"committed"}


async def test_retention_leaves_alone_what_is_being_downloaded(api: ApiService) -> None:
    run_id, journal = await api.running()
    for step in (10, 20, 30):
        save(api, run_id, journal, step)
    store = CheckpointStore(RunDir(api.storage, run_id))
    async with api.http.stream("GET", f"/v1/runs/{run_id}/checkpoints/10/archive") as answer:
        blocks = answer.aiter_raw()
        first = await anext(blocks)
        assert store.retain(1, None) == ["step-000000020.s001.a001"]
        data = first + b"".join([block async for block in blocks])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["manifest.json", "model.pt", "train_state.pt"]
    async with asyncio.timeout(60):
        while store.retain(1, None) != ["step-000000010.s001.a001"]:  # noqa: ASYNC110  the service lets go once the last block has left it
            await asyncio.sleep(0.01)


async def test_a_download_that_broke_off_can_go_on(api: ApiService) -> None:
    run_id, journal = await api.running()
    for step in (10, 20):
        save(api, run_id, journal, step)
    store = CheckpointStore(RunDir(api.storage, run_id))
    path = f"/v1/runs/{run_id}/checkpoints/10/archive"
    whole = (await api.http.get(path)).content
    first = await api.http.get(path, headers={"Range": "bytes=0-999"})
    assert store.retain(1, None) == []
    rest = await api.http.get(
        path, headers={"Range": "bytes=1000-", "If-Range": first.headers["ETag"]}
    )
    assert first.content + rest.content == whole
