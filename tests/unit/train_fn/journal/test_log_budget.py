"""A budget of log lines fills again, and reports once what it refused."""

from __future__ import annotations

from train_fn.journal.rank_log import BURST_CHARS, LogBudget


def test_a_budget_fills_again() -> None:
    now = 0.0
    budget = LogBudget(lambda: now)
    assert budget.take(BURST_CHARS, 1) and not budget.take(1000, 2)
    now = 0.01
    assert budget.take(1000, 1)
    assert (budget.notice() or "").startswith("2 lines") and budget.notice() is None
