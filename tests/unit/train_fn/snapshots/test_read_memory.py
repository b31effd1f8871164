"""Another process's memory is read bit by bit, or not at all. A process may read its own in the
same way, so that one is enough here; test_lending.py has two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train_fn.snapshots.test_state_file import tensors
from train_fn.snapshots import state_file
from train_fn.snapshots.state_file import lent, read_memory
from train_fn.step.fingerprints import bytes_of, word_sum

pytestmark = pytest.mark.skipif(not state_file.machine(), reason="needs Linux")


@given(st.lists(tensors(), max_size=8), st.sampled_from([64, 4 << 20]))
def test_every_bit_arrives_with_its_sum(held: list[torch.Tensor], piece_bytes: int) -> None:
    found = [torch.empty(each.shape, dtype=each.dtype) for each in held]
    with pytest.MonkeyPatch.context() as patch, lent(held) as window:
        patch.setattr(state_file, "PIECE_BYTES", piece_bytes)
        patch.setattr(state_file, "_MOST_PARTS", 3)
        assert window is not None
        assert read_memory(window, found) == list(map(word_sum, held))
    for one, other in zip(found, held, strict=True):
        assert torch.equal(bytes_of(one), bytes_of(other))
