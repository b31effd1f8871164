"""What a driver imports before its journal starts, on a cluster that does not fork it."""

from __future__ import annotations

import subprocess
import sys


def test_a_driver_imports_torch_only_beside_the_start_of_its_journal() -> None:
    script = "import sys, train_fn.driver.command; print('torch' in sys.modules)"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"False\n"
