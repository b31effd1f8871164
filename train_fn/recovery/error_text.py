"""What an exception says in its own words, for people: without wrappers around it, and without
advice that does not apply here."""

from __future__ import annotations

import io
import re
import traceback
from pathlib import Path

from train_fn.errors import BadTask

_WRAPPED = re.compile(r"Caught \w+ in .*\.\nOriginal Traceback \(most recent call last\):\n")
"""How torch begins the message of what was raised in a loader process: the original's whole
traceback follows."""

_FRAME = re.compile(r'^  File "[^\n]*\n(?:    [^\n]*\n)*', re.MULTILINE)

_UNUSED = re.compile(r"Expected to have finished reduction in the prior iteration")
_TWICE = re.compile(r"Expected to mark a variable ready only once")
_KEPT = re.compile(
    r"Parameter indices which did not receive grad[^\n]*|Parameters which did not receive "
    r"grad[^\n]*|Parameter at index [^\n]*"
)
"""Of DDP's message what says which parameters are meant."""
_FOREIGN = re.compile(r"find_unused_parameters|static_graph|TORCH_DISTRIBUTED_DEBUG")
"""Arguments of DDP, which Everstep makes itself, and a variable that changes no text of ours."""

_UNUSED_ADVICE = (
    "some parameters had no part in the loss of a step, so that ranks wait for gradients that do "
    "not come. Leave them out of the "
    "model, set requires_grad=False on them, or let every loss depend on them, if only by adding "
    "0 * parameter.sum()"
)
_TWICE_ADVICE = (
    "a parameter got its gradient twice in one backward. Call the model once in loss, on all of "
    "the batch; with activation "
    "checkpointing use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)

_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_FULL_ADVICE = (
    "the disk is full. Free some space there, or let your code write to a disk that has room"
)

_USER_FRAME = re.compile(
    r'File "[^"\n]*/cache/code/[0-9a-f]{64}/([^"\n]+)", line (\d+)(?:, in (\S+))?'
)
"""A frame of uploaded code, by where nodes keep it (``user_code/modules.py``)."""


def message_of(exc: BaseException) -> str:
    """Return an exception's message; of a group also the first exception that is in it."""
    leaf = exc
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    if isinstance(exc, SystemExit):
        return (
            f"the code ended the program by sys.exit({exc.code!r}); let it return, or raise an "
            "error that says why"
        )
    if leaf is exc:
        return text_of(exc)
    return f"{text_of(exc)}; the first: {type(leaf).__name__}: {text_of(leaf)}"


def text_of(exc: BaseException) -> str:
    """Return ``str(exc)``. A user's exception may raise there; its rank must still be accounted
    for."""
    try:
        return str(exc)
    except Exception as failed:
        return f"(its __str__ raised {type(failed).__name__})"


def plain_message(message: str) -> str:
    """Return a message as its author wrote it, with what to do in Everstep in place of what to do
    with DDP."""
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
    """Return a message that names its place in the user's files at the end of its first line."""
    if place is None or place in message:
        return message
    first, *rest = message.split("\n", 1)
    return "\n".join([f"{first} ({place})", *rest])


def user_place(trace: str) -> str | None:
    """Return ``file, line N, in function`` of a traceback's innermost frame in uploaded code.

    None where there is none. A line that Python could not even parse is in no function.
    """
    frames = _USER_FRAME.findall(trace)
    if not frames:
        return None
    file, line, function = frames[-1]
    return (
        f"{file}, line {line}, in {function}"
        if function and function != "<module>"
        else f"{file}, line {line}"
    )


def ended_program(what: str, exc: SystemExit) -> BadTask:
    """Return the error for user code that called ``sys.exit``, as argparse does; ``what`` says what
    it ended."""
    place = user_place("".join(traceback.format_exception(exc)))
    where = f" ({place})" if place else ""
    return BadTask(
        f"{what}: it ended the program by sys.exit({exc.code!r}){where}. Code that parses "
        "arguments belongs "
        'below `if __name__ == "__main__":`; a rank has none, give values by code.args or '
        "code.config"
    )


def _unwrapped(message: str) -> str:
    """Take off torch's wrapper: the original's message follows its traceback's last frame, by a
    line that is not indented."""
    found = _WRAPPED.match(message)
    if found is None:
        return message
    *_, last = _FRAME.split(message[found.end() :])
    return last.strip().partition(": ")[2] or message
