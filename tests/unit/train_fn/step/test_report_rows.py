"""Reports of a step as rows of bytes, and the totals that all ranks compute of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from train_fn.samples.ledger import Count
from train_fn.step.report import ReportRows, StepReport, StepTotals, Votes, totals_of


def report(
    step: int, number: int, *losses: float, fingerprint: int = 0, **votes: Any
) -> StepReport:
    samples = Count(10 * len(losses), 0, 0, (1 << 63) + number)
    numbers = tuple(each for loss in losses for each in (loss, 10.0))
    return StepReport(step, samples, numbers, fingerprint, Votes(**votes))


def sent(*reports: StepReport) -> StepTotals:
    code = ReportRows(max(len(each.numbers) for each in reports))
    return totals_of([code.decode(code.encode(each)) for each in reports])


def test_a_report_arrives_as_it_was() -> None:
    of_loop = report(
        2**40, 7, 0.1, math.inf, stop="pause", checkpoint_step=2**41, own_s=0.25, fingerprint=2**36
    )
    of_a_user_s = StepReport(7, num_updates=2**33, has_ended=True, names_hash=2**56, batch=2**60)
    code = ReportRows(10)
    for each in (of_loop, of_a_user_s):
        assert code.decode(code.encode(each)) == each
        assert len(code.encode(each)) == code.num_bytes
    assert code.decode(bytes(code.num_bytes)) is None, "a rank that sent nothing"


def test_totals_do_not_depend_on_who_ran_what() -> None:
    losses = [0.1, 1e16, -1e16, 0.3]
    one = sent(report(4, 0, *losses))
    two = sent(report(4, 0, *losses[:3]), report(4, 0, losses[3]))
    assert one.loss_sum == two.loss_sum == math.fsum(losses) != sum(losses)
    assert (one.weight, one.fault(4, 40)) == (two.weight, two.fault(4, 40)) == (40.0, None)


def test_votes_of_any_rank_reach_all() -> None:
    totals = sent(
        report(4, 1, 0.5, save=True, checkpoint_step=3),
        report(4, 2, 0.5, stop="cancel", has_news=True),
    )
    facts = totals.facts
    assert (facts.stop, facts.save, facts.checkpoint_step) == ("cancel", True, 3)
    assert facts.num_with_news == 1
    assert not totals.are_ranks_apart
    assert totals.counted() == Count(20, 0, 0, 3), "hashes are added modulo 2**64"


def test_the_gate_stays_shut_without_every_rank_at_this_step() -> None:
    reports = [report(4, 0, 0.5), report(4, 0, 0.5)]
    assert "1 of 2 ranks" in str(totals_of([reports[0], None]).fault(4, 20))
    assert "1 of 2 ranks" in str(sent(reports[0], report(5, 0, 0.5)).fault(4, 20))
    assert "accounted for 20" in str(sent(*reports).fault(4, 21))


@pytest.mark.parametrize("losses", [(math.nan, 1.0), (math.inf, -math.inf), (1.0, math.inf)])
def test_the_rank_of_a_loss_that_is_not_finite_is_known(losses: tuple[float, float]) -> None:
    totals = sent(report(4, 0, 0.5), report(4, 0, *losses))
    assert (totals.facts.num_nonfinite, totals.nonfinite_rank) == (1, 1)
    assert not math.isfinite(totals.loss_sum)


def test_ranks_whose_last_step_left_other_bits_are_seen() -> None:
    totals = sent(report(4, 0, 0.5, fingerprint=7), report(4, 0, 0.5, fingerprint=8))
    assert totals.are_ranks_apart and totals.fingerprints() == [(7.0,), (8.0,)]
