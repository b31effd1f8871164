"""A storage that really stops: a filesystem that is frozen under the saver, a server that is killed
while it saves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.support.saves import make_context, make_state, weight_in
from tests.support.service_process import free_port, wait_for
from tests.unit.train_fn.checkpoints.test_save_failures import reported, train_until
from train_fn.checkpoints import cadence, save_slot
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver

pytestmark = pytest.mark.chaos


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "RETRY_S", 0.05)
    monkeypatch.setattr(cadence, "RETRY_MAX_S", 0.5)


# ---------------------------------------------------------------- a filesystem that stands still


class Disk:
    """An ext4 filesystem in a file, which can be frozen: whoever writes then waits in the
    kernel."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frozen = False

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", self.path], check=True, timeout=60)
        self._frozen = True

    def thaw(self) -> None:
        if self._frozen:
            subprocess.run(["fsfreeze", "--unfreeze", self.path], check=True, timeout=60)
        self._frozen = False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if missing := [name for name in ("mkfs.ext4", "fsfreeze") if shutil.which(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)} (Debian: e2fsprogs, util-linux)")
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"needs the right to mount a filesystem: {done.stderr.strip()}")
    disk = Disk(place)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_frozen_filesystem_stops_no_step(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_slot, "STALLED_S", 0.2)
    ctx, state = make_context(disk.path, every_steps=1), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    train_until(saver, state, lambda: saver.newest_committed(0) > 0)
    disk.freeze()
    before = state.step
    train_until(saver, state, lambda: len(reported(ctx)) >= 3)
    assert reported(ctx)[-1]["error"] == "StorageUnavailable: the storage took no byte for 0.2 s"
    assert state.step > before + 50, "training went on"
    disk.thaw()
    train_until(saver, state, lambda: saver.newest_committed(0) > before + 50)
    saver.save_now()
    saver.close()
    newest, rejected = ctx.checkpoints.newest_valid()
    assert newest is not None and newest.step == state.step and rejected == []
    assert weight_in(ctx, newest.name) == state.step


# ---------------------------------------------------------------- an S3 server that dies


class S3Server:
    """An S3 server in a process of its own. What it holds dies with it."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "moto.server",
            "-H",
            "127.0.0.1",
            "-p",
            self.address.rpartition(":")[2],
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(self._answers, 60, "the server's first answer")
        from pyarrow import fs

        fs.S3FileSystem(
            endpoint_override=self.address,
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        ).create_dir("outage")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        host, _, port = self.address.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setitem(os.environ, "NO_PROXY", "127.0.0.1")
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.kill()


def test_a_server_that_dies_in_the_middle_of_saves_and_comes_back(
    server: S3Server, tmp_path: Path
) -> None:
    uri = f"s3://outage/prefix?endpoint_override={server.address}&scheme=http&region=us-east-1"
    ctx, state = (
        make_context(tmp_path, uri=uri, every_steps=1, keep_latest=2, max_failed_saves=2),
        make_state(),
    )
    saver = Saver(ctx, state, BoundaryCopies(state))
    train_until(saver, state, lambda: saver.newest_committed(0) > 3)
    server.kill()  # a save of each step is always under way
    before = state.step
    train_until(saver, state, lambda: len(reported(ctx)) >= 2)
    assert state.step > before + 50, "training went on"
    assert all(data["error"].startswith("Storage") for data in reported(ctx)), reported(ctx)
    assert reported(ctx)[1]["failed_in_a_row"] == 2
    last = max(data["step"] for data in reported(ctx, EventKind.CHECKPOINT_COMMITTED))
    server.start()
    train_until(saver, state, lambda: saver.newest_committed(last) > last)
    saver.save_now()
    saver.close()
    store = ctx.checkpoints
    for manifest in store.list():
        store.verify(manifest.name)
        assert weight_in(ctx, manifest.name) == manifest.step > last
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.step == state.step and rejected == []
