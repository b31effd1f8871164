"""A wrong clock for the processes of a host: the kernel has one time of day for all namespaces."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.host import Host

SOURCE = Path(__file__).with_name("skewed_clock.c")


def is_possible() -> bool:
    """Whether there is a C compiler to make the library with."""
    return shutil.which("cc") is not None


@contextlib.contextmanager
def clock_library() -> Iterator[Path]:
    """The library of ``skewed_clock.c``, at a path that hosts see too: their ``/tmp`` is their
    own."""
    directory = Path(tempfile.mkdtemp(prefix="everstep-clock-", dir="/var/tmp"))
    try:
        directory.chmod(0o755)
        library = directory / "skewed_clock.so"
        subprocess.run(
            ["cc", "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-o", library, SOURCE, "-ldl"],
            check=True,
        )
        yield library
    finally:
        shutil.rmtree(directory)


def wrong_clock(library: Path, ahead_s: int) -> dict[str, str]:
    """Environment of processes whose clock is ``ahead_s`` ahead, or behind where negative."""
    return {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s)}


def jumping_clock(library: Path, file: Path) -> dict[str, str]:
    """Environment of processes whose clock is ahead by the seconds that the file says now. An
    embedded cluster inherits it."""
    return {"LD_PRELOAD": str(library), "PYTHON_CLOCK_FILE": str(file)}


def is_ahead(host: Host, ahead_s: int) -> bool:
    """Whether a process on the host reads a time of day that is so far ahead."""
    earliest = int(time.time()) + ahead_s
    read = int(host.run(["date", "+%s"]).stdout)
    return earliest <= read <= int(time.time()) + ahead_s
