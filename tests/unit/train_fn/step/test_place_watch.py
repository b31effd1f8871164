"""User code that asks for its rank, its peers or a group is noticed, and nobody else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from train_fn.step import place_watch
from train_fn.step.peers import Peers, end_process_group
from train_fn.step.place_watch import asked_at, watching


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    hook = sys.excepthook  # which torch replaces
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()
    sys.excepthook = hook


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(place_watch._watch, "asked_at", None)


@functools.lru_cache
def world() -> Any:
    return dist.group.WORLD


def in_a_thread() -> None:
    thread = threading.Thread(target=dist.get_rank)
    thread.start()
    thread.join()


class AsksInForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


QUESTIONS: dict[str, Callable[[], object]] = {
    "its rank": lambda: dist.get_rank(),
    "the size": lambda: dist.get_world_size(),
    "a cached group": lambda: world.__wrapped__(),
    "a group of its own": lambda: dist.new_group(backend="gloo"),
    "a barrier": lambda: dist.barrier(),
    "objects of all": lambda: dist.all_gather_object([None], 1),
    "a sum in a forward pass": lambda: nn.Sequential(AsksInForward())(torch.ones(1)),
    "a distributed sampler": lambda: torch.utils.data.DistributedSampler([1, 2]),  # type: ignore[arg-type]
    "the environment": lambda: os.environ["RANK"],
    "the environment, softly": lambda: os.getenv("RANK"),
    "the environment as bytes": lambda: os.environb[b"RANK"],
    "everything in the environment": lambda: dict(os.environ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_noticed_with_its_line(question: str) -> None:
    with watching():
        QUESTIONS[question]()
    found = asked_at()
    assert found is not None and found.startswith("test_place_watch.py, line "), found


def test_a_thread_of_torchs_own_is_not_the_users_and_one_that_runs_user_code_is() -> None:
    def ask() -> None:
        dist.get_rank()

    with watching():
        in_a_thread()  # its frames are those of threading and torch
        assert asked_at() is None
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert (asked_at() or "").endswith("in ask")


def test_what_says_nothing_of_peers_and_what_everstep_asks_do_not_count() -> None:
    peers = Peers(0, 2, torch.device("cpu"))  # in a group of one, so that it exchanges
    with watching():
        assert dist.is_initialized() and dist.is_available()
        assert os.environ.get("HOME") != "RANK" and "PATH" in os.environ
        peers.start_sum(torch.ones(1))
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        torch.optim.AdamW(nn.Linear(2, 2).parameters())
        list(torch.utils.data.DataLoader([1, 2, 3]))  # type: ignore[arg-type]
    assert asked_at() is None
    dist.get_rank()
    assert asked_at() is None, "outside of an attempt"


def test_the_environment_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching():
        monkeypatch.setenv("EVERSTEP_TEST", "1")
        assert os.environb[b"EVERSTEP_TEST"] == b"1"
        os.environb[b"EVERSTEP_TEST"] = b"2"
        shown = subprocess.run(["sh", "-c", "echo $EVERSTEP_TEST"], capture_output=True, text=True)
        assert os.environ["EVERSTEP_TEST"] == "2" == shown.stdout.strip()
