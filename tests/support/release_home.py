"""What a version left behind: database, checkpoints and journals of a service, as the next version
finds them.

``python -m tests.support.release_home`` runs a service and writes them to
``tests/data/VERSION/home.tar.xz``. Once a version is released, its file stays as it is. Tests
unpack it with ``unpack_home``.
"""

from __future__ import annotations

import importlib.metadata
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import psutil

from tests.support.digits_run import digits, wait_for_step
from tests.support.service_process import ServiceProcess, wait_for

DATA = Path(__file__).parents[1] / "data"
VERSIONS = sorted(path.name for path in DATA.iterdir()) if DATA.exists() else []
KEPT = ("everstep.db", "storage")
"""Of a service's home; nothing that opens a door is kept."""
EPOCHS = 30


def unpack_home(version: str, home: Path) -> Path:
    """Write the home of a service of this version to an empty directory, and return it."""
    with tarfile.open(DATA / version / "home.tar.xz") as archive:
        archive.extractall(home, filter="data")
    return home


def small(name: str, **overrides: Any) -> dict[str, Any]:
    """Return the spec of a run whose checkpoints have a few kilobytes."""
    spec = digits(name, **overrides)
    spec["task"]["model"] = {
        "name": "mini_resnet",
        "args": {"width": 16, "num_stages": 1, "blocks_per_stage": 1},
    }
    spec["checkpoint"].update(keep_latest=1)
    return spec


def fill(service: ServiceProcess) -> None:
    """Leave a run that lost a rank and succeeded, and one that is paused."""
    with service.client() as client:
        run = client.runs.create(small("survivor", epochs=EPOCHS))
        wait_for_step(run, 15)
        psutil.Process(run.attempts()[-1].workers[1].pid).kill()
        run.wait(timeout_s=180)
        paused = client.runs.create(small("paused", epochs=EPOCHS))
        wait_for_step(paused, 15)
        paused.pause()
        wait_for(lambda: paused.refresh().status == "PAUSED", 120, "the pause")


def main() -> None:
    target = DATA / importlib.metadata.version("everstep") / "home.tar.xz"
    with ServiceProcess(nodes=2) as service:
        fill(service)
        service.stop()
        with sqlite3.connect(service.home / "everstep.db") as database:
            database.execute("DELETE FROM tokens")
            database.commit()
            database.execute("VACUUM")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(target, "w:xz") as archive:
            for name in KEPT:
                archive.add(service.home / name, name)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
