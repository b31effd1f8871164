"""End the actors that outlive a driver: its controller with the ranks, until these have saved and
exited, and the journal that they report to.

Both are detached actors. The driver of the next submission waits for their end before it starts its
own journal. So the older journal is complete by then, and the older submission writes nothing more.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from train_fn.ray_train.journal_actor import NAMESPACE

_NAME = re.compile(r"(?P<kind>controller|journal)-(?P<run_id>.+)-s(?P<submission>\d+)(-[0-9a-f]+)?")
_POLL_S = 0.05
_END_S = 5.0
"""Seconds to wait for killed actors to end."""

logger = logging.getLogger(__name__)


def controller_name(run_id: str, submission: int) -> str:
    """Return a unique name for a controller, since a killed one may keep its name for a moment."""
    return f"controller-{run_id}-s{submission:03d}-{uuid.uuid4().hex[:8]}"


def end_older_submissions(run_id: str, submission: int, patience_s: float) -> None:
    """Wait at most ``patience_s`` seconds for the ranks of older submissions to save and exit, then
    kill the actors that remain.

    A controller whose driver died makes its ranks exit by itself. One whose driver was replaced but
    still lives is asked to do so.
    """

    def left() -> list[str]:
        return actors_of_older(list_named_actors(), run_id, submission)

    controllers = [name for name in left() if name.startswith("controller")]
    if controllers:
        logger.info(
            "waiting for the ranks of an older submission to save and exit (%s)",
            ", ".join(controllers),
        )
    for name in controllers:
        with suppress(ValueError):  # it has ended in the meantime
            ray.get_actor(name, namespace=NAMESPACE).leave.remote()
    if not _wait(lambda: not any(name.startswith("controller") for name in left()), patience_s):
        logger.warning(
            "the ranks of an older submission did not exit within %g s; killing them",
            patience_s,
        )
    for name in left():
        with suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    if not _wait(lambda: not left(), _END_S):
        logger.warning(
            "actors of an older submission were killed but still exist: %s", ", ".join(left())
        )


def actors_of_older(names: list[str], run_id: str, submission: int) -> list[str]:
    """Return those names of actors that belong to earlier submissions of a run."""
    parsed = [match for match in map(_NAME.fullmatch, names) if match is not None]
    return [
        match[0]
        for match in parsed
        if match["run_id"] == run_id and int(match["submission"]) < submission
    ]


def _wait(fact: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
