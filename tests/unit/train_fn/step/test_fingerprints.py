"""Digests that ranks compare: any bit counts, every byte of the weights has its turn, and equal
tensors give equal digests whatever their layout."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from train_fn.step import fingerprints
from train_fn.step.fingerprints import (
    HEADER_BITS,
    MOST_PARTS,
    Fingerprints,
    parts_of,
    start_totals,
    total_on_device,
)
from train_fn.step.peers import Peers
from train_fn.step.report import StepTotals
from train_fn.step.report_sums import ReportSums

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 5000), max_size=20), st.integers(8, 4096))
def test_every_byte_is_in_one_part_and_parts_are_nearly_equal(
    sizes: list[int], part_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "PART_BYTES", part_bytes)
        parts = parts_of(sizes)
    assert 1 <= len(parts) <= MOST_PARTS
    seen = {number: np.zeros(size, np.int64) for number, size in enumerate(sizes)}
    for pieces in parts:
        for number, begin, end in pieces:
            seen[number][begin:end] += 1
    assert all((count == 1).all() for count in seen.values())
    words = [sum(-(-(end - begin) // 8) for _, begin, end in pieces) for pieces in parts]
    assert max(words) - min(words) <= 1


def model() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(3 * 3 * 5, 300), nn.PReLU())
    built.append(nn.Linear(300, 300))
    for parameter in built.parameters():
        parameter.grad = torch.randn_like(parameter)
    return built


@pytest.mark.parametrize("what", ["weights", "gradient"])
@pytest.mark.parametrize("bit", [0, 31])
def test_any_flipped_bit_changes_the_header(
    what: str, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "PART_BYTES", 1 << 12)
    sound = model()
    taken = Fingerprints(sound.parameters())
    num_parts = len(parts_of([each.nbytes for each in sound.parameters()]))
    assert num_parts > 1
    for number in range(len(list(sound.parameters()))):
        hurt = model()
        parameter = list(hurt.parameters())[number]
        tensor = parameter.data if what == "weights" else parameter.grad
        assert tensor is not None
        tensor.view(-1).view(torch.int32)[-1] ^= -(1 << 31) if bit == 31 else 1 << bit
        other = Fingerprints(hurt.parameters())
        steps_found = []
        for step in range(num_parts):
            taken.start(step)
            taken.finish()
            other.start(step)
            other.finish()
            if taken.header != other.header:
                steps_found.append(step)
        assert len(steps_found) == (1 if what == "weights" else num_parts)
        assert taken.header < 1 << HEADER_BITS


def test_layout_in_memory_does_not_matter_to_a_dense_tensor() -> None:
    sound = nn.Conv2d(64, 128, 3)  # beyond what is concatenated
    other = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)
    other.load_state_dict(sound.state_dict())
    again = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)
    again.load_state_dict(sound.state_dict())
    found = [Fingerprints(each.parameters()) for each in (other, again)]
    for each in found:
        each.start(0, gradient=False)
        each.finish()
    assert found[0].weights == found[1].weights and found[0].gradient is None


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 2, 3, 7, 64, 9000, 20_000]), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_gradients_have_the_same_digest_wherever_they_lie(sizes: list[int], draw: Random) -> None:
    """Alone, or as slices of a bucket in any order, with and without gaps, step after step."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    alone, taken = Fingerprints(parameters), Fingerprints(parameters)
    for step in range(4):
        values = [torch.randn(size) for size in sizes]
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value.clone()
        expected = alone.of_gradients()
        bucket = torch.full((sum(sizes) + 4 * len(sizes) + 1,), float(step))
        begin = draw.choice([0, 0, 1])
        for number in draw.sample(range(len(sizes)), len(sizes)):
            end = begin + sizes[number]
            bucket[begin:end] = values[number]
            parameters[number].grad = bucket[begin:end]
            begin = end + draw.choice([0, 0, 0, 2, 3])
        assert taken.of_gradients() == expected
        if values[-1].numel():
            bucket[:] = bucket + 1  # in the same places
            assert taken.of_gradients() != expected


@given(st.binary(max_size=40), st.integers(0, 9))
def test_words_are_added_alike_on_the_host_and_where_the_data_is(data: bytes, begin: int) -> None:
    flat = torch.tensor(list(bytes(begin) + data), dtype=torch.uint8)
    words = [data[at : at + 8] for at in range(0, len(data), 8)]
    expected = sum(int.from_bytes(word, "little") for word in words)
    part = flat[begin:]
    for found in (*start_totals([part])(), int(total_on_device(part))):
        assert (found - expected) % (1 << 64) == 0


def test_without_parameters_or_gradients_there_is_a_digest_too() -> None:
    empty = Fingerprints([])
    assert empty.header == 0
    empty.start(7)
    empty.finish()
    assert (empty.gradient, empty.weights) == (0, 0)


@pytest.mark.parametrize("world_size", [2, 3, 7, 100])
def test_who_differs_is_seen_in_the_totals_of_all_ranks(world_size: int) -> None:
    def totals(of_ranks: list[int]) -> StepTotals:
        reports = [ReportSums(Peers(rank, world_size, CPU)) for rank in range(world_size)]
        sums = np.zeros(len(reports[0].numbers), np.float32)
        for report, fingerprint in zip(reports, of_ranks, strict=True):
            report.begin(3, fingerprint=fingerprint)
            sums += report.gradient().numpy() * np.float32(1 / world_size)  # as DDP divides
        return reports[0].totals_of(sums.tobytes())

    same = (1 << HEADER_BITS) - 1
    assert not totals([same] * world_size).are_ranks_apart
    for bit in range(HEADER_BITS):
        found = totals([same ^ 1 << bit if rank == 1 else same for rank in range(world_size)])
        assert found.are_ranks_apart
        of_ranks = found.fingerprints()
        assert of_ranks[1] != of_ranks[0]
        assert len(set(of_ranks)) == 2 and len(of_ranks) == world_size
