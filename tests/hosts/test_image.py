"""Every RUN line of the Dockerfile does what it says, in a Debian root without a container
engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.try_dockerfile import CHECKS
from tests.hosts.compose_file import REPOSITORY, is_possible

PIP = (
    "/etc/pip.conf",
    "/etc/ssl/certs",
    *(path for path in os.environ.get("PIP_FIND_LINKS", "").split() if path.startswith("/")),
)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (is_possible() and shutil.which("debootstrap")),
    reason="needs root and Debian's debootstrap",
)
def test_the_image_for_cpus_is_made_and_its_programs_answer(tmp_path: Path) -> None:
    binds = [word for path in PIP if Path(path).exists() for word in ("--bind", path)]
    index = os.environ.get("EVERSTEP_TEST_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    words = [
        "--target",
        "cpu",
        "--keep-base",
        str(tmp_path),
        *binds,
        "--build-arg",
        f"TORCH_INDEX={index}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.try_dockerfile", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(f"==> {check}" in done.stdout for check in CHECKS)
