"""The GPU benchmark says clearly that there is none, and does not fail."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import step_costs


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    step_costs.main([])
    assert "no CUDA device" in capsys.readouterr().err
