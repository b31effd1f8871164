"""What ranks do, in words, from their stacks; and when they are asked."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.wire.events import EventKind
from storage.run_control import StackOrder
from tests.support.one_rank import Journal
from train_fn.ray_train.group import patience
from train_fn.ray_train.group.patience import StackReports
from train_fn.recovery.error_text import bounded, does, in_words
from train_fn.recovery.hang import TRAINING_THREAD

CODE = f"/tmp/everstep/cache/code/{'0' * 64}/train.py"
REPORT = f'''Thread MainThread
  File "/usr/lib/python3.11/threading.py", line 5, in wait
Thread {TRAINING_THREAD}(train)
  File "/x/site-packages/ray/train/v2/_internal/execution/thread_runner.py", line 60, in _run
  File "/x/train_fn/ray_train/user_function.py", line 160, in _call
  File "{CODE}", line 8, in train_fn
    save(model)
  File "{CODE}", line 12, in save
    ray.train.report({{"loss": 1.0}})
  File "/x/site-packages/ray/train/v2/api/train_fn_utils.py", line 9, in report
  File "/x/train_fn/ray_train/user_function.py", line 98, in __call__
  File "/x/site-packages/ray/_private/worker.py", line 2962, in get
'''
FRAMES = {
    "waits in ray.get": ("/x/site-packages/ray/_private/worker.py", "get"),
    "is in a backward pass": (
        "/x/site-packages/torch/autograd/graph.py",
        "_engine_run_backward",
    ),
    "waits in a collective": (
        "/x/site-packages/torch/distributed/distributed_c10d.py",
        "all_reduce",
    ),
    "waits for peers to meet": (
        "/x/site-packages/torch/distributed/distributed_c10d.py",
        "init_process_group",
    ),
    "waits for processes it spawned": (
        "/x/site-packages/torch/multiprocessing/spawn.py",
        "join",
    ),
}


def stack(file: str, function: str) -> str:
    return (
        f"Thread {TRAINING_THREAD}\n"
        f'  File "/x/site-packages/ray/train/v2/thread_runner.py", line 1, in report\n'
        f'  File "{CODE}", line 9, in train_fn\n    step()\n'
        f'  File "{file}", line 7, in {function}\n'
    )


def test_a_rank_in_a_report_is_said_to_be_there_with_the_user_s_own_line() -> None:
    assert does(REPORT, TRAINING_THREAD) == "waits in ray.train.report (train.py, line 12)"
    assert does(None, TRAINING_THREAD) == "does not answer"
    assert does("Thread MainThread\n", TRAINING_THREAD) == "has returned"


@pytest.mark.parametrize(("words", "frame"), FRAMES.items(), ids=[each for each in FRAMES])
def test_what_a_rank_waits_for_is_named(words: str, frame: tuple[str, str]) -> None:
    assert does(stack(*frame), TRAINING_THREAD) == f"{words} (train.py, line 9)"


def test_a_real_thread_that_waits_is_understood() -> None:
    """Stacks are as Python writes them, not as this test does."""
    items: queue.Queue[int] = queue.Queue()
    source = "def train_fn(items):\n    return items.get()\n"
    space: dict[str, Any] = {}
    exec(compile(source, CODE, "exec"), space)
    thread = threading.Thread(target=space["train_fn"], args=[items], name=TRAINING_THREAD)
    thread.start()
    try:
        found, deadline = "", 0
        while "waits" not in found and deadline < 10_000:
            deadline += 1
            frame = sys._current_frames().get(thread.ident or 0)
            text = "".join(traceback.format_stack(frame))
            found = does(f"Thread {TRAINING_THREAD}\n{text}", TRAINING_THREAD)
        assert found == "waits for a queue (train.py, line 2)"
    finally:
        items.put(1)
        thread.join()


def test_ranks_that_do_the_same_are_named_together_with_what_to_change() -> None:
    report, collective = (
        "waits in ray.train.report (train.py, line 12)",
        "waits in a collective (train.py, line 9)",
    )
    text = in_words({0: report, 1: collective, 2: collective})
    assert text.startswith(f"rank 0 {report}; ranks 1, 2 {collective}. All ranks must call ray.")
    assert in_words({0: report, 1: report}) == f"ranks 0, 1 {report}"
    assert "num_cpus=0" in in_words({0: "waits in ray.get (train.py, line 3)"})


def test_a_stack_is_bounded_from_its_outer_end() -> None:
    assert bounded("short") == "short" and bounded(None) is None
    long = bounded("a" * 50_000 + "end")
    assert long is not None and len(long) < 21_000 and long.endswith("end")


def test_ranks_are_asked_once_for_each_request_and_ever_more_seldom_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "answers", lambda asked: dict(enumerate(asked)))
    metadata = SimpleNamespace(node_id="node-1")
    actor = SimpleNamespace(stack=SimpleNamespace(remote=lambda: REPORT))
    group = SimpleNamespace(get_workers=lambda: [SimpleNamespace(actor=actor, metadata=metadata)])
    journal: Any = Journal()
    journal.stacks_ordered, journal.last_step = None, 7
    log: Any = SimpleNamespace(attempt=1, journal=journal)
    reports = StackReports(log, after_s=60.0)

    def asked_at(*quiet: float) -> list[float]:
        before = len(journal.events)
        for each in quiet:
            reports.check(group, each)
        return [data["quiet_s"] for _, data in journal.events[before:]]

    assert asked_at(1, 59, 60, 61, 119, 121, 240, 243) == [60, 121, 243]
    assert asked_at(0.5, 60, 300) == []  # it has moved, and is slow again
    log.attempt = 2
    assert asked_at(60) == [60]
    journal.stacks_ordered = StackOrder("stk_1", attempt=2)
    assert asked_at(2, 3) == [2]
    journal.stacks_ordered = StackOrder("stk_2", attempt=1)  # of ranks that are gone
    assert asked_at(2) == []
    kinds = {kind for kind, _ in journal.events}
    [asked] = [data for _, data in journal.events if data["id"] == "stk_1"]
    assert kinds == {EventKind.STACKS}
    assert (asked["step"], asked["ranks"][0]["stack"]) == (7, REPORT)
    assert asked["summary"] == "rank 0 waits in ray.train.report (train.py, line 12)"
    assert StackReports(log, after_s=0.0).check(group, 1e6) is None
