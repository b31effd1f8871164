"""Record a run at Weights & Biases from its journals: one run there over all attempts.

Its id is that of the run. A process that takes over makes the rows of all journals anew, and skips
those that the server has. Without a server it writes them all to a directory of its own, which then
replaces those of older processes.

``python -m train_fn.journal.wandb_tracking STORAGE RUN_ID SUBMISSION`` does so until standard input
ends, as it does when the driver closes it or dies. W&B's package is large, keeps threads and a
program of its own, and waits for its server at exit. None of that is in the driver.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.spec.run_spec import WANDB_KEY, RunSpec
from everstep.spec.sections import WandbSpec
from everstep.supported import install_command
from everstep.text import failure as failure_words
from everstep.wire import Failure
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.run_dir import RunDir
from train_fn.journal.follower import JournalFollower, NotNow, measured

READ_S = 60.0
"""Longest wait for the last events; the driver ends this process earlier."""
NICE = 10
INIT_S = 30.0
"""Longest wait for the server to accept the run."""
COPY_EVERY_S = 60.0
"""Interval of copies to storage that W&B cannot write to itself."""
NOT_INSTALLED = "wandb is not installed on the driver's node; run there: "

logger = logging.getLogger(__name__)


class WandbTracking(JournalFollower):
    """Keep a run at W&B up to date with the journals."""

    def __init__(self, run_dir: RunDir, submission: int, has_key: bool) -> None:
        """
        Args:
            run_dir: The run.
            submission: The submission of this driver.
            has_key: Whether the environment has WANDB_API_KEY.
        """
        super().__init__(run_dir, submission, "wandb")
        spec = run_dir.read_spec()
        self._spec, self._wanted = spec, spec.wandb or WandbSpec()
        self._online = self._wanted.mode == "online" or (self._wanted.mode == "auto" and has_key)
        self._rows = Rows()
        self._run: Any = None
        self._made = 0
        """Rows made so far, over all journals."""
        self._there = 0
        """Rows that the server had when this process began."""
        self._exit_code = 0
        local = run_dir.local_path
        self._temporary = None if local else tempfile.mkdtemp(prefix="everstep-wandb-")
        self._base = Path(local or str(self._temporary))
        self._copied_at = time.monotonic()

    def take(self, submission: int, events: Sequence[JournalEvent]) -> None:
        if not events:
            return
        if self._run is None:
            self._open()
        for event in events:
            for row in self._rows.of(event):
                if self._made >= self._there:
                    self._run.log(row, step=self._made)
                self._made += 1
            self._note(event)
        if self._temporary and time.monotonic() - self._copied_at > COPY_EVERY_S:
            self._copy()

    def finish(self) -> None:
        """End the run at W&B, and keep its files. Blocks until all is written or sent."""
        if self._run is None:
            return
        self._run.finish(exit_code=self._exit_code)
        import wandb

        wandb.teardown(self._exit_code)  # its writer has written when this returns
        if not self._online:
            self._replace_older()
        if self._temporary:
            self._copy()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _open(self) -> None:
        try:
            import wandb
        except ImportError:
            self._tell(problem=NOT_INSTALLED + install_command("wandb"))
            raise
        try:
            self._run = self._init(wandb)
        except wandb.errors.Error as exc:
            if not self._online or self._wanted.mode == "online":
                self._tell(problem=f"{type(exc).__name__}: {exc}")
                raise NotNow(f"{type(exc).__name__}: {exc}") from exc
            logger.warning("wandb: recording offline, since the server did not answer: %s", exc)
            self._online = False
            self._run = self._init(wandb)
        self._there = int(self._run.starting_step) if self._online else 0
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self._tell(url=self._run.url if self._online else None)

    def _init(self, wandb: Any) -> Any:
        """Begin or resume the run. Nothing of this process is reported: it does not train."""
        spec: RunSpec = self._spec
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            init_timeout=INIT_S,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        return wandb.init(
            config=config_of(spec),
            dir=str(self._base),
            entity=self._wanted.entity,
            id=self._run_dir.run_id,
            mode="online" if self._online else "offline",
            name=spec.name,
            project=self._wanted.project or spec.project,
            resume="allow",
            settings=settings,
            tags=[f"{key}={value}"[:64] for key, value in spec.tags.items()],
        )

    def _note(self, event: JournalEvent) -> None:
        """Record a failure in the summary, and how the run ends."""
        if event.kind is EventKind.FAILURE:
            failure = Failure.of(event)
            words = f"step {failure.step}: {failure_words.who(failure)}"
            self._run.summary[f"everstep/failure/{event.submission}-{event.n}"] = words
        elif event.kind is EventKind.FINISHED:
            outcome = str(event.data.get("outcome"))
            self._run.summary["everstep/outcome"] = outcome
            self._exit_code = int(outcome == "failed")

    def _directory(self) -> Path:
        """Return W&B's directory of this process."""
        return Path(self._run.dir).parent

    def _replace_older(self) -> None:
        """Remove what older processes wrote offline: this one has written all of it again."""
        mine = self._directory()
        for each in mine.parent.glob(f"offline-run-*-{self._run_dir.run_id}"):
            if each != mine:
                shutil.rmtree(each, ignore_errors=True)

    def _copy(self) -> None:
        """Copy the record to storage that W&B cannot write to. One name: it replaces older ones."""
        for path in self._directory().glob("*.wandb"):
            self._run_dir.files.write(self._run_dir.wandb_path(path.name), path.read_bytes())
        self._copied_at = time.monotonic()

    def _tell(self, url: str | None = None, problem: str | None = None) -> None:
        """Keep where the run is recorded, for its page."""
        place = None
        if self._run is not None:
            name = "" if self._temporary else f"/{self._directory().name}"
            place = f"{self._run_dir.uri}/wandb{name}"
        found = {"url": url, "files": place, "problem": problem}
        self._run_dir.files.write(self._run_dir.wandb_path("run.json"), json.dumps(found).encode())


# ---------------------------------------------------------------- wandb rows

# The rows of a run's history at Weights & Biases: a pure function of the journals, so that every
# process makes the same ones in the same order.

STEP = "step"
"""Column with the training step, the x-axis of all charts. W&B's own step counts rows."""


class Rows:
    """Converts events to rows. Of a step that is repeated after a failure, the first values
    stay."""

    def __init__(self) -> None:
        self._furthest = {EventKind.METRICS: 0, EventKind.EVALUATED: 0}

    def of(self, event: JournalEvent) -> Iterator[dict[str, float]]:
        """Yield the rows for an event. Most events have none."""
        if event.kind not in self._furthest:
            return
        for step, at, values in measured(event):
            if step > self._furthest[event.kind] and values:
                self._furthest[event.kind] = step
                yield {**values, STEP: step, "_timestamp": at}


def config_of(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as W&B's config, without the names of secrets and the environment."""
    shown = spec.model_dump_json(exclude={"secrets", "env", "notify"}, exclude_none=True)
    config: dict[str, Any] = json.loads(shown)
    return config


def main(argv: Sequence[str]) -> int:
    uri, run_id, submission = argv
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    os.nice(NICE)
    run_dir = RunDir(open_storage(uri), run_id)
    tracking = WandbTracking(run_dir, int(submission), bool(os.environ.get(WANDB_KEY)))
    with suppress(ImportError):  # the tracking says so
        importlib.import_module("wandb")  # takes seconds, which a short run does not have later
    tracking.start()
    while sys.stdin.buffer.read(1):
        pass
    tracking.close(READ_S)
    tracking.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
