"""Packages that a run brings: what a node lacks is installed beside it once, and what it has is
never replaced."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from tests.support.wheels import add_wheel, only_from
from train_fn.errors import BadTask
from train_fn.user_code import packages as own_packages
from train_fn.user_code.packages import add_packages


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a directory: a package that needs another one, and a newer numpy than
    there is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in only_from(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    add_wheel(
        tmp_path / "index",
        "everstep_try_needs",
        "1.0",
        requires=("everstep_try_needed>=2", "numpy"),
    )
    add_wheel(tmp_path / "index", "everstep_try_needed", "2.5")
    add_wheel(tmp_path / "index", "numpy", "99.0")
    return tmp_path


def test_what_is_lacking_is_installed_once_and_last_on_the_path(
    own_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_packages(["everstep_try_needs==1.0"])
    [directory] = {place for place in sys.path if "/cache/packages/" in place}
    assert sys.path[-1] == directory
    assert sorted(path.name for path in Path(directory).glob("*.py")) == [
        "everstep_try_needed.py",
        "everstep_try_needs.py",
    ]
    monkeypatch.setattr(own_packages, "_pip", lambda *arguments: pytest.fail("pip was asked again"))
    add_packages(["everstep_try_needs==1.0"])
    assert sys.path.count(directory) == 1


def test_what_ranks_run_with_is_not_replaced(own_index: Path) -> None:
    present = importlib.metadata.version("numpy")
    with pytest.raises(
        BadTask,
        match=(
            rf"asks for numpy 99\.0, and this node's ranks run with numpy {present}; allow "
            rf"{present}"
        ),
    ):
        add_packages(["numpy>=99"])
    with pytest.raises(BadTask, match=r"pip failed on this node: .*everstep_try_absent"):
        add_packages(["everstep_try_absent"])
    assert not [place for place in sys.path if "/cache/packages/" in place]
