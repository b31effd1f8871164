"""The ledger tells what the loaders yielded: exactly, in any order of ranks, and not what they should have."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_fn.collectives import Peers
from train_fn.ledger import Count, Ledger, sample_hashes
from train_fn.ledger import count as compare
from train_fn.step_totals import Carrier, StepSum, StepTotals, Told, totals_of

ALONE = Peers(0, 1, torch.device("cpu"))


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def count(epoch: int, step: int, expected: np.ndarray, yielded: np.ndarray) -> Count:
    hashes = sample_hashes([(epoch, step)], [expected]) if len(expected) else [0]
    return compare(epoch, step, expected, yielded, hashes[0])


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
        count(epoch, step, indices(index), indices(index)).sample_hash for epoch in (0, 1) for step in (0, 1) for index in (0, 1)
    }
    assert len(hashes) == 8


def test_an_epoch_is_closed_with_its_counts() -> None:
    ledger = Ledger()
    ledger.commit(0, Count(3, 0, 0, 17))
    ledger.commit(1, Count(3, 1, 1, 18))
    closed = ledger.close_epoch()
    assert {name: closed[name] for name in ("samples", "used_once", "duplicates", "missing")} == {
        "samples": 6,
        "used_once": 5,
        "duplicates": 1,
        "missing": 1,
    }
    chain = ledger.state_dict()["chain"]
    ledger.commit(2, Count(3, 0, 0, 17))
    assert ledger.state_dict()["samples"] == 3
    assert ledger.state_dict()["chain"] != chain
    assert ledger.close_epoch()["digest"] != closed["digest"]


def test_the_chain_depends_on_order_and_resumes() -> None:
    first, second, resumed = Ledger(), Ledger(), Ledger()
    for ledger, hashes in ((first, (1, 2)), (second, (2, 1))):
        for step, sample_hash in enumerate(hashes):
            ledger.commit(step, Count(1, 0, 0, sample_hash))
    assert first.state_dict()["chain"] != second.state_dict()["chain"]
    halfway = Ledger()
    halfway.commit(0, Count(1, 0, 0, 1))
    resumed.load_state_dict(halfway.state_dict())
    resumed.commit(1, Count(1, 0, 0, 2))
    assert resumed.state_dict() == first.state_dict()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2), st.booleans()), max_size=200))
def test_steps_that_wait_to_be_entered_come_to_the_same(steps: list[tuple[int, int, bool]]) -> None:
    """Whoever asks in between, or resumes from what was told, hears and goes on with every step that was committed."""
    waiting, asked = Ledger(), Ledger()
    for step, (sample_hash, num_missing, ends_epoch) in enumerate(steps):
        total = Count(5 - num_missing, 0, num_missing, sample_hash)
        waiting.commit(step, total)
        asked.commit(step, total)
        told = asked.state_dict()
        asked = Ledger()
        asked.load_state_dict(told)
        if ends_epoch:
            assert waiting.close_epoch() == asked.close_epoch()
    assert waiting.state_dict() == asked.state_dict()


def test_the_chain_is_the_one_that_checkpoints_of_earlier_versions_hold() -> None:
    """``everstep ledger 1``: each link is the hash of the last one and the step's line."""
    ledger = Ledger()
    chain = hashlib.sha256(b"everstep ledger 1").hexdigest()
    for step in range(100):
        ledger.commit(step, Count(4, 1, 2, 2**63 + step))
        chain = hashlib.sha256(f"{chain} {step} 4 {2**63 + step:016x} 1 2".encode()).hexdigest()
    assert ledger.state_dict() == {
        "chain": chain,
        "epoch_chain": chain,
        "samples": 400,
        "used_once": 300,
        "duplicates": 100,
        "missing": 200,
    }


def carried(told: Told) -> StepTotals:
    """What a rank that is alone hears of its own numbers."""
    carrier, weight = Carrier(ALONE), torch.nn.Parameter(torch.tensor(2.0))
    carrier.backward(3 * weight, told)
    assert weight.grad == 3, "the loss is what it was"
    return carrier.take()


@given(st.integers(0, 2**64 - 1), st.floats(-1e6, 1e6))
def test_totals_carry_every_bit_of_the_hash(sample_hash: int, loss: float) -> None:
    total = StepSum(ALONE)
    total.add(torch.tensor(loss, dtype=torch.float64), 5, Count(5, 1, 2, sample_hash))
    found = carried(total.numbers("pause", 40, save=True))
    assert found.counted == Count(5, 1, 2, sample_hash)
    assert (found.loss_sum, found.weight, found.stop, found.checkpoint_step) == (np.float32(loss), 5, "pause", 40)
    assert found.num_nonfinite == 0 and found.save


def test_totals_name_the_rank_with_a_loss_that_is_not_finite() -> None:
    total = StepSum(ALONE)
    total.add(torch.tensor(float("inf")), torch.tensor(3), Count())
    found = carried(total.numbers(None, 0))
    assert (found.num_nonfinite, found.nonfinite_rank, found.weight) == (1, 0, 3)


@given(st.integers(1, 5000), st.integers(0, 2**32), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_totals_of_any_number_of_ranks_are_exact(world_size: int, weight: int, hashes: list[int]) -> None:
    """Added up as DDP does it: float32, each rank's numbers divided by the number of ranks first."""
    counts = [Count(3 + rank, rank, 2 * rank, sample_hash) for rank, sample_hash in enumerate(hashes[:world_size])]
    told = []
    for rank, counted in enumerate(counts):
        peers = Peers(rank, world_size, torch.device("cpu"))
        total = StepSum(peers)
        total.add(torch.tensor(float("nan") if rank == 1 else 0.5), weight, counted)
        gradient = Carrier(peers).gradient(total.numbers("cancel", 2**40 * (rank == 0)))
        told.append(gradient.numpy() * np.float32(1 / world_size))
    sums = np.zeros_like(told[0])
    for rank in range(world_size):
        sums += told[rank % len(told)]
    found = totals_of(memoryview(sums.tobytes()), world_size)
    shares = [len(range(rank, world_size, len(told))) for rank in range(len(told))]
    assert found.weight == world_size * weight
    assert found.counted == sum(
        (
            Count(*(share * number for number in (c.num_samples, c.num_unexpected, c.num_missing)), c.sample_hash * share % 2**64)
            for share, c in zip(shares, counts, strict=True)
        ),
        Count(),
    )
    assert found.num_nonfinite == (shares[1] if len(told) > 1 else 0)
    assert found.nonfinite_rank == (1 if found.num_nonfinite == 1 else None)
    assert (found.stop, found.checkpoint_step, found.save) == ("cancel", 2**40 * shares[0], False)


def test_a_weight_that_is_no_whole_number_or_negative_is_carried_too() -> None:
    for weights in ([0.25, 3.5], [5, -7.0], [torch.tensor(2.75)], [2.0**60]):
        total = StepSum(ALONE)
        for weight in weights:
            total.add(torch.tensor(1.0), weight, Count())
        assert carried(total.numbers(None, 0)).weight == float(sum(weights))


@given(st.lists(st.one_of(st.integers(0, 2**40), st.floats(-1e6, 1e6)), min_size=1, max_size=3), st.booleans())
def test_a_device_adds_losses_and_weights_up_as_the_host_does(weights: list[float], as_tensors: bool) -> None:
    total = StepSum(ALONE)
    for weight in weights:
        total.add(torch.tensor(0.5), torch.tensor(weight, dtype=torch.float64) if as_tensors else weight, Count())
    told = total._of_losses_on_device()
    assert told.tolist() == Carrier(ALONE).gradient(total.numbers(None, 0))[: len(told)].tolist()
