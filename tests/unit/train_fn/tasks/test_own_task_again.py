"""An uploaded task that trains again: its data must be as it was, and its draws are the same."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.wire.events import EventKind
from storage.filesystem import Storage
from tests.support.code_archives import TASK
from tests.support.one_rank import journal_of
from tests.support.own_task import changed, context, failure, own_node, storage
from train_fn.loop.attempt import train

__all__ = ["own_node", "storage"]


pytestmark = pytest.mark.own_process


FROM_FILE = changed(
    "torch.linspace(-1, 1, length)", "torch.tensor(json.loads(pathlib.Path('POINTS').read_text()))"
).replace("import torch\n", "import json, pathlib, torch\n", 1)


def test_data_that_changed_under_one_length_is_refused_and_what_changed_is_named(
    storage: Storage, tmp_path: Path
) -> None:
    points = [0.1 * number for number in range(40)]
    file, source = (
        tmp_path / "points.json",
        FROM_FILE.replace("POINTS", str(tmp_path / "points.json")),
    )
    file.write_text(json.dumps(points))
    source = source.replace("Points(8)", "None")
    assert train(context(storage, source, train={"max_steps": 2})) is None
    file.write_text(json.dumps([*points[:39], 7.0]))
    error = failure(context(storage, source, submission=2, train={"max_steps": 3}))
    assert error.type == "DataChanged"
    assert (
        "(task.py, line 25) changed since step 2: not the same: train sample 39. Put the data back"
        in error.message
    )
    file.write_text(json.dumps(points))
    ctx = context(storage, source, submission=3, train={"max_steps": 3})
    assert train(ctx) is None and [
        data["source"] for data in journal_of(ctx).of_kind(EventKind.RESTORED)
    ] == ["checkpoint"]
    assert {point["step"] for point in journal_of(ctx).points} == {1, 2, 3}


def test_a_state_of_an_everstep_that_kept_no_samples_resumes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train_fn.state.contents.Contents.dump", lambda self: None)
        assert train(context(storage, TASK, train={"max_steps": 2})) is None
    ctx = context(storage, TASK, submission=2, train={"max_steps": 3})
    assert train(ctx) is None and [
        data["source"] for data in journal_of(ctx).of_kind(EventKind.RESTORED)
    ] == ["checkpoint"]
    assert {point["step"] for point in journal_of(ctx).points} == {1, 2, 3}


def test_what_is_built_draws_what_a_plain_seed_gives_every_attempt_alike(storage: Storage) -> None:
    """The task, its data and its optimizer each draw from seeds of their own: a second attempt in
    this process draws the same."""
    source = changed(
        "self.length = length", "self.length = length; self.drawn = random.random()"
    ).replace("import torch\n", "import random\nimport numpy as np\nimport torch\n", 1)
    source = source.replace(
        'return {"train"',
        (
            "print('drew', self.drawn, np.random.rand(), float(torch.rand(())), "
            "random.random())\n    "
            '    return {"train"'
        ),
    )
    drawn = []
    for submission in (1, 2):
        random.seed()
        np.random.seed()
        torch.seed()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert (
                train(
                    context(storage, source, submission=submission, train={"max_steps": submission})
                )
                is None
            )
        drawn.append([line for line in out.getvalue().splitlines() if line.startswith("drew")])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 1


def test_a_length_that_changes_under_one_fingerprint_is_refused(storage: Storage) -> None:
    source = changed("def __len__", 'fingerprint = "points"\n\n    def __len__')
    assert train(context(storage, source, args={"length": 40})) is None
    error = failure(
        context(storage, source, submission=2, args={"length": 70}, train={"epochs": 2})
    )
    assert (
        "has another length since step 3, though it calls itself points as before" in error.message
    )
