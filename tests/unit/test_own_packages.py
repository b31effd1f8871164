"""Packages that a run brings: what a node lacks is installed beside it once, and what it has is never replaced."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from train_fn import own_packages
from train_fn.errors import BadTask
from train_fn.own_packages import add_packages

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"


@pytest.fixture(autouse=True)
def own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a directory: a package that needs another one, and a newer numpy than there is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    wheel(tmp_path, "everstep_try_needs", "1.0", "Requires-Dist: everstep_try_needed>=2\nRequires-Dist: numpy\n")
    wheel(tmp_path, "everstep_try_needed", "2.5")
    wheel(tmp_path, "numpy", "99.0")
    return tmp_path


def wheel(tmp_path: Path, name: str, version: str, requires: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    path = tmp_path / "index" / f"{name}-{version}-py3-none-any.whl"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", METADATA.format(name=name, version=version, requires=requires))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_what_is_lacking_is_installed_once_and_last_on_the_path(own_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_packages(["everstep_try_needs==1.0"])
    [directory] = {place for place in sys.path if "/cache/packages/" in place}
    assert sys.path[-1] == directory
    assert sorted(path.name for path in Path(directory).glob("*.py")) == ["everstep_try_needed.py", "everstep_try_needs.py"]
    monkeypatch.setattr(own_packages, "_pip", lambda *arguments: pytest.fail("pip was asked again"))
    add_packages(["everstep_try_needs==1.0"])
    assert sys.path.count(directory) == 1


def test_what_ranks_run_with_is_not_replaced(own_index: Path) -> None:
    present = importlib.metadata.version("numpy")
    with pytest.raises(BadTask, match=rf"asks for numpy 99\.0, and this node's ranks run with numpy {present}; allow {present}"):
        add_packages(["numpy>=99"])
    with pytest.raises(BadTask, match=r"pip failed on this node: .*everstep_try_absent"):
        add_packages(["everstep_try_absent"])
    assert not [place for place in sys.path if "/cache/packages/" in place]
