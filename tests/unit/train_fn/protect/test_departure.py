"""What a rank keeps of a protected loop that broke, and how optimizer steps of a commit count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train_fn.protect.commits import Updates
from train_fn.protect.training import state_to_keep
from train_fn.state.run_state import StateCopies

WHOLE = {"step": 7}
NEWEST, OLDER = {"step": 7, "of": "newest"}, {"step": 6, "of": "older"}


def training(
    *,
    fault: str | None = None,
    complete: bool = True,
    regular: bool = True,
    copies: Any = None,
    missing: str | None = None,
) -> Any:
    updates = SimpleNamespace(is_regular=regular, of_commit=2, usual=1)
    state = SimpleNamespace(step=7, complete=complete, last_committed=lambda: WHOLE)
    commits = SimpleNamespace(fault=fault, updates=updates)
    boundary = SimpleNamespace(problem=lambda: missing)
    return SimpleNamespace(commits=commits, copies=copies, state=state, boundary=boundary)


COPIES = SimpleNamespace(newest=NEWEST, older=OLDER)


@pytest.mark.parametrize(
    ("facts", "is_known", "expected"),
    [
        ({}, True, WHOLE),
        ({}, False, WHOLE),
        ({"complete": False}, True, "between two states"),
        ({"missing": "interrupted"}, True, "interrupted"),
        ({"missing": "interrupted", "copies": COPIES}, True, OLDER),
        ({"regular": False}, True, WHOLE),
        ({"regular": False}, False, "2 optimizer steps instead of 1"),
        ({"regular": False, "copies": COPIES}, False, "2 optimizer steps instead of 1"),
        ({"complete": False, "copies": COPIES}, True, NEWEST),
        ({"fault": "rank 1 differs"}, False, "did not make the same step: rank 1 differs"),
        ({"fault": "rank 1 differs", "copies": COPIES}, False, OLDER),
        ({"copies": SimpleNamespace(newest=None, older=None)}, True, "between two states"),
        (
            {"fault": "rank 1 differs", "copies": SimpleNamespace(newest=NEWEST, older=None)},
            False,
            "did not make the same step",
        ),
    ],
)
def test_only_a_state_that_every_rank_made_is_kept(
    facts: dict[str, Any], is_known: bool, expected: Any
) -> None:
    found = state_to_keep(training(**facts), is_known)
    assert expected in found if isinstance(expected, str) else found is expected


def test_a_shadow_is_written_beside_the_newest_one() -> None:
    weight = torch.zeros(2)
    copies = StateCopies(SimpleNamespace(state_dict=lambda: {"weight": weight}))  # type: ignore[arg-type]
    for value in (1.0, 2.0, 3.0):
        weight.fill_(value)
        copies.take()
    assert copies.newest is not None and copies.older is not None
    assert (copies.newest["weight"][0], copies.older["weight"][0]) == (3, 2)
    kept = copies.older
    weight.fill_(4.0)
    copies.renew()
    assert copies.newest["weight"][0] == 4 and copies.older is kept, "the older one stays"
    assert kept["weight"][0] == 2


def commit(updates: Updates, num_steps: int) -> bool:
    for _ in range(num_steps):
        updates.count()
    updates.commit()
    return updates.is_regular


def test_a_commit_is_regular_if_it_made_as_many_steps_as_the_first_that_all_agreed_on() -> None:
    updates = Updates(may_skip=False)
    assert commit(updates, 3), "nothing is usual yet"
    updates.agree()
    assert (updates.num, updates.of_commit, updates.usual) == (3, 3, 3)
    assert not commit(updates, 2) and not commit(updates, 0) and commit(updates, 3)
    commit(updates, 2)
    updates.agree()
    assert updates.usual == 3 and updates.num == 10, "the first one counts"


def test_a_gradient_scaler_may_skip_a_step() -> None:
    updates = Updates(may_skip=True)
    commit(updates, 0)
    updates.agree()
    assert updates.usual is None, "a skipped step says nothing of the usual number"
    commit(updates, 1)
    updates.agree()
    assert commit(updates, 0) and not commit(updates, 2)
