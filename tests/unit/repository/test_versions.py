"""The versions that Everstep runs on: one statement of them, and what refuses another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from everstep.supported import PYTHON, RAY, TORCH, Supported, install_command

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pyproject_has_the_ranges_that_are_refused_outside() -> None:
    assert PROJECT["requires-python"] == PYTHON.specifier
    server = PROJECT["optional-dependencies"]["server"]
    assert f"ray[default,train]{RAY.specifier}" in server
    assert f"torch{TORCH.specifier}" in server
    named = {
        line.rpartition(":: ")[2]
        for line in PROJECT["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {f"3.{minor}" for minor in range(PYTHON.first[1], PYTHON.last[1] + 1)}


def test_a_missing_extra_is_installed_from_where_this_installation_came() -> None:
    assert install_command("server") == f"pip install -e '{ROOT}[server]'"


@pytest.mark.parametrize(
    ("origin", "what"),
    [
        ({}, "everstep[wandb]"),
        ({"url": "file:///w/e.whl", "archive_info": {}}, "/w/e.whl[wandb]"),
        (
            {"url": "https://me:x@h.io/e.whl", "archive_info": {}},
            "everstep[wandb] @ https://h.io/e.whl",
        ),
        (
            {"url": "ssh://git@h.io/e", "vcs_info": {"vcs": "git", "commit_id": "c0"}},
            "everstep[wandb] @ git+ssh://git@h.io/e@c0",
        ),
    ],
)
def test_only_what_came_from_an_index_is_installed_from_one(
    origin: dict[str, object], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "everstep-1.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: everstep\nVersion: 1\n")
    if origin:
        (place / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("wandb") == f"pip install '{what}'"


def test_the_pages_for_newcomers_name_these_pythons() -> None:
    words = f"Python {PYTHON.first[0]}.{PYTHON.first[1]} to {PYTHON.last[0]}.{PYTHON.last[1]}"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert words in (ROOT / page).read_text(), page


def test_every_python_has_a_lock_and_make_accepts_it() -> None:
    minors = range(PYTHON.first[1], PYTHON.last[1] + 1)
    assert {path.name for path in (ROOT / "locks").glob("*.txt")} == {
        f"server-linux-x86_64-cp3{minor}.txt" for minor in minors
    }
    script = (ROOT / "scripts" / "make-venv.sh").read_text()
    assert f"{PYTHON.first} <= sys.version_info[:2] <= {PYTHON.last}" in script
    assert PYTHON.specifier in script
    assert all(f"python3.{minor}" in script for minor in minors)


@pytest.mark.parametrize(
    ("supported", "version", "refused"),
    [
        (RAY, "2.57.1", True),
        (RAY, "2.58.0", False),
        (RAY, "2.60.3", False),
        (RAY, "2.61.0.dev0", True),
        (RAY, "3.0.0", True),
        (RAY, "nightly", True),
        (TORCH, "2.12.1+cu130", True),
        (TORCH, "2.13.0+cpu", False),
        (TORCH, "2.15.0", False),
        (TORCH, "2.16.0", True),
        (PYTHON, "3.10.12", True),
        (PYTHON, "3.14.8", False),
        (PYTHON, "3.15.0", True),
    ],
)
def test_outside_is_refused_with_both_versions_and_the_way_out(
    supported: Supported, version: str, refused: bool
) -> None:
    problem = supported.problem(version, "node-7")
    assert (problem is not None) is refused
    if problem:
        assert f"node-7 has {supported.name} {version}" in problem
        assert str(supported) in problem and "install" in problem


def other(tmp_path: Path, name: str, version: str) -> dict[str, str]:
    """Return the environment of a process that finds this version of a package installed."""
    metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "EVERSTEP_HOME": str(tmp_path / "home")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code"),
    [
        (["-m", "everstep.cli.main", "serve", "--port", "0"], 2),
        (
            [
                *("-m", "train_fn.driver", "--storage", "/nowhere"),
                *("--run-id", "run_1", "--submission", "1"),
            ],
            1,
        ),
    ],
    ids=["a service with a cluster of its own", "a job"],
)
@pytest.mark.parametrize(("name", "version"), [("ray", "2.57.1"), ("torch", "2.12.0")])
def test_a_program_refuses_at_its_start(
    tmp_path: Path, program: list[str], code: int, name: str, version: str
) -> None:
    done = subprocess.run(
        [sys.executable, *program],
        env=other(tmp_path, name, version),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    supported = RAY if name == "ray" else TORCH
    assert f"has {name} {version}, and Everstep needs {supported}; install" in done.stderr
    assert "Traceback" not in done.stderr
