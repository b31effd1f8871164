"""Turn an exception into a message for people: without wrappers, and with advice that applies to
Everstep. Below: say in words what ranks do now, from their Python stacks.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_fn.errors import BadTask

_WRAPPED = re.compile(r"Caught \w+ in .*\.\nOriginal Traceback \(most recent call last\):\n")
"""The start of torch's message for an exception of a loader process; the original traceback
follows."""

_FRAME = re.compile(r'^  File "[^\n]*\n(?:    [^\n]*\n)*', re.MULTILINE)

_UNUSED = re.compile(r"Expected to have finished reduction in the prior iteration")
_TWICE = re.compile(r"Expected to mark a variable ready only once")
_KEPT = re.compile(
    r"Parameter indices which did not receive grad[^\n]*|Parameters which did not receive "
    r"grad[^\n]*|Parameter at index [^\n]*"
)
"""The parts of DDP's message that name the parameters."""
_FOREIGN = re.compile(r"find_unused_parameters|static_graph|TORCH_DISTRIBUTED_DEBUG")
"""DDP arguments that only Everstep sets, and a variable that does not affect Everstep's
messages."""

_UNUSED_ADVICE = (
    "some parameters did not contribute to the loss of a step, so ranks wait for gradients that "
    "never come. Remove them from the "
    "model, set requires_grad=False on them, or let every loss depend on them, if only by adding "
    "0 * parameter.sum()"
)
_TWICE_ADVICE = (
    "a parameter received its gradient twice in one backward pass. Call the model once in loss, "
    "with the whole batch; with activation "
    "checkpointing use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)

_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_FULL_ADVICE = (
    "the disk is full. Free some space there, or let your code write to a disk that has room"
)

_OF_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_USED_UP = re.compile(r"Too many open files|received \d+ items of ancdata")
_OPEN = "close those that were read, open them in __getitem__, or raise the limit (ulimit -n)"

USER_FRAME = re.compile(
    r'File "[^"\n]*/(?:cache/code/[0-9a-f]{64}|runs/[^"/\n]+/workdir)/([^"\n]+)", '
    r"line (\d+)(?:, in (\S+))?"
)
"""A frame of uploaded code, found by its directory on the node (``user_code/modules.py``), or by a
script's working directory (``user_code/script_run.py``)."""


def message_of(exc: BaseException) -> str:
    """Return an exception's message; for a group, add the first exception in it."""
    leaf = exc
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    if isinstance(exc, SystemExit):
        return (
            f"the code called sys.exit({exc.code!r}); return instead, or raise an error that says "
            "why"
        )
    if leaf is exc:
        return text_of(exc)
    return f"{text_of(exc)}; the first: {type(leaf).__name__}: {text_of(leaf)}"


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``, or a substitute if the user's exception raises in ``__str__``."""
    try:
        return str(exc)
    except Exception as failed:
        return f"(its __str__ raised {type(failed).__name__})"


def plain_message(message: str) -> str:
    """Return the original message of a wrapped exception, with advice for Everstep instead of DDP's
    own."""
    message = _unwrapped(message).strip()
    for found, advice in ((_UNUSED, _UNUSED_ADVICE), (_TWICE, _TWICE_ADVICE)):
        if found.search(message):
            return "\n".join([advice, *(kept.strip() for kept in _KEPT.findall(message))])
    if _FOREIGN.search(message):
        sentences = re.split(r"(?<=[.!?])\s+|\n+", message)
        kept = [sentence for sentence in sentences if not _FOREIGN.search(sentence)]
        return " ".join(kept) or message
    return message


def with_full_disk(message: str, exc: BaseException) -> str:
    """Return the message of a user's error; if a disk was full, add the path and what to do.

    The error of a ``write`` names no path. The traceback's frames know which file was open.
    """
    if not _FULL.search(message):
        return message
    path = None if getattr(exc, "filename", None) else _file_at_hand(exc)
    where = f": {path!r}" if path is not None and path not in message else ""
    first, *rest = message.split("\n", 1)
    return "\n".join([f"{first}{where}; {_FULL_ADVICE}", *rest])


def is_of_process(exc: BaseException) -> bool:
    """Return whether the process has used up its own files or memory. Torch's RuntimeError, and an
    error of a loader process, have no number."""
    number = getattr(exc, "errno", None)
    is_plain = number is None and isinstance(exc, OSError | RuntimeError)
    return number in _OF_PROCESS or (is_plain and _USED_UP.search(text_of(exc)) is not None)


def with_open_files(message: str) -> str:
    """Return the message with how many files this process has open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - no path is needed
    except OSError:  # no file can be opened to list them; a limit may be a thousand times as high
        numbers = range(min(most, 1 << 20))
        count = sum(os.path.lexists(f"/proc/self/fd/{number}") for number in numbers)
    first, *rest = message.split("\n", 1)
    return "\n".join([f"{first}; this process has {count} of {most} files open: {_OPEN}", *rest])


def _file_at_hand(exc: BaseException) -> str | None:
    """Return the path of a file being written, from the innermost frame that has one open."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    for frame in reversed(frames):
        files = [each for each in frame.f_locals.values() if issubclass(type(each), io.IOBase)]
        for file in files:
            path, mode = getattr(file, "name", None), str(getattr(file, "mode", ""))
            if isinstance(path, str | Path) and set(mode) & set("wax+"):
                return str(path)
    return None


def with_place(message: str, place: str | None) -> str:
    """Return the message with its place in the user's files at the end of the first line."""
    if place is None or place in message:
        return message
    first, *rest = message.split("\n", 1)
    return "\n".join([f"{first} ({place})", *rest])


def user_place(trace: str) -> str | None:
    """Return ``file, line N, in function`` of the innermost frame in uploaded code, or None.

    A line with a syntax error is in no function.
    """
    frames = USER_FRAME.findall(trace)
    if not frames:
        return None
    file, line, function = frames[-1]
    return (
        f"{file}, line {line}, in {function}"
        if function and function != "<module>"
        else f"{file}, line {line}"
    )


def ended_program(what: str, exc: SystemExit) -> BadTask:
    """Return the error for user code that called ``sys.exit``, as argparse does. ``what`` says what
    could not be done."""
    place = user_place("".join(traceback.format_exception(exc)))
    where = f" ({place})" if place else ""
    return BadTask(
        f"{what}: it called sys.exit({exc.code!r}){where}. Move code that parses arguments below "
        '`if __name__ == "__main__":`. A rank has no command line: pass values by code.args or '
        "code.config"
    )


def _unwrapped(message: str) -> str:
    """Remove torch's wrapper. The original message is the first line without indentation after the
    last frame."""
    found = _WRAPPED.match(message)
    if found is None:
        return message
    *_, last = _FRAME.split(message[found.end() :])
    return last.strip().partition(": ")[2] or message


# ---------------------------------------------------------------- stacks

_STACK_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
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
    inner = _STACK_FRAME.findall(frames)
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
