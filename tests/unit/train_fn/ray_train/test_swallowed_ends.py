"""Code that catches what ends it: the stop on which the ranks agreed decides how the run ends, and
an error that ended a protected loop is no success."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import tar_gz
from tests.support.one_rank import journal_of, one_rank
from tests.support.own_task import own_node
from train_fn.context import WorkerContext
from train_fn.errors import StepNotWhole
from train_fn.protect.commits import Commits
from train_fn.ray_train import user_function
from train_fn.recovery.evidence import StepFailed

__all__ = ["own_node"]

# A loop on a thread of its own ends by an exception that nobody catches there.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.slow,
]

STEPS, STOPPED_AT = 12, 4
LOOP = """
import contextlib, sys, threading
import torch
import everstep.train as es

ran = []


class Data(torch.utils.data.Dataset):
    broken_at = None

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if self.broken_at is not None and len(ran) == self.broken_at:
            raise OSError(f"cannot read sample {index}")
        return torch.full((4,), float(index))


def loop(each=lambda state: None, commit=None, data=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = es.protect(model=model, optimizer=optimizer)
    loader = es.loader(data or Data(), global_batch_size=4)
    with state:
        for batch in loader.batches(state, epochs=1):
            each(state)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if state.step_number == 2:
                ASK()
            ran.append(state.step_number)
            state.step() if commit is None else commit(state)
    return state


def never(state):
    pass
"""
CATCHES = {
    "bare": "try:\n    loop()\nexcept:\n    print('logged')\n",
    "finally": (
        "def main():\n    try:\n        loop()\n    finally:\n        return None\n\n\nmain()\n"
    ),
    "thread": "t = threading.Thread(target=loop)\nt.start()\nt.join()\n",
    "suppressed": "with contextlib.suppress(BaseException):\n    loop()\n",
    "at each step": (
        "def commit(state):\n"
        "    try:\n"
        "        state.step()\n"
        "    except BaseException:\n"
        "        pass\n\n\n"
        "loop(commit=commit)\n"
    ),
    "another error": (
        "try:\n    loop()\nexcept BaseException:\n    raise RuntimeError('cannot clean up')\n"
    ),
    "another exit": "try:\n    loop()\nexcept BaseException:\n    sys.exit(0)\n",
    "error exit": "try:\n    loop()\nexcept BaseException:\n    sys.exit(3)\n",
    "used again": "try:\n    loop()\nexcept BaseException:\n    REPORT({'loss': 1.0}, None)\n",
    "plain": "loop()\n",
}
REPORTS = """
def main():
    for n in range(STEPS):
        if n == STOP:
            ASK()
        try:
            REPORT({"loss": 1.0}, None)
        except BaseException:
            BREAK


main()
"""
UNPROTECTED = """
import time
ASK()
try:
    while True:
        time.sleep(0.01)
except BaseException:
    print("cleaning up")
"""


@pytest.fixture
def rank(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, str], str], WorkerContext]:
    """Make a rank of a run whose code is these files, and that is stopped once it calls ASK."""
    found = SimpleNamespace(checkpoint=None, report_call_index=0)

    def report(*_: Any) -> None:
        found.report_call_index += 1

    found.report = report
    monkeypatch.setattr(user_function, "get_train_context", lambda: found)
    monkeypatch.setattr("ray.train.collective.broadcast_from_rank_zero", lambda value: value)
    monkeypatch.setattr("builtins.REPORT", lambda *args: found.report(*args), raising=False)

    def made(source: str, kind: str) -> WorkerContext:
        # A module of its own for each test: this process imports a name once.
        name = f"ends_{abs(hash((source, kind))):x}"
        if kind == "script":
            text, code = source, {"script": f"{name}.py"}
        else:
            head, _, body = source.rpartition("# main\n")
            indented = "".join(f"    {line}\n" for line in body.splitlines())
            text = f"{head}\ndef train_fn():\n{indented}"
            code = {"train_fn": f"{name}:train_fn"}
        storage = open_storage(str(tmp_path / "storage"))
        code["archive"] = CodeStore(storage).put(tar_gz({f"{name}.py": text})).digest
        spec = RunSpec.model_validate({"name": "own", "code": code})
        ctx = one_rank(spec, RunDir(storage, "run_own"))

        def ask() -> None:
            journal_of(ctx).stop_requested = "pause"

        monkeypatch.setattr("builtins.ASK", ask, raising=False)
        return ctx

    return made


def protected(body: str) -> str:
    return f"{LOOP}\n\n# main\n{body}"


@pytest.mark.parametrize("kind", ["train_fn", "script"])
@pytest.mark.parametrize("habit", CATCHES)
def test_a_stop_that_the_code_catches_ends_the_run_as_stopped(
    habit: str, kind: str, rank: Any
) -> None:
    ctx = rank(protected(CATCHES[habit]), kind)
    assert user_function.train(ctx) == "pause"
    [kept] = CheckpointStore(ctx.run_dir).list()
    steps = {point["step"] for point in journal_of(ctx).points}
    assert steps == set(range(1, STOPPED_AT + 1)) and kept.step == STOPPED_AT


@pytest.mark.parametrize("kind", ["train_fn", "script"])
@pytest.mark.parametrize("after", ["pass", "break", "raise LookupError('x')"])
def test_a_stop_at_a_report_that_the_code_catches(after: str, kind: str, rank: Any) -> None:
    source = REPORTS.replace("STEPS", "6").replace("STOP", "2").replace("BREAK", after)
    ctx = rank(f"# main\n{source}", kind)
    assert user_function.train(ctx) == "pause"
    assert [point["step"] for point in journal_of(ctx).points] == [1, 2, 3]


def test_a_script_that_catches_its_interruption_is_stopped(rank: Any) -> None:
    assert user_function.train(rank(UNPROTECTED, "script")) == "pause"


WITHOUT_STOP = LOOP.replace("ASK()", "never(state)")
FAILS = "def each(state):\n    if state.step_number == 5:\n        WHAT\n\n\n"
BROKEN = (
    "data = Data()\n"
    "data.broken_at = 5\n"
    "torch.manual_seed(0)\n"
    "model = torch.nn.Linear(4, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\n"
    "state = es.protect(model=model, optimizer=optimizer)\n"
    "loader = es.loader(data, global_batch_size=4)\n"
    "with state:\n"
    "    try:\n"
    "        for batch in loader.batches(state, epochs=1):\n"
    "            model(batch).square().mean().backward()\n"
    "            optimizer.step()\n"
    "            ran.append(1)\n"
    "            state.step()\n"
    "    except Exception:\n"
    "        print('logged')\n"
)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            FAILS.replace("WHAT", "raise LookupError('sample 3')")
            + "try:\n    loop(each)\nexcept:\n    print('logged')\n",
            "LookupError: sample 3",
        ),
        (
            FAILS.replace("WHAT", "raise LookupError('sample 3')")
            + "t = threading.Thread(target=loop, args=(each,))\nt.start()\nt.join()\n",
            "LookupError: sample 3",
        ),
        (
            FAILS.replace("WHAT", "sys.exit(0)") + "loop(each)\n",
            "the code called sys.exit(0)",
        ),
        (
            FAILS.replace("WHAT", "sys.exit(0)") + "try:\n    loop(each)\nexcept:\n    pass\n",
            "the code called sys.exit(0)",
        ),
        (BROKEN, "OSError: cannot read sample"),
        (
            FAILS.replace("WHAT", "held.set(); threading.Event().wait()")
            + "threading.Thread(target=loop, args=(each,), daemon=True).start()\nheld.wait()\n",
            "its protected loop is at step 5 and has not ended",
        ),
    ],
    ids=["error", "error of a thread", "exit", "caught exit", "data", "still trains"],
)
def test_a_loop_that_did_not_end_is_no_success(body: str, words: str, rank: Any) -> None:
    for kind in ("train_fn", "script"):
        source = f"{WITHOUT_STOP}\n\nheld = threading.Event()\n"
        with pytest.raises(StepFailed) as caught:
            head, _, main = body.rpartition("\n\n\n")
            user_function.train(rank(f"{source}{head}\n\n\n# main\n{main}", kind))
        assert words in caught.value.error.summary
        assert caught.value.error.kind is ErrorKind.USER


def test_an_error_of_a_commit_comes_back_however_often_it_is_caught(
    rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that goes on after the ranks have parted would train another model on each rank."""
    raised = []

    def read(commits: Commits) -> None:
        if len(raised) == 0 and commits._state.step == 3:
            raised.append(3)
            raise StepNotWhole(2, "the ranks parted")

    monkeypatch.setattr(Commits, "read", read)
    body = "def step(state):\n    try:\n        state.step()\n    except Exception:\n        pass\n"
    own_data = (
        "with contextlib.suppress(ValueError):\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\n"
        "    with es.protect(model=model, optimizer=optimizer) as state:\n"
        "        for _ in range(8):\n"
        "            with contextlib.suppress(Exception):\n"
        "                model(torch.ones(2, 4)).square().mean().backward()\n"
        "                optimizer.step()\n"
        "            step(state)\n"
    )
    with pytest.raises(StepFailed) as caught:
        user_function.train(rank(f"{WITHOUT_STOP}\n\n{body}\n\n# main\n{own_data}", "train_fn"))
    assert "the ranks parted" in caught.value.error.summary
    assert caught.value.error.kind is ErrorKind.EXCHANGE


def test_a_loop_that_breaks_has_reported_its_last_step_as_the_total(rank: Any) -> None:
    body = (
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\n"
        "state = es.protect(model=model, optimizer=optimizer)\n"
        "with state:\n"
        "    for batch in es.loader(Data(), global_batch_size=4).batches(state, epochs=1):\n"
        "        model(batch).square().mean().backward()\n"
        "        optimizer.step()\n"
        "        state.step()\n"
        "        if state.step_number == 7:\n"
        "            break\n"
    )
    ctx = rank(f"{WITHOUT_STOP}\n\n# main\n{body}", "train_fn")
    assert user_function.train(ctx) is None
    totals = [data["total_steps"] for data in journal_of(ctx).of_kind(EventKind.TRAINING_STARTED)]
    assert totals == [None, None, STEPS, 7]
    assert CheckpointStore(ctx.run_dir).list()[-1].step == 7
