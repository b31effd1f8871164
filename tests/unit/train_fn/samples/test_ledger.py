"""The ledger tells what the loaders yielded: exactly, in any order of ranks, and not what they
should have."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_fn.samples.ledger import Count, Ledger, difference, sample_hashes
from train_fn.step.peers import Peers
from train_fn.step.report import NO_VOTES, StepTotals, Votes
from train_fn.step.report_sums import ReportSums, expect

pytestmark = pytest.mark.own_process

ALONE = Peers(0, 1, torch.device("cpu"))


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def count(epoch: int, step: int, expected: np.ndarray, yielded: np.ndarray) -> Count:
    hashes = sample_hashes([(epoch, step)], [expected]) if len(expected) else [0]
    planned = Count(len(expected), 0, 0, hashes[0])
    return planned + (difference(epoch, step, expected, yielded, hashes[0]) or Count())


def commit(ledger: Ledger, step: int, total: Count) -> None:
    ledger.commit(step, lambda: total)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(0, 59))
def test_how_ranks_share_a_batch_does_not_show(values: list[int], cut: int) -> None:
    whole = count(0, 3, indices(*values), indices(*values))
    parts = count(0, 3, indices(*values[:cut]), indices(*values[:cut])) + count(
        0, 3, indices(*values[cut:]), indices(*values[cut:])
    )
    assert whole == parts
    assert whole.num_samples == len(values)


def test_a_sample_that_is_not_the_expected_one_is_told() -> None:
    skipped = count(0, 0, indices(1, 2, 3), indices(1, 2))
    assert (skipped.num_unexpected, skipped.num_missing) == (0, 1)
    repeated = count(0, 0, indices(1, 2, 3), indices(1, 2, 2))
    assert (repeated.num_unexpected, repeated.num_missing) == (1, 1)
    other = count(0, 0, indices(1, 2, 3), indices(1, 2, 3, 9))
    assert (other.num_unexpected, other.num_missing) == (1, 0)
    swapped = count(0, 0, indices(1, 2, 3), indices(3, 2, 1))
    assert swapped == count(0, 0, indices(1, 2, 3), indices(1, 2, 3))


def test_the_hash_depends_on_sample_epoch_and_step() -> None:
    hashes = {
        count(epoch, step, indices(index), indices(index)).sample_hash
        for epoch in (0, 1)
        for step in (0, 1)
        for index in (0, 1)
    }
    assert len(hashes) == 8


def test_an_epoch_is_closed_with_its_counts() -> None:
    ledger = Ledger()
    commit(ledger, 0, Count(3, 0, 0, 17))
    commit(ledger, 1, Count(3, 1, 1, 18))
    closed = ledger.close_epoch()
    assert {name: closed[name] for name in ("samples", "used_once", "duplicates", "missing")} == {
        "samples": 6,
        "used_once": 5,
        "duplicates": 1,
        "missing": 1,
    }
    chain = ledger.state_dict()["chain"]
    commit(ledger, 2, Count(3, 0, 0, 17))
    assert ledger.state_dict()["samples"] == 3
    assert ledger.state_dict()["chain"] != chain
    assert ledger.close_epoch()["digest"] != closed["digest"]


def test_the_chain_depends_on_order_and_resumes() -> None:
    first, second, resumed = Ledger(), Ledger(), Ledger()
    for ledger, hashes in ((first, (1, 2)), (second, (2, 1))):
        for step, sample_hash in enumerate(hashes):
            commit(ledger, step, Count(1, 0, 0, sample_hash))
    assert first.state_dict()["chain"] != second.state_dict()["chain"]
    halfway = Ledger()
    commit(halfway, 0, Count(1, 0, 0, 1))
    resumed.load_state_dict(halfway.state_dict())
    commit(resumed, 1, Count(1, 0, 0, 2))
    assert resumed.state_dict() == first.state_dict()


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2), st.booleans()), max_size=200)
)
def test_steps_that_wait_to_be_entered_come_to_the_same(steps: list[tuple[int, int, bool]]) -> None:
    """Whoever asks in between, or resumes from what was told, hears and goes on with every step
    that was committed."""
    waiting, asked = Ledger(), Ledger()
    for step, (sample_hash, num_missing, ends_epoch) in enumerate(steps):
        total = Count(5 - num_missing, 0, num_missing, sample_hash)
        commit(waiting, step, total)
        commit(asked, step, total)
        saved = asked.state_dict()
        asked = Ledger()
        asked.load_state_dict(saved)
        if ends_epoch:
            assert waiting.close_epoch() == asked.close_epoch()
    assert waiting.state_dict() == asked.state_dict()


def test_the_chain_is_the_one_that_checkpoints_of_earlier_versions_hold() -> None:
    """``everstep ledger 1``: each link is the hash of the last one and the step's line."""
    ledger = Ledger()
    chain = hashlib.sha256(b"everstep ledger 1").hexdigest()
    for step in range(100):
        commit(ledger, step, Count(4, 1, 2, 2**63 + step))
        chain = hashlib.sha256(f"{chain} {step} 4 {2**63 + step:016x} 1 2".encode()).hexdigest()
    assert ledger.state_dict() == {
        "chain": chain,
        "epoch_chain": chain,
        "samples": 400,
        "used_once": 300,
        "duplicates": 100,
        "missing": 200,
    }


def carried(report: ReportSums, votes: Votes = NO_VOTES) -> StepTotals:
    """What a rank that is alone hears of its own numbers."""
    weight = torch.nn.Parameter(torch.tensor(2.0))
    report.backward(3 * weight, votes)
    assert weight.grad == 3, "the loss is what it was"
    return report.take()


@given(st.integers(0, 2**64 - 1), st.floats(-1e6, 1e6))
def test_totals_carry_every_bit_of_the_hash(sample_hash: int, loss: float) -> None:
    report = ReportSums(ALONE)
    report.add(torch.tensor(loss, dtype=torch.float64), 5, Count(5, 1, 2, sample_hash))
    found = carried(report, Votes("pause", 40, save=True))
    facts = found.facts
    assert found.counted() == Count(5, 1, 2, sample_hash)
    assert (found.loss_sum, found.weight, facts.stop, facts.checkpoint_step) == (
        np.float32(loss),
        5,
        "pause",
        40,
    )
    assert facts.num_nonfinite == 0 and facts.save


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2**64 - 1)), min_size=1, max_size=4))
def test_every_step_s_totals_are_its_own(steps: list[tuple[int, int]]) -> None:
    """Also where its sums lie elsewhere in memory than those before: those are still there, and say
    what they said."""
    report = ReportSums(ALONE)
    for number, (num_missing, sample_hash) in enumerate(steps):
        counted = Count(50 - num_missing, 0, num_missing, sample_hash)
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
    (planned_hash,) = sample_hashes([(0, 3)], [indices(*planned)])
    (yielded_hash,) = sample_hashes([(0, 3)], [indices(*yielded)]) if yielded else (0,)
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


def test_totals_name_the_rank_with_a_loss_that_is_not_finite() -> None:
    report = ReportSums(ALONE)
    report.add(torch.tensor(float("inf")), torch.tensor(3))
    found = carried(report)
    assert (found.facts.num_nonfinite, found.nonfinite_rank, found.weight) == (1, 0, 3)


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
