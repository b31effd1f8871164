"""A file that a data set opens at its first read: loader processes must not share its position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from tests.unit.train_fn.data.test_data import make_spec
from train_fn.samples.loader import KeyedDataset
from train_fn.samples.sampler import MicroBatch
from train_fn.state.contents import Contents

NUM_SAMPLES = 4000


class Lines(Dataset[int]):
    """Numbers of eight digits, by a file that is opened at the first read."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        if self._file is None:
            self._file = self._path.open("rb", buffering=0)
        self._file.seek(8 * index)
        return int(self._file.read(8))


# the file that is put back is closed by its last reference, as a user's is
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "inside",
    [lambda lines: lines, lambda lines: ConcatDataset([Subset(lines, range(NUM_SAMPLES))])],
)
def test_loader_processes_do_not_share_a_file_that_the_first_reads_opened(
    inside: Any, tmp_path: Path
) -> None:
    (tmp_path / "numbers").write_bytes(b"".join(b"%08d" % n for n in range(NUM_SAMPLES)))
    lines = Lines(tmp_path / "numbers")
    dataset = inside(lines)
    assert len(Contents({"train": dataset}).sketches) > 1, "samples were read"
    keyed = KeyedDataset(dataset, 1, torch.tensor, training=True)
    micros = [
        MicroBatch(0, begin // 32, np.arange(begin, begin + 32))
        for begin in range(0, NUM_SAMPLES, 32)
    ]
    assert keyed.first(micros[2]).batch.tolist() == micros[2].indices.tolist()
    assert lines._file is None
    spec = make_spec(2)
    for micro, loaded in zip(
        micros, keyed.batches(micros, spec, 1, torch.device("cpu")), strict=True
    ):
        assert loaded.batch.tolist() == micro.indices.tolist()
