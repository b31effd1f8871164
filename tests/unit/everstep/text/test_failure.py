"""What is said of a failure, in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from everstep.text.failure import plain

IN_RAY = "Some common causes include: (1) the process was killed by the OOM killer"


@pytest.mark.parametrize(
    "causes",
    [
        f"{IN_RAY} due to high memory usage, (2) ray stop --force was called. If the process was "
        "killed by the kernel OOM killer, consider enabling resource isolation.",
        "There are some potential root causes. (1) The process is killed by SIGKILL.",
    ],
)
def test_what_may_be_the_cause_of_any_death_is_left_out(causes: str) -> None:
    assert plain(f"code 2. End of file. {causes}\n\tpid: 101") == "code 2. End of file.\n\tpid: 101"


def test_the_installed_ray_says_so() -> None:
    raylet = Path(ray.__path__[0], "core/src/ray/raylet/raylet")
    assert IN_RAY.encode() in raylet.read_bytes()
