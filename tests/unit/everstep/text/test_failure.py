"""What is said of a failure, in plain words."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import ray

from everstep.text.failure import plain, story
from everstep.wire import Event, Failure

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
    found = _failure(ranks)
    assert [rank["rank"] for rank in found.evidence["ranks"]] == [7_000, *range(31)]
    assert found.evidence["more_ranks"] == {"collateral": 9967, "left": 1}
    assert "other ranks: 0, 1, 2, " in "\n".join(story(found))
    assert " 29, 30 and 9967 more failed only because" in "\n".join(story(found))
    assert _failure(ranks[:32]).evidence == {"ranks": ranks[:32]}


def _failure(ranks: list[dict[str, object]]) -> Failure:
    data = {
        **{"verdict": "worker_lost", "first_rank": 7000, "step": 7, "evidence": {"ranks": ranks}},
        **{"action": "restart", "budget": "system"},
    }
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Failure.of(Event(seq=1, at=at, kind="failure", submission=1, attempt=1, data=data))
