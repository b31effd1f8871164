"""Code of users keeps what it likes in a process. A run with a kill is the same, bit by bit, as its
twin whose ranks all begin anew in fresh processes: in a process that stays nothing may be stale."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from everstep.spec.run_spec import RunSpec
from tests.integration import habits
from tests.integration.ranks import Job, Outcome, build_ahead_of, make_run_dir
from tests.integration.staying_ranks import StayingRanks, staying_ranks
from tests.integration.test_exactness import assert_same
from tests.integration.test_exactness_elastic import Bits
from tests.integration.test_exactness_precision import own_task_spec
from tests.integration.test_staying import error_of, require_done
from tests.support.two_groups import only_in_chaos
from train_fn.errors import AsksForPeers
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.staying import falls_back
from train_fn.recovery.verdict import judge

KILLED_AT = 4
"""Steps done: in the second of three epochs."""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[StayingRanks]:
    with staying_ranks(tmp_path) as found:
        yield found


def spec() -> RunSpec:
    raw = own_task_spec(0).model_dump(mode="json")
    return RunSpec.model_validate(raw | {"train": raw["train"] | {"epochs": 3}})


class Twin:
    """A run of two ranks, one of which is killed."""

    def __init__(
        self, ranks: StayingRanks, tmp_path: Path, names: str, *, in_process: bool
    ) -> None:
        run_dir = make_run_dir(tmp_path, "run_staying" if in_process else "run_fresh")
        setup = f"tests.integration.habits:{names}"

        def job(attempt: int, **fault: object) -> Job:
            return Job(
                run_dir,
                spec(),
                2,
                attempt,
                setup=setup,
                in_process=in_process,
                **fault,  # type: ignore[arg-type]
            )

        mine = "ABC" if in_process else "XYZV"
        first = ranks.run(job(1, killed=(0, KILLED_AT)), mine[:2])
        assert first[0].exit_code == -9 and error_of(first[1]).collateral
        self.stayed = error_of(first[1]).stays_at == KILLED_AT
        # the survivor becomes rank 0, where it stays
        self.outcomes: list[Outcome] = [*first]
        second = f"{mine[1]}{mine[2]}" if self.stayed else "PQ" if in_process else mine[2:]
        self.outcomes += ranks.run(job(2), second)
        require_done(self.outcomes[2:])
        self.bits = Bits(run_dir, *self.outcomes)


def require_equal(ranks: StayingRanks, tmp_path: Path, names: str) -> bool:
    """Compare a run with its twin. Return whether its survivor has stayed in its process."""
    staying = Twin(ranks, tmp_path, names, in_process=True)
    fresh = Twin(ranks, tmp_path, names, in_process=False)
    assert staying.bits.losses == fresh.bits.losses, names
    assert staying.bits.evaluations == fresh.bits.evaluations, names
    assert_same(staying.bits.files, fresh.bits.files)
    return staying.stayed


def stays(names: str) -> bool:
    return set(names.split("__")) <= habits.KNOWN


TELLING = (
    *("cached_group", "own_group", "rank_of_build", "global_count", "deep_count", "own_thread"),
    *("forward_hook", "teacher", "replaced_method", "of_weight", "graph"),
    "own_counter",
)
HIDDEN = (
    *(
        *habits.COUNTS_IN,
        *habits.KEPT,
        *habits.ITERATORS,
        *habits.CHANGES,
        *habits.REBUILDS,
        *habits.BUILDS,
    ),
    *("hook_of_optimizer", "teacher", "of_weight"),
)
"""Those with which a run once was another one, or whose like were."""


@pytest.mark.parametrize(
    "names",
    [
        "__".join(sorted(habits.KNOWN)),
        *TELLING[::3],
        *only_in_chaos(*TELLING[1::3], *TELLING[2::3]),
    ],
)
def test_a_run_with_a_kill_is_that_of_fresh_processes(
    names: str, ranks: StayingRanks, tmp_path: Path
) -> None:
    assert require_equal(ranks, tmp_path, names) == stays(names)


@pytest.mark.chaos
@pytest.mark.parametrize("names", HIDDEN)
def test_what_is_hidden_decides_no_step(names: str, ranks: StayingRanks, tmp_path: Path) -> None:
    assert not require_equal(ranks, tmp_path, names)


def test_a_group_that_ranks_have_left_serves_nobody(ranks: StayingRanks, tmp_path: Path) -> None:
    """A task has found its group where nobody watches, and uses it after a hand-over."""
    run_dir, setup = make_run_dir(tmp_path), "tests.integration.habits:hidden_group"
    first = Job(run_dir, spec(), 2, setup=setup, in_process=True, stopped=("pause", KILLED_AT))
    require_done(ranks.run(first, "AB"))
    began = time.monotonic()
    found = ranks.run(replace(first, attempt=2, stopped=None), "AB")
    assert time.monotonic() - began < 30, "they do not wait for each other there"
    reports = [RankReport(rank, "node", 1, error=error_of(each)) for rank, each in enumerate(found)]
    judgement = judge(Evidence(2, 0.0, tuple(reports), error_of(found[0]).step))
    assert (judgement.verdict, judgement.first_rank, judgement.node_id) == ("unknown", None, None)
    assert falls_back(judgement, [], has_stayed=True, has_stepped=True), "nobody is charged"
    require_done(ranks.run(replace(first, attempt=3, stopped=None), "CD"))


def at_random(number: int) -> str:
    """Return the names of one to four habits; of an even number, of those with which it stays."""
    draw = random.Random(number)
    names = sorted(habits.HABITS if number % 2 else habits.KNOWN)
    return "__".join(draw.sample(names, draw.randint(1, 4)))


NUM_TASKS = int(os.environ.get("EVERSTEP_HABITS", "300"))


@pytest.mark.chaos
@pytest.mark.parametrize("number", range(NUM_TASKS))
def test_tasks_with_habits_at_random(number: int, ranks: StayingRanks, tmp_path: Path) -> None:
    names = at_random(number) if number >= len(habits.HABITS) else list(habits.HABITS)[number]
    assert require_equal(ranks, tmp_path, names) == stays(names), names


@pytest.mark.parametrize("habit", ["own_group", *only_in_chaos("guarded_barrier", "rank_of_build")])
def test_what_asks_for_peers_is_not_built_ahead_and_not_beside_others_that_have_built(
    habit: str, ranks: StayingRanks, tmp_path: Path
) -> None:
    run_dir, setup = make_run_dir(tmp_path), f"tests.integration.habits:{habit}"
    alone = Job(run_dir, spec(), 1, setup=setup, in_process=True)
    ahead = ranks.call("A", partial(refusal_of, alone), alone)
    assert "asks torch.distributed for its place" in ahead and "habits.py, line" in ahead
    plain = Job(run_dir, spec(), 1, setup="tests.integration.trainees:regression", in_process=True)
    ranks.call("B", partial(build_ahead_of, plain), plain)
    found = ranks.run(replace(alone, world_size=2), "CB")
    assert error_of(found[0]).type == AsksForPeers.__name__ and error_of(found[1]).collateral


def refusal_of(job: Job) -> str:
    try:
        build_ahead_of(job)
    except AsksForPeers as exc:
        return str(exc)
    return "it was built"
