"""The benchmark of the start: what it counts as a start, a first run and later ones."""

from __future__ import annotations

from benchmarks.start import figures, ratios


def turn(answer_s: float, ready_s: float, *runs_s: float) -> list[dict[str, float]]:
    start = {"first_answer_s": answer_s, "cluster_ready_s": ready_s}
    return [start, *({"post_to_first_step_s": run_s} for run_s in runs_s)]


def test_the_first_run_after_a_start_and_later_ones_are_kept_apart() -> None:
    found = figures([turn(8, 10, 5, 3, 4), turn(6, 12, 7, 1, 2), turn(9, 11, 6, 9, 9)])
    assert found["serve"]["first_answer_s"]["median"] == 8
    assert found["first_run"]["post_to_first_step_s"]["values"] == [5, 7, 6]
    assert found["later_runs"]["post_to_first_step_s"]["values"] == [3, 4, 1, 2, 9, 9]
    assert "later_runs" not in figures([turn(8, 10, 5)])


def test_a_ratio_is_that_of_medians_after_over_before() -> None:
    before, after = figures([turn(10, 10, 8, 8)]), figures([turn(4, 9, 2, 4)])
    assert ratios(before, after) == {
        "serve.first_answer_s": 0.4,
        "serve.cluster_ready_s": 0.9,
        "first_run.post_to_first_step_s": 0.25,
        "later_runs.post_to_first_step_s": 0.5,
    }
