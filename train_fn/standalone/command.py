"""The program: its arguments, and one rank from them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.code.source import with_code
from everstep.errors import EverstepError
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import read_spec
from storage.errors import StorageError
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn.recovery.settings import RecoverySettings
from train_fn.standalone.local import run_id_of
from train_fn.standalone.own_code import OwnCode, bring_code
from train_fn.standalone.place import place_from_env
from train_fn.standalone.process import join, set_up, stop_on_signals
from train_fn.standalone.rank import EXIT_FAILED, EXIT_USAGE, run_rank
from train_fn.step.peers import end_process_group


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
