"""What ranks send about a step, and the totals that all of them compute."""

from __future__ import annotations

import math
from typing import Any

import pytest

from train_fn.elastic.message import Header, HeaderCode, totals_of
from train_fn.samples.ledger import Count
from train_fn.step.totals import StepTotals


def rank_header(step: int, number: int, *losses: float, **votes: Any) -> Header:
    samples = Count(10 * len(losses), 0, 0, (1 << 63) + number)
    return Header(step, samples, [(loss, 10.0) for loss in losses], **votes)


def sent(*headers: Header) -> StepTotals:
    code = HeaderCode(max(len(header.micro_batches) for header in headers))
    return totals_of([code.decode(code.encode(header)) for header in headers])


def test_a_header_arrives_as_it_was() -> None:
    header = rank_header(
        2**40, 7, 0.1, math.inf, stop="pause", checkpoint_step=2**41, own_s=0.25, fingerprint=2**36
    )
    code = HeaderCode(5)
    assert code.decode(code.encode(header)) == header
    assert len(code.encode(header)) == code.num_bytes
    assert code.decode(bytes(code.num_bytes)) is None, "a rank that sent nothing"


def test_totals_do_not_depend_on_who_ran_what() -> None:
    losses = [0.1, 1e16, -1e16, 0.3]
    one = sent(rank_header(4, 0, *losses))
    two = sent(rank_header(4, 0, *losses[:3]), rank_header(4, 0, losses[3]))
    assert one.loss_sum == two.loss_sum == math.fsum(losses) != sum(losses)
    assert (one.weight, one.fault(4, 40)) == (two.weight, two.fault(4, 40)) == (40.0, None)


def test_votes_of_any_rank_reach_all() -> None:
    totals = sent(
        rank_header(4, 1, 0.5, save=True, checkpoint_step=3),
        rank_header(4, 2, 0.5, stop="cancel", has_news=True),
    )
    facts = totals.facts
    assert (facts.stop, facts.save, facts.checkpoint_step) == ("cancel", True, 3)
    assert facts.num_with_news == 1
    assert not totals.are_ranks_apart
    assert totals.counted() == Count(20, 0, 0, 3), "hashes are added modulo 2**64"


def test_the_gate_stays_shut_without_every_rank_at_this_step() -> None:
    headers = [rank_header(4, 0, 0.5), rank_header(4, 0, 0.5)]
    assert "1 of 2 ranks" in str(totals_of([headers[0], None]).fault(4, 20))
    assert "1 of 2 ranks" in str(sent(headers[0], rank_header(5, 0, 0.5)).fault(4, 20))
    assert "accounted for 20" in str(sent(*headers).fault(4, 21))


@pytest.mark.parametrize("losses", [(math.nan, 1.0), (math.inf, -math.inf), (1.0, math.inf)])
def test_the_rank_of_a_loss_that_is_not_finite_is_known(losses: tuple[float, float]) -> None:
    totals = sent(rank_header(4, 0, 0.5), rank_header(4, 0, *losses))
    assert (totals.facts.num_nonfinite, totals.nonfinite_rank) == (1, 1)
    assert not math.isfinite(totals.loss_sum)


def test_ranks_whose_last_step_left_other_bits_are_seen() -> None:
    totals = sent(rank_header(4, 0, 0.5, fingerprint=7), rank_header(4, 0, 0.5, fingerprint=8))
    assert totals.are_ranks_apart and totals.fingerprints() == [(7.0,), (8.0,)]
