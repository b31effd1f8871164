"""A storage that is full, fails, stalls or dies: training goes on, the run says so, and saving is
tried until it succeeds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageFull, StorageUnavailable
from storage.files.local import LocalFiles
from tests.support.one_rank import journal_of
from tests.support.saves import (
    CountedCopies,
    SlowStorage,
    make_context,
    make_state,
    train_step,
    weight_in,
)
from tests.support.small_disk import mounted_small_disk
from train_fn.checkpoints import cadence, save_slot
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed
from train_fn.state.train_state import TrainState

pytestmark = [pytest.mark.own_process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "RETRY_S", 0.01)
    monkeypatch.setattr(cadence, "RETRY_MAX_S", 0.02)


class FailingStorage:
    """Fails every save while ``error`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = StorageFull("no space left; free some")
        begin = CheckpointStore.begin

        def begin_or_fail(store: CheckpointStore, step: int, submission: int, attempt: int) -> Any:
            if self.error is not None:
                raise self.error
            return begin(store, step, submission, attempt)

        monkeypatch.setattr(CheckpointStore, "begin", begin_or_fail)


def reported(
    ctx: WorkerContext, kind: EventKind = EventKind.CHECKPOINT_FAILED
) -> list[dict[str, Any]]:
    return journal_of(ctx).of_kind(kind)


def train_until(saver: Saver, state: TrainState, reached: Callable[[], bool]) -> None:
    """Steps of a millisecond until a fact is there."""
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        train_step(saver, state, state.step + 1)
        time.sleep(0.001)


def test_training_goes_on_and_every_failure_is_told_until_a_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state, storage = (
        make_context(tmp_path, max_failed_saves=3),
        make_state(),
        FailingStorage(monkeypatch),
    )
    copies = CountedCopies(state)
    saver = Saver(ctx, state, copies)
    train_until(saver, state, lambda: len(reported(ctx)) >= 4)
    failed = reported(ctx)
    assert [data["failed_in_a_row"] for data in failed[:4]] == [1, 2, 3, 4]
    assert failed[0]["step"] == 10 and failed[0]["error"] == "StorageFull: no space left; free some"
    assert (
        failed[0]["max_failed_saves"] == 3
        and failed[0]["retry_s"] == 0.01
        and failed[1]["retry_s"] == 0.02
    )
    assert failed[1]["step"] > failed[0]["step"], "what is tried again is the newest state"
    assert saver.stop is None, "the spec does not ask for a pause"
    storage.error = None
    train_until(saver, state, lambda: saver.newest_committed(0) > 0)
    newest = ctx.checkpoints.list()[-1]
    assert newest.step > failed[-1]["step"] and weight_in(ctx, newest.name) == newest.step
    assert copies.most_held == 1
    storage.error = StorageUnavailable("again")
    train_until(saver, state, lambda: reported(ctx)[-1]["error"].endswith("again"))
    again = next(data for data in reported(ctx) if data["error"].endswith("again"))
    assert again["failed_in_a_row"] == 1, "failures in a row are counted anew after a success"
    saver.close()


def test_a_run_that_asks_for_it_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, state = make_context(tmp_path, max_failed_saves=2, on_failed_saves="pause"), make_state()
    FailingStorage(monkeypatch)
    saver = Saver(ctx, state, BoundaryCopies(state))
    train_until(saver, state, lambda: len(reported(ctx)) == 1)
    assert saver.stop is None
    train_until(saver, state, lambda: len(reported(ctx)) >= 2)
    assert saver.stop == "pause"
    saver.close()


def test_the_best_state_is_tried_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state, storage = (
        make_context(tmp_path, every_steps=None),
        make_state(),
        FailingStorage(monkeypatch),
    )
    saver = Saver(ctx, state, BoundaryCopies(state))
    train_step(saver, state, 7, is_best=True)
    train_until(saver, state, lambda: len(reported(ctx)) >= 2)
    storage.error = None
    train_until(saver, state, lambda: saver.newest_committed(0) > 0)
    assert saver.newest_committed(0) == 7 and weight_in(ctx, "step-000000007.s001.a001") == 7
    saver.close()


def test_the_final_checkpoint_is_tried_as_long_as_there_is_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state, storage = make_context(tmp_path), make_state(), FailingStorage(monkeypatch)
    saver = Saver(ctx, state, BoundaryCopies(state))
    with pytest.raises(
        CheckpointFailed,
        match=r"step 0 could not be committed, with 0.4 s of patience: no space left",
    ):
        saver.save_now(patience_s=0.4)
    assert len(reported(ctx)) >= 2
    storage.error = None
    saver.save_now()
    assert [manifest.step for manifest in ctx.checkpoints.list()] == [0]
    saver.close()


def test_a_storage_that_stands_still_counts_as_failed_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_slot, "STALLED_S", 0.05)
    ctx, state, slow = (
        make_context(tmp_path, every_steps=1, max_failed_saves=3),
        make_state(),
        SlowStorage(monkeypatch),
    )
    copies = CountedCopies(state)
    saver = Saver(ctx, state, copies)
    train_until(saver, state, lambda: len(reported(ctx)) >= 3)
    assert reported(ctx)[2] == {
        "step": 1,
        "error": "StorageUnavailable: the storage took no byte for 0.05 s",
        "failed_in_a_row": 3,
        "max_failed_saves": 3,
        "retry_s": 0.02,
    }
    assert copies.most_held == 1, "nothing is queued behind a save that stands still"
    with pytest.raises(CheckpointFailed, match="the storage does not answer"):
        saver.save_now(patience_s=0.1)
    slow.go.release(99)
    train_until(saver, state, lambda: saver.newest_committed(0) > 1)
    assert weight_in(ctx, "step-000000001.s001.a001") == 1, (
        "what it takes late is still the state of its step"
    )
    saver.close()


# ---------------------------------------------------------------- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted_small_disk(tmp_path / "disk") as place:
        yield place


def test_a_full_disk_costs_no_step_and_no_checkpoint(small_disk: Path) -> None:
    ctx = make_context(small_disk, keep_latest=1)
    model = nn.Linear(256, 512)  # 0.5 MiB: three fit, but not beside what fills the disk below
    optimizer = torch.optim.SGD(model.parameters())
    state = make_state(model, optimizer, steps_per_epoch=9)
    saver = Saver(ctx, state, BoundaryCopies(state))
    train_until(saver, state, lambda: saver.newest_committed(0) == 10)
    with (small_disk / "filler").open("wb") as filler:
        filler.write(
            bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - (300 << 10))
        )
    train_until(saver, state, lambda: len(reported(ctx)) >= 2)
    assert reported(ctx)[0]["error"].startswith("StorageFull: cannot write"), (
        "the disk's own words, not those of torch.save"
    )
    store = ctx.checkpoints
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.step == 10 and rejected == []
    (small_disk / "filler").unlink()
    train_until(saver, state, lambda: saver.newest_committed(10) > 10)
    saver.save_now()
    saver.close()
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.step == state.step and rejected == []
    left = [path.name for path in (small_disk / "runs/run_saver/checkpoints").iterdir()]
    assert left == [newest.name], "nothing of the saves that failed is left"


# ---------------------------------------------------------------- an object store that fails


FAILING = b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"


class FlakyServer:
    """A real S3 server behind a door that turns every n-th request away with a 500."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self.every: int | None = None
        self.num_requests = self.num_refused = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        self.num_requests += 1
        if self.every is not None and self.num_requests % self.every == 0:
            self.num_refused += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [FAILING]
        return self._app(environ, start_response)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FlakyServer, str]]:
    """The server and the URI of a bucket on it."""
    import threading

    from pyarrow import fs
    from werkzeug.serving import make_server

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    app = FlakyServer()
    server = make_server("127.0.0.1", 0, app, threaded=True)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"127.0.0.1:{server.server_port}"
    fs.S3FileSystem(
        endpoint_override=address, scheme="http", region="us-east-1", allow_bucket_creation=True
    ).create_dir("flaky")
    # Every server of this process has the same objects: a prefix for each test.
    yield (
        app,
        f"s3://flaky/{server.server_port}?endpoint_override={address}&scheme=http&region=us-east-1",
    )
    app.every = None
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_fails_every_nth_request(
    flaky: tuple[FlakyServer, str], tmp_path: Path
) -> None:
    """Whatever it refuses, what is committed verifies, and once it is well again the next save
    succeeds."""
    server, uri = flaky
    ctx, state = make_context(tmp_path, uri=uri, every_steps=1, keep_latest=2), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    server.every = 7
    train_until(saver, state, lambda: server.num_refused >= 3)
    server.every = None
    saver.save_now()
    saver.close()
    store = ctx.checkpoints
    for manifest in store.list():
        store.verify(manifest.name)
        assert weight_in(ctx, manifest.name) == manifest.step
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.step == state.step and rejected == []


def test_a_commit_whose_answer_is_lost_is_found_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest landed, and the storage said that it did not."""
    ctx, state = make_context(tmp_path), make_state()
    promote, answers = LocalFiles.promote, iter([StorageUnavailable("no answer")])

    def promote_and_lose(*args: Any) -> bool:
        done = promote(*args)
        for error in answers:
            raise error
        return done

    monkeypatch.setattr(LocalFiles, "promote", promote_and_lose)
    saver = Saver(ctx, state, BoundaryCopies(state))
    saver.save_now()
    assert [data["step"] for data in reported(ctx)] == [0]
    assert [data["step"] for data in reported(ctx, EventKind.CHECKPOINT_COMMITTED)] == [0]
    assert [manifest.step for manifest in ctx.checkpoints.list()] == [0]
    saver.close()
