"""Say in words what the ranks of a group do now, from their Python stacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from train_fn.recovery.error_text import USER_FRAME

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_MAX_STACK = 20_000
"""Characters of a rank's stack that are kept, the innermost."""
_RETURNED = "has returned"
_REPORTS = "waits in ray.train.report"
_GETS = "waits in ray.get"

_WAITS = (
    (re.compile(r"ray/train/.*", re.S), "report", _REPORTS),
    (re.compile(r"train_fn/ray_train/user_function\.py"), "__call__", _REPORTS),
    (re.compile(r"ray/_private/worker\.py"), "get", _GETS),
    (re.compile(r"ray/_private/worker\.py"), "wait", "waits in ray.wait"),
    (re.compile(r"torch/multiprocessing/spawn\.py"), "join", "waits for processes it spawned"),
    (re.compile(r"multiprocessing/(process|popen_\w+)\.py"), "join|wait", "waits for a process"),
    (re.compile(r"/subprocess\.py"), "wait|_wait|communicate|_communicate", "waits for a program"),
    (re.compile(r"torch/autograd/graph\.py"), "_engine_run_backward", "is in a backward pass"),
    (re.compile(r"torch/distributed/rendezvous\.py|TCPStore"), r"\w+", "waits for peers to meet"),
    (re.compile(r"torch/distributed/"), "init_process_group|_new_.*", "waits for peers to meet"),
    (re.compile(r"torch/distributed/distributed_c10d\.py"), r"\w+", "waits in a collective"),
    (re.compile(r"torch/utils/data/"), r"\w+", "waits for its data loader"),
    (re.compile(r"/threading\.py"), "wait|join|_wait_for_tstate_lock", "waits for a thread"),
    (re.compile(r"/queue\.py"), "get|put", "waits for a queue"),
    (re.compile(r"/socket\.py|/ssl\.py"), r"\w+", "waits for a connection"),
)
"""Where a rank waits: the file of a frame, its function, and the words. The first that matches a
frame of the stack below the user's own counts."""

_ONE_SIDED = (
    "All ranks must call ray.train.report, also those whose metrics are not needed: take it out of "
    "`if rank == 0`"
)
_NO_CPUS = (
    "The ranks hold the CPUs that a remote function waits for: give it "
    "@ray.remote(num_cpus=0), or fewer ranks (scaling.max_workers)"
)


def does(stack: str | None, training: str) -> str:
    """Return what a rank does: ``waits in ray.train.report (train.py, line 12)``.

    Args:
        stack: its stacks with the training thread's last; None if it does not answer.
        training: how the name of the training thread begins.
    """
    if stack is None:
        return "does not answer"
    own = stack.rpartition("Thread ")[2]
    if not own.startswith(training):
        return _RETURNED
    place, frames = "", own
    for found in USER_FRAME.finditer(own):
        place = f" ({found[1]}, line {found[2]})"
        frames = own[found.start() :]
    inner = _FRAME.findall(frames)
    for file, _, name in inner:
        for pattern, function, words in _WAITS:
            if pattern.search(file) and re.fullmatch(function, name):
                return words + place
    return f"runs {inner[-1][2]}{place}" if inner else "runs"


def in_words(done: Mapping[int, str]) -> str:
    """Return what all ranks do, in one text: ranks that do the same are named together, and what to
    change follows where it is known."""
    together: dict[str, list[int]] = {}
    for rank, words in sorted(done.items()):
        together.setdefault(words, []).append(rank)
    parts = [f"{_ranks(ranks)} {words}" for words, ranks in together.items()]
    reporting = [words.startswith(_REPORTS) for words in done.values()]
    hints = []
    if any(reporting) and not all(reporting):
        hints.append(_ONE_SIDED)
    if any(words.startswith(_GETS) for words in done.values()):
        hints.append(_NO_CPUS)
    return ". ".join(["; ".join(parts), *hints])


def bounded(stack: str | None) -> str | None:
    """Return the innermost part of a stack."""
    return stack if stack is None or len(stack) <= _MAX_STACK else f"…{stack[-_MAX_STACK:]}"


def report(
    stacks: Mapping[int, str | None], node_ids: Mapping[int, str], training: str
) -> dict[str, Any]:
    """Return the data of a ``stacks`` event about these ranks."""
    done = {rank: does(stack, training) for rank, stack in stacks.items()}
    ranks = [
        {"rank": rank, "node_id": node_ids[rank], "does": done[rank], "stack": bounded(stack)}
        for rank, stack in sorted(stacks.items())
    ]
    return {"summary": in_words(done), "ranks": ranks}


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"ranks {shown}"
