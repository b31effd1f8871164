"""Reports of a step, as rows of bytes and as sums, and the totals that all ranks make of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_fn.samples.ledger import Count, difference, sample_hash
from train_fn.step.peers import Peers
from train_fn.step.report import NO_VOTES, ReportRows, StepReport, StepTotals, Votes, totals_of
from train_fn.step.report_sums import ReportSums, expect

pytestmark = pytest.mark.own_process

ALONE = Peers(0, 1, torch.device("cpu"))


def report(
    step: int, number: int, *losses: float, fingerprint: int = 0, **votes: Any
) -> StepReport:
    samples = Count(10 * len(losses), 0, 0, (1 << 63) + number)
    numbers = tuple(each for loss in losses for each in (loss, 10.0))
    return StepReport(step, samples, numbers, fingerprint, Votes(**votes))


def sent(*reports: StepReport) -> StepTotals:
    code = ReportRows(max(len(each.numbers) for each in reports))
    return totals_of([code.decode(code.encode(each)) for each in reports])


def test_votes_of_any_rank_reach_all() -> None:
    totals = sent(
        report(4, 1, 0.5, save=True, checkpoint_step=3),
        report(4, 2, 0.5, stop="cancel"),
    )
    facts = totals.facts
    assert (facts.stop, facts.save, facts.checkpoint_step) == ("cancel", True, 3)
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


# ---------------------------------------------------------------- as sums


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def carried(report: ReportSums, votes: Votes = NO_VOTES) -> StepTotals:
    """What a rank that is alone hears of its own numbers."""
    weight = torch.nn.Parameter(torch.tensor(2.0))
    report.backward(3 * weight, votes)
    assert weight.grad == 3, "the loss is what it was"
    return report.take()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2**64 - 1)), min_size=1, max_size=4))
def test_every_step_s_totals_are_its_own(steps: list[tuple[int, int]]) -> None:
    """Also where its sums lie elsewhere in memory than those before: those are still there, and say
    what they said."""
    report = ReportSums(ALONE)
    for number, (num_missing, hashed) in enumerate(steps):
        counted = Count(50 - num_missing, 0, num_missing, hashed)
        report.begin(number)
        report.add(torch.tensor(float(number)), 50, counted)
        found = carried(report, Votes(checkpoint_step=number))
        assert (found.counted(), found.loss_sum, found.weight, found.facts.checkpoint_step) == (
            counted,
            number,
            50,
            number,
        )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=6))
def test_what_is_told_is_what_was_yielded_not_what_was_expected(
    planned: list[int], yielded: list[int]
) -> None:
    planned_hash, yielded_hash = (sample_hash(0, 3, indices(*each)) for each in (planned, yielded))
    report = ReportSums(ALONE)
    report.begin(3, expect(Count(len(planned), 0, 0, planned_hash), 1))
    report.add(
        torch.tensor(1.0), 1, difference(0, 3, indices(*planned), indices(*yielded), planned_hash)
    )
    counted = carried(report).counted()
    assert (counted.num_samples, counted.sample_hash) == (len(yielded), yielded_hash)
    assert counted.num_samples - counted.num_unexpected == len(planned) - counted.num_missing
    assert (counted.num_unexpected, counted.num_missing) == (0, 0) or sorted(planned) != sorted(
        yielded
    )


@given(
    st.integers(1, 5000),
    st.integers(0, 2**32),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
)
def test_totals_of_any_number_of_ranks_are_exact(
    world_size: int, weight: int, hashes: list[int]
) -> None:
    """Added up as DDP does it: float32, each rank's numbers divided by the number of ranks
    first."""
    counts = [
        Count(3 + rank, rank, 2 * rank, sample_hash)
        for rank, sample_hash in enumerate(hashes[:world_size])
    ]
    sent = []
    for rank, counted in enumerate(counts):
        report = ReportSums(Peers(rank, world_size, torch.device("cpu")))
        report.add(torch.tensor(float("nan") if rank == 1 else 0.5), weight, counted)
        sent.append(
            report.gradient(Votes("cancel", 2**40 * (rank == 0))).numpy()
            * np.float32(1 / world_size)
        )
    sums = np.zeros_like(sent[0])
    for rank in range(world_size):
        sums += sent[rank % len(sent)]
    found = report.totals_of(sums.data)
    facts = found.facts
    shares = [len(range(rank, world_size, len(sent))) for rank in range(len(sent))]
    assert found.weight == world_size * weight
    assert found.counted() == sum(
        (
            Count(
                *(share * number for number in (c.num_samples, c.num_unexpected, c.num_missing)),
                c.sample_hash * share % 2**64,
            )
            for share, c in zip(shares, counts, strict=True)
        ),
        Count(),
    )
    assert facts.num_nonfinite == (shares[1] if len(sent) > 1 else 0)
    assert found.nonfinite_rank == (1 if facts.num_nonfinite == 1 else None)
    assert (facts.stop, facts.checkpoint_step, facts.save) == ("cancel", 2**40 * shares[0], False)


def test_a_weight_that_is_no_whole_number_or_negative_is_carried_too() -> None:
    for weights in ([0.25, 3.5], [5, -7.0], [torch.tensor(2.75)], [2.0**60]):
        report = ReportSums(ALONE)
        for weight in weights:
            report.add(torch.tensor(1.0), weight)
        assert carried(report).weight == float(sum(weights))


@given(
    st.lists(st.one_of(st.integers(0, 2**40), st.floats(-1e6, 1e6)), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_device_adds_losses_and_weights_up_as_the_host_does(
    weights: list[float], as_tensors: bool
) -> None:
    host, device = ReportSums(ALONE), ReportSums(ALONE)
    for weight in weights:
        of_task = torch.tensor(weight, dtype=torch.float64) if as_tensors else weight
        host.add(torch.tensor(0.5), of_task)
        device._on_device.append((torch.tensor(0.5), of_task))
    numbers = device._numbers_on_device()
    assert numbers.tolist() == host.gradient()[: len(numbers)].tolist()
