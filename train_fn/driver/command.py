"""The program: its arguments, its signals, its exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from storage.cluster import EXIT_STORAGE, KNOWN_VARIABLE, STORAGE_WORDS, Known, check_known
from storage.errors import StorageError, StorageMismatch
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn.driver.fit_loop import EXIT_REPLACED, require_newest
from train_fn.driver.supervision import TRAIN, Driver
from train_fn.errors import Replaced
from train_fn.journal.rank_log import RankLog
from train_fn.recovery.settings import RecoverySettings

EXIT_FAILED = 5
"""Not 1, with which Python ends if it cannot even run this module."""
EXIT_TERMINATED = 143
SETTLE_S = 5.0
"""How long a network filesystem may take to show what the service knows to be there."""
SETTLE_POLL_S = 0.5

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, *, train: str = TRAIN) -> int:
    """Run the driver and return its exit code."""
    arguments = _arguments(argv)
    settings = RecoverySettings.from_env(os.environ)
    run_dir = RunDir(open_storage(arguments.storage), arguments.run_id)
    log = RankLog(run_dir, arguments.submission, 0, None)
    try:
        # Before anything is written: the storage may be another one, on this node alone or
        # everywhere.
        check_when_settled(run_dir, Known.parse(os.environ.get(KNOWN_VARIABLE)))
        require_newest(run_dir, arguments.submission)
    except Replaced as exc:
        print(exc, file=sys.stderr)
        return EXIT_REPLACED
    except StorageError as exc:
        return _storage_unavailable(exc)
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    # for the Ray job's own log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log.start()
    try:
        Driver(run_dir, arguments.submission, settings, train=train).run()
        return 0
    except Replaced as exc:
        logger.error("%s", exc)
        return EXIT_REPLACED
    except SystemExit:
        logger.warning("the driver was asked to end; it exits without finishing its run")
        log.close()
        os._exit(EXIT_TERMINATED)
    except StorageError as exc:
        logger.exception(
            "the driver cannot use the run's storage; its run is to be submitted again"
        )
        return _storage_unavailable(exc)
    except Exception:
        logger.exception("the driver failed; its run is to be submitted again")
        return EXIT_FAILED
    finally:
        log.close()


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Exit at once, without ``finished``. The user did not ask for this, so the service submits the
    run again."""
    raise SystemExit(EXIT_TERMINATED)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train_fn.driver", description="Drive one submission of a run."
    )
    parser.add_argument(
        "--storage", required=True, metavar="URI", help="storage that holds the run's directory"
    )
    parser.add_argument("--run-id", required=True, metavar="ID", help="run to drive")
    parser.add_argument(
        "--submission",
        required=True,
        type=int,
        metavar="N",
        help="this submission's number, from 1",
    )
    return parser.parse_args(argv)


def check_when_settled(run_dir: RunDir, known: Known) -> None:
    """Like ``check_known``, but give a network filesystem some seconds to show what others have
    written. Raises StorageError."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            check_known(run_dir, known)
            return
        except StorageMismatch:
            if time.monotonic() >= deadline:
                raise
        time.sleep(SETTLE_POLL_S)


def _storage_unavailable(problem: StorageError) -> int:
    """Print why, as the service looks for it in the job's message. Return the exit code."""
    words = " ".join(f"{platform.node()}: {problem}".split())
    print(f"{STORAGE_WORDS}{words}", file=sys.stderr, flush=True)
    return EXIT_STORAGE
