"""The ledger tells what the loaders yielded: exactly, in any order of ranks, and not what they
should have."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_fn.samples.ledger import Count, Ledger, difference, sample_hash

pytestmark = pytest.mark.own_process


def indices(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def count(epoch: int, step: int, expected: np.ndarray, yielded: np.ndarray) -> Count:
    hashed = sample_hash(epoch, step, expected)
    planned = Count(len(expected), 0, 0, hashed)
    return planned + (difference(epoch, step, expected, yielded, hashed) or Count())


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
        for step, hashed in enumerate(hashes):
            ledger.commit(step, Count(1, 0, 0, hashed))
    assert first.state_dict()["chain"] != second.state_dict()["chain"]
    halfway = Ledger()
    halfway.commit(0, Count(1, 0, 0, 1))
    resumed.load_state_dict(halfway.state_dict())
    resumed.commit(1, Count(1, 0, 0, 2))
    assert resumed.state_dict() == first.state_dict()


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
