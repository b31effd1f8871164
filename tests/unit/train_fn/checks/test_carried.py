"""What a loop carries from step to step in variables of its own, where no state holds it, is
warned of by name."""

from __future__ import annotations

import ast
import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es
from train_fn.checks.carried import carried, iterated


@pytest.fixture(autouse=True)
def own_place(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shared_memory.parent)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("for x in data:\n  ema = 0.9 * ema + x\n  STEP", {"ema"}),
        ("for x in data:\n  total += x\n  STEP", {"total"}),
        ("for x in data:\n  y = x + 1\n  z = y\n  STEP", set()),
        ("for x in data:\n  if x > best:\n    best = x\n  STEP", {"best"}),
        ("for x in data:\n  if x:\n    y = 1\n  else:\n    y = 2\n  use(y)\n  STEP", set()),
        ("for e in r:\n  n = 0\n  for x in data:\n    n += x\n    STEP\n  use(n)", {"n"}),
        ("for e in r:\n  for x in data:\n    loss = f(x)\n    STEP\n  use(loss)", set()),
        ("for e in r:\n  for x in data:\n    STEP\n  bad = 0 if better() else bad + 1", {"bad"}),
        ("for x in data:\n  STEP\n  if good(x):\n    kept = copy(x)\n    save(kept)", set()),
        ("for i, x in enumerate(data):\n  adjust(i)\n  STEP", {"i"}),
        ("for i, x in enumerate(data):\n  STEP", set()),
        ("for i, x in enumerate(data, begun):\n  adjust(i)\n  STEP", set()),
        ("while n < 9:\n  n = n + 1\n  STEP", {"n"}),
        ("for x in data:\n  s = sum(s for s in x)\n  STEP", set()),
        ("for x in data:\n  while (y := f()) < 3:\n    use(y)\n  STEP", set()),
        ("for x in data:\n  with a as b:\n    use(b)\n  STEP", set()),
        ("for x in data:\n  try:\n    c = 1\n  finally:\n    use(c)\n  STEP", set()),
        ("for x in other:\n  n += 1\nfor x in data:\n  STEP", set()),
        ("def f():\n  for x in data:\n    n += 1\n    STEP\nfor x in f():\n  m += 1", {"n"}),
        ("for x in data:\n  self.n = self.n + 1\n  a[0] += 1\n  STEP", set()),
    ],
)  # fmt: skip
def test_what_rounds_hand_to_the_next_is_found_in_the_code(code: str, names: set[str]) -> None:
    line = next(at for at, text in enumerate(code.splitlines(), start=1) if "STEP" in text)
    assert carried(ast.parse(code), line) == names


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("for a, b in zip(data, cycle(other)):\n  STEP", {"zip", "data", "cycle", "other"}),
        ("for a in data:\n  b = next(it)\n  STEP", {"data", "it"}),
        ("for a in data:\n  STEP\nfor b in other:\n  pass", {"data"}),
    ],
)
def test_what_a_loop_iterates_is_found_in_the_code(code: str, names: set[str]) -> None:
    line = next(at for at, text in enumerate(code.splitlines(), start=1) if "STEP" in text)
    assert iterated(ast.parse(code), line) == names


INPUTS = TensorDataset(torch.arange(80.0).reshape(20, 4).sin())


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self) -> None:
        self.seen += 1


class Kept(Counter):
    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


CALLS = 0


def count_call() -> None:
    global CALLS
    CALLS += 1


def plain(state: Any, data: Any, step: Any) -> None:
    for (batch,) in data.batches(state, epochs=2):
        step(batch)
        state.step()


def averaging(state: Any, data: Any, step: Any) -> None:
    mean = 0.0
    for (batch,) in data.batches(state, epochs=2):
        mean = 0.9 * mean + 0.1 * float(step(batch))
        state.step(mean=mean)


def counting(state: Any, data: Any, step: Any) -> None:
    counter = Counter()
    for (batch,) in data.batches(state, epochs=2):
        step(batch)
        counter()
        state.step()


def at_the_end_of_an_epoch(state: Any, data: Any, step: Any) -> None:
    stopper = Counter()
    for epoch in range(2):
        for (batch,) in data.batches(state, epochs=epoch + 1):
            step(batch)
            state.step()
        stopper()


