"""What refers to a broken device's memory is never freed."""

from __future__ import annotations

import subprocess
import sys
import weakref

import torch

from train_fn.node.device import is_broken, keep_for_ever

ENDS = """
import os
from train_fn.node.device import keep_for_ever

class Memory:
    def __init__(self, name):
        self.name = name

    def __del__(self, write=os.write):
        write(1, f"{self.name} was freed. ".encode())

kept, freed = [Memory("the kept")], [Memory("the other")]
keep_for_ever(kept)
"""


class Memory:
    """An object whose end can be seen."""


def test_a_cpu_has_no_context_that_could_fail() -> None:
    assert not is_broken(torch.device("cpu"))


def test_what_is_kept_outlives_everything_that_refers_to_it() -> None:
    kept, freed = Memory(), Memory()
    keep_for_ever([kept])
    ends = weakref.ref(kept), weakref.ref(freed)
    del kept, freed
    assert ends[0]() is not None
    assert ends[1]() is None


def test_it_outlives_the_end_of_the_process_too() -> None:
    said = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert "the other was freed" in said.stdout
    assert "the kept was freed" not in said.stdout
