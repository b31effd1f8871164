"""Another process's memory is read bit by bit, or not at all. A process may read its own in the
same way, so that one is enough here; test_lending.py has two."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train_fn.snapshots.test_state_file import tensors
from train_fn.snapshots import state_file
from train_fn.snapshots.state_file import Place, lent, read_memory
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


def test_a_process_that_is_gone_or_another_one_is_not_read() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    held, found = [torch.ones(3)], [torch.zeros(3)]
    with lent(held) as window:
        assert window is not None
    with pytest.raises(OSError, match="No such process"):
        read_memory(window._replace(pid=gone.pid), found)
    place, _ = window.token
    with pytest.raises(OSError, match="another one by now"):
        read_memory(window._replace(token=(place, os.urandom(16))), found)
    with lent(held) as window, pytest.raises(OSError, match=r"Bad address|only a part"):
        assert window is not None
        read_memory(window._replace(places=(Place(16, 12),)), found)
    assert (found[0] == 0).all()