def mixing(state: Any, data: Any, step: Any) -> None:
    draws = np.random.default_rng(0)
    for (batch,) in data.batches(state, epochs=2):
        step(batch * draws.random())
        state.step()


def by_a_global(state: Any, data: Any, step: Any) -> None:
    for (batch,) in data.batches(state, epochs=2):
        step(batch)
        count_call()
        state.step()


def teaching(state: Any, data: Any, step: Any) -> None:
    teacher = nn.Linear(4, 2)
    for (batch,) in data.batches(state, epochs=2):
        loss = step(batch + teacher(batch).mean().detach())
        with torch.no_grad():
            teacher.weight.add_(loss)
        state.step()


def falling() -> Any:
    """A function that counts its calls where only it can see."""
    num = 0

    def fallen(value: torch.Tensor) -> torch.Tensor:
        nonlocal num
        num += 1
        return value / num

    return fallen


def by_a_closure(state: Any, data: Any, step: Any) -> None:
    weight = falling()
    for (batch,) in data.batches(state, epochs=2):
        step(weight(batch))
        state.step()


def by_a_function(state: Any, data: Any, step: Any) -> None:
    def seen(value: Any) -> int:
        vars(seen)["num"] = vars(seen).get("num", 0) + 1
        return vars(seen)["num"]

    for (batch,) in data.batches(state, epochs=2):
        step(batch * seen(batch))
        state.step()


def by_a_hook(state: Any, data: Any, step: Any) -> None:
    next(state.parts.parameters()).register_hook(falling())
    plain(state, data, step)


def with_helpers(state: Any, data: Any, step: Any) -> None:
    """What closures share with the loop is looked at in the loop."""

    def squared() -> torch.Tensor:
        return batch.square()

    for (batch,) in data.batches(state, epochs=2):
        step(squared() + batch)
        state.step()


def scaling(state: Any, data: Any, step: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for (batch,) in data.batches(state, epochs=2):
        scaler.scale(step(batch))
        scaler.update(scaler.get_scale() * 2)
        state.step()


def beside(state: Any, data: Any, step: Any) -> None:
    unlabelled = DataLoader(INPUTS, batch_size=4, shuffle=True)
    for (batch,), (more,) in zip(data.batches(state, epochs=2), cycle(unlabelled), strict=False):
        step(batch + more)
        state.step()


def by_next(state: Any, data: Any, step: Any) -> None:
    unlabelled = iter(DataLoader(INPUTS, batch_size=4, shuffle=True))
    for (batch,) in data.batches(state, epochs=1):
        step(batch + next(unlabelled)[0])
        state.step()


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (plain, None),
        (averaging, "carries mean from step to step"),
        (counting, "carries counter.seen from step to step"),
        (at_the_end_of_an_epoch, "carries stopper.seen from step to step"),
        (mixing, "carries draws from step to step"),
        (teaching, "carries teacher from step to step"),
        (by_a_closure, "carries num from step to step"),
        (by_a_function, "carries seen() from step to step"),
        (by_a_hook, "carries num from step to step"),
        (with_helpers, None),
        (scaling, "carries scaler"),
        (by_a_global, "carries CALLS from step to step"),
        (beside, "reads unlabelled beside its state"),
        (by_next, "reads unlabelled beside its state"),
    ],
)
@pytest.mark.parametrize("of_own", [False, True])
def test_a_loop_is_warned_once_of_what_it_carries(
    loop: Any, words: str | None, of_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(INPUTS, batch_size=4, shuffle=True)
    data = es.loader(loader) if of_own else es.loader(INPUTS, global_batch_size=4)
    kept = Kept()
    extra = {"kept": kept, **({"data": data} if of_own else {})}

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept()
        return loss.detach()

    with (
        caplog.at_level(logging.WARNING, logger="train_fn.checks.carried"),
        es.protect(model, optimizer, extra=extra, run_id="run") as state,
    ):
        loop(state, data, step)
    said = [each.getMessage() for each in caplog.records if each.name.endswith("carried")]
    assert len(said) == (words is not None), said
    assert words is None or words in said[0]
    assert "kept" not in "".join(said).partition(",")[0]
