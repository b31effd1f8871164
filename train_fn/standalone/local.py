"""Training in this process, as the only rank: for a debugger."""

from __future__ import annotations

import threading
import time

from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn.context import WorkerContext
from train_fn.journal.local_journal import Say
from train_fn.loop.attempt import train_openly
from train_fn.loop.departure import save_last
from train_fn.loop.training import Progress
from train_fn.recovery.launch import Left
from train_fn.recovery.settings import RecoverySettings
from train_fn.snapshots.store import snapshot_store
from train_fn.standalone.own_code import OwnCode, bring_code
from train_fn.standalone.place import place_alone
from train_fn.standalone.process import join, set_up
from train_fn.standalone.rank import Ended, run_rank, say_line
from train_fn.step.peers import end_process_group

__all__ = ["OwnCode", "run_local"]


def run_local(
    spec: RunSpec,
    storage: str,
    run_id: str | None,
    say: Say = say_line,
    code: OwnCode | None = None,
) -> Ended:
    """Train in this process, alone. What raises, raises here, with its frames. No loader process is
    started, so that breakpoints in data sets hold.

    Args:
        run_id: a run to begin or continue; None for a new run each time.
    """
    bring_code(spec, open_storage(storage), code)
    loader = spec.train.loader.model_copy(update={"num_workers": 0})
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"loader": loader})})
    run_dir = RunDir(
        open_storage(storage), run_id or f"{run_id_of(spec)}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    place = place_alone()
    set_up(spec)
    join(spec, place, RecoverySettings().collective_timeout_s)
    try:
        return run_rank(
            spec,
            run_dir,
            place,
            fresh=False,
            stopping=threading.Event(),
            say=say,
            train=train_in_the_open,
        )
    finally:
        end_process_group()


def run_id_of(spec: RunSpec) -> str:
    """Return the default name of a run's directory: the spec's name, with ``-`` in place of letters
    that a file's name may not have."""
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-"
        for letter in spec.name
    )


def train_in_the_open(ctx: WorkerContext) -> Left | None:
    """Like ``train``, but an exception keeps its frames. No peer waits for this rank.

    The state goes into a checkpoint. Snapshots on this node stay until their state is in one.
    """
    progress = Progress()
    try:
        return train_openly(ctx, progress)
    except Exception:
        if save_last(ctx, progress):
            snapshot_store(ctx).remove_all()
        raise
