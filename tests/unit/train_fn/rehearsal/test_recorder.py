"""What a rank notes of each step: the model's inputs, gradients, the state, what the code holds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from train_fn.rehearsal.comparison import Record, read_record
from train_fn.rehearsal.recorder import Orders, Recorder
from train_fn.rehearsal.values import OwnValues


class Source:
    """A training of one model."""

    seeds_steps = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.done = model, optimizer, 0

    def step(self) -> int | None:
        return self.done

    def steps_done(self) -> int | None:
        return self.done

    def ends_epoch(self) -> bool:
        return self.done % 2 == 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def models(self) -> list[nn.Module]:
        return [self.model]

    def held_by(self) -> dict[str, Any]:
        return {}


class Waits(Exception):
    """Stands for the end of a process that waits."""


LOOP = """
seen = 0
class Meter:
    def __init__(self): self.best, self.seen = 0.5, [1, 2]
class Average:
    def __init__(self, model): self.shadow = {k: v.clone() for k, v in model.state_dict().items()}
class Counting(torch.nn.Linear):
    def __init__(self): super().__init__(2, 1); self._calls, self.noise = 7, torch.Generator()
meter = Meter()
def train(model, optimizer, source, recorder, closure):
    global seen
    average, other = Average(model), torch.nn.Linear(3, 1)
    ahead = torch.zeros(4, 2)
    for number in range(6):
        seen += 1
        x, ahead = ahead, torch.full((4, 2), float(number + 1))
        def backward():
            optimizer.zero_grad()
            loss = (model(input=x) if closure else model(x)).square().sum()
            loss.backward()
            return loss
        if closure:
            optimizer.step(backward)
        else:
            backward(); optimizer.step()
        source.done += 1
        recorder.commit()
        model.eval()
        with torch.no_grad(): model(x)
        model.train()
"""


def recorded(directory: Path, *, closure: bool) -> Record:
    file = directory / "own_loop_of_user.py"
    file.write_text(f"import torch\n{LOOP}")
    spec = importlib.util.spec_from_file_location("own_loop_of_user", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["own_loop_of_user"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1)
    model = module.Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def wait(word: str) -> None:
        raise Waits(word)

    source, path = Source(model, optimizer), directory / "0.jsonl"
    recorder = Recorder(path, 0, Orders(4), directory, source, wait, lambda step: None)
    try:
        with pytest.raises(Waits, match="done"):
            module.train(model, optimizer, source, recorder, closure)
    finally:
        recorder.close()
        del sys.modules["own_loop_of_user"]
    model(torch.zeros(4, 2))  # nothing is noted any more
    return read_record(path)


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_is_noted_with_its_own_gradients(closure: bool, tmp_path: Path) -> None:
    record = recorded(tmp_path, closure=closure)
    assert sorted(record.steps) == [0, 1, 2, 3, 4]  # the last one only evaluated
    assert record.final_step == 4 and record.final is not None
    for number in range(4):
        step = record.steps[number]
        assert step.is_committed and step.ends_epoch == (number % 2 == 1)
        [[[_, text]]] = step.inputs
        assert text.startswith(f"[4, 2] {number}")
        [update] = step.updates
        # the first batch is all zeros, so only its bias has a gradient
        assert (update.gradients["weight"] == record.steps[0].updates[0].gradients["weight"]) == (
            number == 0
        )
        assert set(update.state) >= {"model/weight", "optimizer/param_groups/0/lr"}
        name = "own_loop_of_user.py"
        assert update.held[f"{name}: seen"] == str(number + 1)
        assert update.held[f"{name}: train(): number"] == str(number)
        assert update.held[f"{name}: meter.best"] == "0.5"
        assert update.held[f"{name}: meter.seen"] == "[1, 2]"
        assert update.held["model._calls"] == "7" and "model.noise" in update.held
        assert update.held[f"{name}: train(): average.shadow"].startswith("weights #")
        assert update.held[f"{name}: train(): other"].startswith("weights #")
        assert f"{name}: train(): model" not in update.held, "it is what is trained"
        assert update.where is not None and update.where.startswith(f"{name}, line ")
    assert not record.steps[0].is_evaluated and record.steps[1].is_evaluated
    lines = (tmp_path / name).read_text().splitlines()
    [at] = [number for number, line in enumerate(lines, 1) if line.startswith("        x, ahead")]
    assert [record.steps[number].carried for number in range(4)] == [
        [],
        *3 * [[f"ahead ({name}, line {at})"]],
    ]
    assert lines[record.lines[f"{name}: seen"] - 1] == "        seen += 1"


def test_what_is_handed_to_the_next_step_is_found_wherever_it_is() -> None:
    def ahead() -> Iterator[torch.Tensor]:
        held = torch.ones(3)
        while True:
            yield torch.zeros(3)
            yield held

    own = OwnValues(Path(__file__).parent, cast(Any, None))
    output = torch.nn.Linear(3, 2)(torch.ones(3))
    own.note_output(output)
    hidden, batches = output.detach(), ahead()
    next(batches)
    del output
    own.note_batches(sys._getframe())
    [[name], is_made] = own.carried((hidden.detach(), torch.ones(2)))
    assert name.startswith("hidden (") and is_made
    [[name], is_made] = own.carried((next(batches),))
    assert name.startswith("held (") and not is_made
