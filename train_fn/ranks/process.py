"""The process of a rank: what its host and its training thread tell each other.

A process serves one attempt. The host's calls come on threads of their own and share this module's
state with the thread that trains, which is the main one of a process that was forked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from train_fn.errors import EndedItself
from train_fn.node import children
from train_fn.node.memory import keep_memory
from train_fn.node.network import (
    meet_at_the_given_address,
    meet_on_the_clusters_network,
    take_debug_level,
    watch_peers,
)
from train_fn.node.secrets import process_redactor
from train_fn.recovery.hang import TRAINING_THREAD
from train_fn.recovery.launch import RankLaunch
from train_fn.recovery.settings import take_environment
from train_fn.step.nccl import abort_collectives, begin_attempt
from train_fn.step.peers import close_connections
from train_fn.step.place_watch import asker

RANK_NICENESS = -10
"""Priority of ranks over the processes that manage cluster and run: a rank that waits for a core
delays all its peers."""

NODE_CORES_VARIABLE = "EVERSTEP_NODE_CORES"
"""Environment variable with the node's own cores, separated by commas. The embedded cluster sets it
for its nodes."""

FREED_S = 2.0
"""Longest wait in seconds for a rank to leave by itself, since its peers' connections break."""


class _Attempt:
    """What the host's calls and the training thread share."""

    def __init__(self, launch: RankLaunch) -> None:
        self.launch = launch
        self.yield_asked = threading.Event()
        self.hands_over = False
        """Whether a group follows at once, if the rank is asked to exit."""
        self.abandoned = threading.Event()
        self.training: threading.Thread | None = None
        self.raise_error: Callable[[BaseException], object] | None = None
        """Ends the attempt of this rank with an error, from any thread."""
        self.flush: Callable[[], object] = bool
        """Makes the rank's events durable, as far as possible in a moment."""
        self.pid = os.getpid()
        self.tell: Callable[..., object] = lambda name, *facts: None
        """Tells the host of a rank in another process."""


_attempt: _Attempt | None = None


# -- calls of the host


def prepare(launch: RankLaunch, ip: str, *, over_nccl: bool) -> None:
    """Begin the attempt of this process. Its environment is set before anything reads it.

    Args:
        ip: the node's address in the cluster.
    """
    global _attempt
    _attempt = _Attempt(launch)
    children.begin()
    take_environment(launch.env)
    take_debug_level(over_nccl=over_nccl)
    keep_memory()
    meet_on_the_clusters_network(ip)
    meet_at_the_given_address()
    watch_peers(ip, launch.silent_peer_s)
    begin_attempt()
    take_precedence()
    os._exit = _tell_and_exit


def tell_host(tell: Callable[..., object]) -> None:
    """Let ``tell`` bring to the host what it has to know of a rank in another process."""
    attempt = _current()
    attempt.tell, attempt.training = tell, threading.current_thread()
    attempt.raise_error = lambda error: tell("raise_error", error)


def take_precedence() -> None:
    """Raise the priority of this process if the system permits it (root, or CAP_SYS_NICE), and bind
    it to its node's own cores if it has any."""
    cores = [int(core) for core in os.environ.get(NODE_CORES_VARIABLE, "").split(",") if core]
    threads = Path("/proc/self/task")
    for thread in [int(entry.name) for entry in threads.iterdir()] if threads.exists() else [0]:
        with contextlib.suppress(OSError):  # not permitted, or a thread that has just ended
            os.setpriority(os.PRIO_PROCESS, thread, RANK_NICENESS)
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


def ask_to_yield(number: int, hands_over: bool) -> None:
    """Ask the loop to exit at a step that all ranks agree on: with a final checkpoint, or, if it
    hands over, with its state on the node. A request that comes after that attempt is void."""
    attempt = _current()
    if attempt.launch.attempt != number:
        return
    attempt.hands_over = hands_over
    attempt.yield_asked.set()


def abandon() -> None:
    """Make the loop leave its step: a peer is gone, or is assumed to be.

    NCCL's collectives are aborted. Gloo's fail by themselves if a peer has died and nothing holds
    its connections. Otherwise this rank closes its own soon. If the peer was only cut off from the
    head, the loop may leave at its next step before. Return at once: an abort may take long, and
    this process must answer calls meanwhile.
    """
    attempt = _current()
    attempt.abandoned.set()
    threading.Thread(target=_free, args=(attempt,), name="abort-collectives", daemon=True).start()


def _free(attempt: _Attempt) -> None:
    """Free the training thread from collectives that do not end."""
    abort_collectives()
    if attempt.training is not None:
        attempt.training.join(FREED_S)
        if attempt.training.is_alive():
            close_connections()


def stack() -> str:
    """Return the Python stacks of this process, with the training thread's last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = sorted(
        (
            names.get(ident, "?").startswith(TRAINING_THREAD),
            f"Thread {names.get(ident, '?')}\n{''.join(traceback.format_stack(frame))}",
        )
        for ident, frame in sys._current_frames().items()
    )
    return "\n".join(text for _, text in texts)


# -- calls of the training thread


def current_launch() -> RankLaunch:
    """Return the parameters of the attempt."""
    return _current().launch


def yield_asked() -> bool:
    """Return whether the controller has asked the rank to exit."""
    return _current().yield_asked.is_set()


def hands_over() -> bool:
    """Return whether the controller has asked the rank to exit for a group that follows at once."""
    attempt = _current()
    return attempt.yield_asked.is_set() and attempt.hands_over


def is_abandoned() -> bool:
    """Return whether the attempt was given up."""
    return _current().abandoned.is_set()


def note_flush(flush: Callable[[], object]) -> None:
    """Note how the rank's events are made durable."""
    _current().flush = flush


def note_trained() -> None:
    """Note that the loop has made its last step."""
    _current().tell("trained")


def note_kept(step: int) -> None:
    """Note the step whose state is on this node while the rank still waits for its peers."""
    _current().tell("kept", step)


def note_state_bytes(num_bytes: int) -> None:
    """Note the size of the state that the rank would leave on its node."""
    _current().tell("state_bytes", num_bytes)


def remember(name: str, value: Any) -> None:
    """Let later ranks of the host know what takes long to find out."""
    _current().tell("remember", name, value)


def _current() -> _Attempt:
    assert _attempt is not None, "a rank runs without its launch"
    return _attempt


# ---------------------------------------------------------------- own exits

# A rank whose code calls ``os._exit`` would be gone without a word, and would come back for ever.

EXIT_S = 30.0
"""Seconds after which a process that has called ``os._exit`` ends itself, if nobody has."""

_exit = os._exit


def _tell_and_exit(status: int) -> NoReturn:
    """End this process. If code of the user's asks for it in a rank, let the controller know the
    place first, and let it end the process."""
    attempt, frame = _attempt, sys._getframe(1)
    if (
        attempt is not None
        and attempt.raise_error is not None
        and attempt.pid == os.getpid()  # not a process that was forked
        and asker(frame) is not None
    ):
        error = EndedItself(
            f"the code called os._exit({status!r}), which ends a rank without an error; return "
            "instead, or raise an error that says why"
        )
        error.add_note(process_redactor()("".join(traceback.format_stack(frame))))
        attempt.flush()
        attempt.raise_error(error)
        close_connections()
        threading.Event().wait(EXIT_S)
    _exit(status)
