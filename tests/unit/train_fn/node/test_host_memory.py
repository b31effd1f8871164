"""Memory of a step is kept for the next: counted by the pages that the kernel has to give."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="glibc's malloc is what is set"
)

ONE_STEP = 45 << 8
"""Pages of 4 KiB in 45 MB."""

STEPS = """
import resource, sys, threading
import torch
from train_fn.node.memory import keep_memory

def steps():
    for number in range(16):
        if number == 8:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(mb << 18) for mb in (24, 12, 6, 3)]
        while activations:
            activations.pop()  # as backward needs them
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

print(keep_memory() if sys.argv[1] == "keep" else None)
thread = threading.Thread(target=steps)  # as the training function is called
thread.start()
thread.join()
"""


def kept_and_faults(argument: str, **env: str) -> tuple[str, int]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))
    }
    done = subprocess.run(
        [sys.executable, "-c", STEPS, argument],
        check=True,
        capture_output=True,
        text=True,
        env={**inherited, **env},
        timeout=120,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.slow
def test_later_steps_need_no_new_pages() -> None:
    kept, faults = kept_and_faults("keep")
    assert kept == "True" and faults < ONE_STEP / 10
    _, before = kept_and_faults("leave")
    assert before > 4 * ONE_STEP


def test_what_the_operator_sets_stays() -> None:
    kept, faults = kept_and_faults("keep", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "False" and faults > 7 * ONE_STEP
