"""The wheel outside any checkout: the client without torch and Ray, and the whole service."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HOUSES = ("everstep", "service", "storage", "train_fn")
SITE = Path(sysconfig.get_path("purelib"))


def run(*command: object, cwd: Path, timeout_s: float = 300, **env: str) -> str:
    """Run a program outside the checkout; return its standard output."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EVERSTEP_", "PYTHON", "RAY_"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sources() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *HOUSES], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, sources: list[str]) -> Path:
    """Build the wheel from what the repository has, beside what earlier builds left."""
    base = tmp_path_factory.mktemp("wheel")
    for name in [*sources, "pyproject.toml", "README.md", "LICENSE"]:
        (base / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, base / "source" / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", base)
    run(sys.executable, "-m", "pip", "wheel", *options, base / "source", cwd=base)
    [built] = base.glob("everstep-*.whl")
    return built


def installed(wheel: Path, directory: Path, packages: Path) -> Path:
    """Make an environment with the wheel, whose dependencies are those in ``packages``; return its
    programs."""
    venv.create(directory)
    site = next((directory / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{packages}\n")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    program = directory / "bin" / "everstep"
    program.write_text(
        f"#!{directory / 'bin' / 'python'}\nfrom everstep.cli.main import main\nmain()\n"
    )
    program.chmod(0o755)
    return directory / "bin"


@functools.cache
def closure(name: str) -> frozenset[str]:
    """Return a distribution with those that it needs on this machine, without extras."""
    found = {name}
    for line in importlib.metadata.requires(name) or []:
        needed = re.split(r"[ ;<>=!~\[(]", line, maxsplit=1)[0]
        if "extra ==" not in line and _is_installed(needed):
            found |= closure(needed)
    return frozenset(found)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_the_wheel_has_every_file_of_the_houses(wheel: Path, sources: list[str]) -> None:
    with zipfile.ZipFile(wheel) as packed:
        there = set(packed.namelist())
    assert set(sources) - there == set()
    assert {name.split("/")[0] for name in there} - set(HOUSES) == {
        f"everstep-{importlib.metadata.version('everstep')}.dist-info"
    }


def test_a_script_beside_the_clone_imports_everstep_and_not_the_clones_folder(
    sources: list[str], tmp_path: Path
) -> None:
    clone, site = tmp_path / "everstep", tmp_path / "site"
    for name in [*sources, "pyproject.toml", "README.md", "LICENSE"]:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, clone / name)
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=clone)
    [editable] = tmp_path.glob("everstep-*.whl")
    with zipfile.ZipFile(editable) as packed:
        packed.extractall(site)
    found = (
        f"import importlib.util, site, sys; site.addsitedir({str(site)!r}); "
        f"sys.path.insert(0, {str(tmp_path)!r}); "
        "print(importlib.util.find_spec('everstep').origin)"
    )
    origin = run(sys.executable, "-I", "-S", "-c", found, cwd=tmp_path).strip()
    assert origin == str(clone / "everstep" / "__init__.py")


def test_the_client_needs_no_torch_and_no_ray(wheel: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in closure("everstep") - {"everstep"}:
        for file in importlib.metadata.distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(SITE / top)
    bin_ = installed(wheel, tmp_path / "light", packages)
    for absent in ("torch", "ray", "fastapi", "numpy"):
        assert not (packages / absent).exists()
    program = (
        "import time; began = time.process_time(); import everstep; "
        "print(time.process_time() - began); everstep.Client, everstep.AsyncClient"
    )
    assert float(run(bin_ / "python", "-c", program, cwd=tmp_path)) < 0.3
    assert "Begin here" in run(bin_ / "everstep", "--help", cwd=tmp_path)
    run(bin_ / "everstep", "init", "task", "mine", cwd=tmp_path)
    assert (tmp_path / "mine" / "mine" / "task.py").exists()
    refused = subprocess.run(
        [bin_ / "everstep", "serve"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "pip install 'everstep[server]'" in refused.stderr


@pytest.mark.chaos
def test_the_wheel_serves_trains_and_recovers_alone(wheel: Path, tmp_path: Path) -> None:
    """The demo, from an environment in which no checkout is: service, migrations, Ray jobs on the
    embedded cluster, a killed node, a replay."""
    bin_ = installed(wheel, tmp_path / "whole", SITE)
    place = "import service, train_fn, storage, everstep; print(service.__file__)"
    assert run(bin_ / "python", "-c", place, cwd=tmp_path).startswith(str(tmp_path))
    told = run(bin_ / "everstep", "demo", "--json", cwd=tmp_path, timeout_s=280)
    shown = json.loads(told.splitlines()[-1])
    assert shown["proof"]["result"] == "equal" and shown["steps_lost"] == 0
    assert set(shown["seconds"]) == {"service", "training", "replay"}
    assert (tmp_path / "out" / "demo" / "model.pt").exists()
