"""A Docker engine with Compose v2 on this machine: the one that runs, or Debian's, started here."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.service_process import wait_for

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "everstep-compose"
HERE = Path(__file__).parent
START_S = 60


def run(*argv: str | Path, timeout_s: float = 120, **more: object) -> str:
    """Run a command and return what it printed. Raises AssertionError with its output if it
    fails."""
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        **more,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{' '.join(map(str, argv))}: {done.stdout[-4000:]}"
    return str(done.stdout)


def why_not() -> str:
    """Return why no engine can be had here; empty if one can."""
    if shutil.which("docker") is None:
        return "no Docker engine is installed (Debian: apt-get install docker.io)"
    if not _answers() and (os.geteuid() != 0 or shutil.which("dockerd") is None):
        return "the Docker engine does not answer, and only root can start one"
    return ""


def _answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Yield with an engine that answers. End it afterwards if it was started here."""
    _have_compose()
    if _answers():
        yield
        return
    with tempfile.TemporaryFile() as log:
        daemon = subprocess.Popen(["dockerd"], stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(_answers, START_S, "an answer of the Docker engine", every_s=0.5)
            yield
        finally:
            daemon.terminate()
            daemon.wait(60)


@functools.cache
def _have_compose() -> None:
    """Take Compose v2 and buildx from Debian's packages if this machine has none."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return
    plugins = CACHE / "docker"
    if not (plugins / "cli-plugins/docker-compose").exists():
        run(HERE / "get-compose.sh", plugins, timeout_s=600)
    os.environ["DOCKER_CONFIG"] = str(plugins)
    print(run("docker", "compose", "version"), flush=True)
