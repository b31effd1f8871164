"""`everstep init` writes a task that works as it stands, with a test that can fail."""

from __future__ import annotations

import importlib
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from everstep.cli.submit import write_skeleton
from everstep.errors import UsageError

ROOT = Path(__file__).parents[4]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = write_skeleton("two_spirals", tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "two_spirals"]:
        del sys.modules[name]


def test_its_own_test_passes_and_notices_a_loss_that_learns_nothing(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = {
        name: test
        for name, test in runpy.run_path(str(written / "test_task.py")).items()
        if name.startswith("test_")
    }
    assert len(tests) == 4
    for test in tests.values():
        test()
    task = importlib.import_module("two_spirals.task").TwoSpirals
    loss = task.loss
    monkeypatch.setattr(
        task,
        "loss",
        lambda self, model, batch: (0 * loss(self, model, batch)[0] + 1, len(batch[0])),
    )
    with pytest.raises(AssertionError):
        tests["test_it_learns"]()


def test_its_spec_names_its_own_class_and_only_fields_that_exist(written: Path) -> None:
    from everstep.spec.run_spec import RunSpec

    text = (written / "spec.yaml").read_text()
    assert "--task two_spirals.task:TwoSpirals" in text
    assert yaml.safe_load(text).keys() <= RunSpec.model_fields.keys()
    assert yaml.safe_load(text)["name"] == "two-spirals"


@pytest.mark.parametrize(
    "name", ["my-task", "class", "1st", "json", "torch", "train_fn", "__", "ünïcode"]
)
def test_a_name_that_cannot_be_imported_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=name):
        write_skeleton(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(written: Path) -> None:
    with pytest.raises(UsageError, match="not empty"):
        write_skeleton("two_spirals", written.parent)


def test_the_wheel_has_every_template() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = declared["tool"]["setuptools"]["package-data"]["everstep"]
    folder = ROOT / "everstep"
    templates = sorted((folder / "cli" / "skeleton_files").iterdir())
    assert [path.name for path in templates if path.suffix != ".template"] == []
    included = {path for pattern in patterns for path in folder.glob(pattern)}
    assert len(templates) == 5 and included >= set(templates)
