"""This user's directories on a node, which nobody else can take over, read or block."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from train_fn.node import node_dir
from train_fn.node.node_dir import own_temporary_dir, shared_memory_root

NAME = f"everstep-{os.getuid()}"
SOMEBODY = 54_321
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of other users")


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the machine's directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_dir, "SHARED_MEMORY", tmp_path)
    return tmp_path


def plant_directory(path: Path) -> None:
    path.mkdir(mode=0o777)


def plant_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


@needs_root
@pytest.mark.parametrize("plant", [plant_directory, plant_link, Path.touch])
def test_somebody_who_was_there_first_blocks_nobody(
    parent: Path, plant: Callable[[Path], None]
) -> None:
    plant(parent / NAME)
    os.chown(parent / NAME, SOMEBODY, SOMEBODY, follow_symlinks=False)
    (parent / f"{NAME}-0").mkdir()
    os.chown(parent / f"{NAME}-0", SOMEBODY, SOMEBODY)
    mine = own_temporary_dir()
    found = mine.lstat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode), stat.S_ISDIR(found.st_mode)) == (
        os.getuid(),
        0o700,
        True,
    )
    assert mine.name.startswith(f"{NAME}-") and mine.name != f"{NAME}-0"
    assert own_temporary_dir() == shared_memory_root() == mine, "all processes of a node agree"


def test_the_directory_is_made_once_for_its_user_alone(parent: Path) -> None:
    assert own_temporary_dir() == own_temporary_dir() == parent / NAME
    assert (
        stat.S_IMODE((parent / NAME).stat().st_mode) == 0o700 and len(list(parent.iterdir())) == 1
    )


@pytest.mark.parametrize("plant", [plant_directory, plant_link, Path.touch])
def test_what_is_this_user_s_and_cannot_be_trusted_is_named(
    parent: Path, plant: Callable[[Path], None]
) -> None:
    plant(parent / NAME)
    if plant is plant_directory:
        (parent / NAME).chmod(0o755)
    with pytest.raises(
        PermissionError, match=rf"{parent / NAME} is not a directory that only user .*; remove it"
    ):
        own_temporary_dir()


def test_a_place_that_takes_no_directory_is_named_with_the_way_out(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "missing"))
    with pytest.raises(
        PermissionError, match=r"missing.*or set TMPDIR to a directory in which user"
    ):
        own_temporary_dir()
