"""The home directory: whose it has to be, and what is left of a write that failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.process import serve
from service.process.app import database_lock
from service.settings import HomeError, HomeLock, Settings, published_url
from tests.support.small_disk import mounted_small_disk

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def test_a_home_that_the_service_makes_is_its_users_alone(tmp_path: Path) -> None:
    home = tmp_path / "deep/home"
    before = os.umask(0)
    try:
        with HomeLock(Settings(home=home)):
            found = home.stat()
    finally:
        os.umask(before)
    assert (found.st_mode & 0o777, found.st_uid) == (0o700, os.geteuid())


@needs_root
def test_a_home_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 4711, -1)
    with (
        pytest.raises(HomeError, match=r"belongs to another user \(uid 4711\).*chown 0 .*own"),
        HomeLock(Settings(home=tmp_path)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []  # nothing of ours for him to read
    with HomeLock(Settings(home=tmp_path / "own")):  # the way out that the message names
        pass


@pytest.mark.parametrize("mode", [0o707, 0o1777])
def test_a_home_that_everybody_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    """Also with the sticky bit: whoever comes first makes the file."""
    tmp_path.chmod(mode)
    with (
        pytest.raises(HomeError, match=rf"every user .* \(mode {mode:04o}\).*chmod 700"),
        HomeLock(Settings(home=tmp_path)),
    ):
        pass
    tmp_path.chmod(0o700)
    with HomeLock(Settings(home=tmp_path)):
        pass


def test_a_home_that_its_group_may_write_to_is_told_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with capture_logs() as lines, HomeLock(Settings(home=tmp_path)):
        pass
    [line] = lines
    assert (line["log_level"], line["mode"], line["home"]) == ("warning", "0770", str(tmp_path))
    tmp_path.chmod(0o755)
    with capture_logs() as lines, HomeLock(Settings(home=tmp_path)):
        pass
    assert lines == []


def test_an_address_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    with mounted_small_disk(tmp_path / "disk") as disk:
        with (disk / "filler").open("wb") as filler, pytest.raises(OSError, match="No space left"):
            filler.write(bytes(4 << 20))
            filler.flush()
        with (
            pytest.raises(OSError, match="No space left"),
            published_url(disk / "url", "http://127.0.0.1:8000"),
        ):
            pass
        assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_second_service_on_one_sqlite_file_is_refused_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link = tmp_path / "shared.db", tmp_path / "link.db"
    path.touch()
    link.symlink_to(path)
    first = Settings(home=tmp_path / "first", database_url=f"sqlite:///{path}")
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "second"))
    monkeypatch.setenv("EVERSTEP_DATABASE", f"sqlite:///{link}")
    monkeypatch.setenv("EVERSTEP_RAY_ADDRESS", "http://127.0.0.1:9")
    monkeypatch.setenv("EVERSTEP_PORT_NUMBER", "0")
    # It belongs to the whole process, and so to the tests that follow.
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    with database_lock(first):
        assert serve.main() == serve.EXIT_CANNOT_START
    said = capsys.readouterr().err
    assert f"(pid {os.getpid()} on {os.uname().nodename} since 20" in said
    assert f"already runs on the database {path}" in said and "--database" in said
    assert path.read_bytes() == b"", "no table was made, and so no token revoked"
    with database_lock(first):  # it ends with the process, and with the block
        pass
