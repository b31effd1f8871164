"""The program: its arguments, and one rank from them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.code import with_code
from everstep.errors import EverstepError, UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.spec.yaml_file import read_spec
from storage.code import CodeStore
from storage.errors import StorageError
from storage.filesystem import Storage, open_storage
from storage.run_dir import RunDir
from train_fn.context import WorkerContext
from train_fn.journal.server import Say
from train_fn.loop.attempt import train_openly
from train_fn.loop.leave import save_last
from train_fn.loop.training import RankProgress
from train_fn.recovery.launch import Left
from train_fn.recovery.settings import RecoverySettings
from train_fn.snapshots.store import snapshot_store
from train_fn.standalone.rank import (
    EXIT_FAILED,
    EXIT_USAGE,
    Ended,
    join,
    place_alone,
    place_from_env,
    run_rank,
    say_line,
    set_up,
    stop_on_signals,
)
from train_fn.step.peers import end_process_group
from train_fn.user_code.modules import work_on


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m train_fn.standalone", description="Train a spec under torchrun."
    )
    parser.add_argument(
        "spec", nargs="?", metavar="SPEC.yaml", help="file with the spec, on every host"
    )
    parser.add_argument(
        "--code",
        metavar="DIRECTORY",
        help="code of your own, the same on every host, in place of the spec's task",
    )
    parser.add_argument("--task", metavar="MODULE:CLASS", help="task in that code")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the spec",
    )
    parser.add_argument(
        "--storage",
        default="out/standalone",
        metavar="URI",
        help="directory or s3://…; rank 0 reads and writes it",
    )
    parser.add_argument(
        "--run-id",
        default=None,
        metavar="ID",
        help="the run's directory below it; by default the spec's name",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete what an earlier run left there, and begin anew"
    )
    parser.add_argument(
        "--collective-timeout-s",
        type=float,
        default=RecoverySettings().collective_timeout_s,
        metavar="S",
        help="longest wait of a rank for its peers in a collective",
    )
    return parser.parse_args(argv)


def _checked(action: Callable[[], int]) -> int:
    """Return the exit code of ``action``. An error becomes one line on stderr."""
    try:
        return action()
    except EverstepError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_USAGE
    except StorageError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank where torchrun's environment puts it. Return its exit code."""
    arguments = _arguments(argv)

    def one_rank() -> int:
        raw = None if arguments.spec is None else read_spec(arguments.spec)
        raw, archive = with_code(raw, arguments.code, arguments.task, None)
        spec = parse_spec(apply_overrides(raw, arguments.set))
        place = place_from_env(os.environ)
        storage = open_storage(arguments.storage)
        bring_code(
            spec, storage, None if archive is None else OwnCode(archive, Path(arguments.code))
        )
        run_dir = RunDir(storage, arguments.run_id or run_id_of(spec))
        set_up(spec)
        level = logging.INFO if place.rank == 0 else logging.WARNING
        logging.basicConfig(
            level=level, format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s"
        )
        stopping = stop_on_signals()
        join(spec, place, arguments.collective_timeout_s)
        try:
            return run_rank(spec, run_dir, place, fresh=arguments.fresh, stopping=stopping).code
        finally:
            end_process_group()

    return _checked(one_rank)


# ---------------------------------------------------------------- own code

# A user's code that comes from a directory of this host.


@dataclass(frozen=True)
class OwnCode:
    """A user's code that is not uploaded to the service."""

    archive: bytes
    path: Path
    """What it was packed from: a directory, or an archive."""


def bring_code(spec: RunSpec, storage: Storage, code: OwnCode | None) -> None:
    """Make a spec's code importable in this process. Raises UsageError if the code is not given or
    cannot run here."""
    if spec.code is None:
        return
    if spec.code.script is not None:
        raise UsageError(
            "code.script is a script for torchrun: run it with torchrun itself, as in `torchrun "
            "--nproc-per-node 2 train.py`; `everstep submit` gives it to the service"
        )
    if spec.code.train_fn is not None:
        raise UsageError(
            "code.train_fn runs under Ray Train alone; `everstep submit` gives it to the service"
        )
    if code is None:
        raise UsageError(
            "the spec names code of its own by a digest; give --code DIRECTORY, the code itself"
        )
    if code.path.is_dir():
        work_on(code.archive, code.path)
    else:
        CodeStore(storage).put(code.archive)


# ---------------------------------------------------------------- local

# Training in this process, as the only rank: for a debugger.

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
    progress = RankProgress()
    try:
        return train_openly(ctx, progress)
    except Exception:
        if save_last(ctx, progress):
            snapshot_store(ctx).remove_all()
        raise
