"""What is said of a failure, in plain words."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import ray

from everstep.text.failure import evidence_items, plain
from everstep.wire import Failure, Verdict

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


def test_of_a_large_group_the_evidence_names_those_that_did_not_merely_follow() -> None:
    ranks = [{"rank": rank, "state": "collateral"} for rank in range(10_000)]
    ranks[7_000]["state"], ranks[9_000]["state"] = "died", "left"
    text = dict(evidence_items(_failure(ranks)))["ranks"]
    assert text.startswith("rank: 7000\nstate: died\nrank: 0\n")
    assert text.endswith("\nand 9968 more ranks: 9967 collateral, 1 left")
    assert text.count("rank: ") == 32
    few = dict(evidence_items(_failure(ranks[:32])))["ranks"]
    assert few.count("rank: ") == 32 and "more" not in few


def _failure(ranks: list[dict[str, object]]) -> Failure:
    return Failure(
        at=datetime(2026, 1, 1, tzinfo=UTC),
        attempt=1,
        verdict=Verdict.WORKER_LOST,
        first_rank=7000,
        node_id="node",
        step=7,
        exception=None,
        evidence={"ranks": ranks},
        action="restart",
        budget="system",
        steps_lost=None,
        detect_s=None,
        recovery_s=None,
        world_size_before=None,
        world_size_after=None,
    )
