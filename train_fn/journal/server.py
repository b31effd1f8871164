"""Write a run's journal. Only one process does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from everstep.wire.drills import IN_RANK, DrillKind
from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.logs.journal import JournalEvent, journal_events
from storage.logs.journal_writer import JournalWriter
from storage.run_control import DrillOrder, ProfileOrder, StackOrder, Stop
from storage.run_dir import RunDir
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.follower import Reply, SourceEvent
from train_fn.recovery.hang import ProgressTracker

logger = logging.getLogger(__name__)


class JournalServer:
    """Write one submission's journal. Clients call ``deliver`` one at a time, in any order.

    Args:
        told_step: newest step whose metrics the journals of earlier submissions have; None if they
            have none, or if that is not known.
    """

    def __init__(self, run_dir: RunDir, submission: int, told_step: int | None = None) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._told_step = told_step
        self._writer: JournalWriter | None = None
        self._stop: Stop | None = None
        self._profile: ProfileOrder | None = None
        self._flip: DrillOrder | None = None
        self._stacks: StackOrder | None = None
        self._progress = ProgressTracker(told_step)
        try:
            self._open()
        except StorageError as exc:
            # Ray never restarts an actor that fails to start. So the next call opens the journal.
            logger.warning("the journal cannot be opened now: %s", exc)

    def _open(self) -> JournalWriter:
        """Return the open journal. Raise StorageError if it cannot be opened."""
        if self._writer is None:
            writer = JournalWriter(self._run_dir, self._submission)
            self._profile = self._flip = self._stacks = None
            self._progress = ProgressTracker(self._told_step)
            try:
                if writer.last_n:
                    # after an earlier server was killed, for replies
                    for event in journal_events(self._run_dir, (self._submission,)):
                        self._note(event)
            except BaseException:
                writer.close()
                raise
            self._writer = writer
        return self._writer

    def deliver(
        self, source: str, events: Sequence[SourceEvent], stop: Stop | None = None
    ) -> Reply:
        """Write those of ``events`` that are new. They are durable on return.

        Events of a rank whose attempt was replaced are dropped. The rank learns this from the
        reply's ``progress``. Raise StorageError if writing fails; send the events again then.
        """
        self._stop = stop or self._stop
        try:
            writer = self._open()
            if events:
                for line in writer.append([self._line(source, event) for event in events]):
                    self._note(line)
        except StorageError:
            self._progress.note_unwritten(source, ((each.kind, each.attempt) for each in events))
            raise
        self._progress.note_written(source)
        return Reply(
            writer.last_source_n(source),
            self._stop,
            self._progress.progress(),
            self._profile,
            self._flip,
            stacks=self._stacks,
        )

    def _line(self, source: str, event: SourceEvent) -> JournalEvent:
        return JournalEvent(
            at=event.at,
            kind=event.kind,
            submission=self._submission,
            attempt=event.attempt,
            data=event.data,
            source=source,
            source_n=event.source_n,
        )

    def _note(self, event: JournalEvent) -> None:
        self._progress.note(event.kind, event.attempt, event.data, event.at)
        if event.kind is EventKind.PROFILE_ORDERED:
            self._profile = ProfileOrder(
                event.data["id"], event.data["rank"], event.data["steps"], event.attempt
            )
        elif event.kind is EventKind.STACKS_ORDERED:
            self._stacks = StackOrder(event.data["id"], event.attempt)
        elif event.kind is EventKind.DRILL_STARTED and event.data["kind"] in IN_RANK:
            kind = DrillKind(event.data["kind"])
            self._flip = DrillOrder(event.data["id"], kind, event.data["rank"], event.attempt)


# ---------------------------------------------------------------- local journal

# The journal of a run without a driver: rank 0 writes it, and prints the progress to the
# terminal.

STEPS_EVERY_S = 1.0
"""Shortest time in seconds between two printed steps."""
_SHOWN = ("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "mfu")

Say = Callable[[str], None]


class LocalJournal:
    """Implement the loop's JournalClient. A thread writes, as under a driver. Ranks other than 0
    drop their events.

    Args:
        client: writes the events; None for ranks other than 0.
        stopping: set to request a pause.
        say: prints a line.
    """

    def __init__(
        self, client: ActorJournalClient | None, stopping: threading.Event, say: Say
    ) -> None:
        self._client, self._stopping, self._say = client, stopping, say
        self._printed_at = float("-inf")
        self._total_steps: int | None = None
        self.step = 0
        """Steps done, as of this rank's events."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last evaluation."""

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        if self._client is None:
            return
        self._client.emit(kind, data)
        line = self._line(kind, data)
        if line is not None:
            self._say(line)

    @property
    def stop_requested(self) -> Stop | None:
        return "pause" if self._stopping.is_set() else None

    def flush(self, timeout_s: float) -> bool:
        return self._client is None or self._client.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write the remaining events, but return after ``timeout_s`` seconds."""
        if self._client is not None:
            self._client.close(timeout_s)

    def _line(self, kind: EventKind, data: dict[str, Any]) -> str | None:
        """Return the line to print for an event; None for most events."""
        match kind:
            case EventKind.RESTORED:
                self.step = int(data["step"])
                return (
                    None
                    if data["source"] == "fresh"
                    else (
                        f"goes on from step {data['step']} ({data['checkpoint'] or data['source']})"
                    )
                )
            case EventKind.TRAINING_STARTED:
                self._total_steps = data["total_steps"]
                return _beginning(data)
            case EventKind.METRICS:
                return self._steps(data["points"])
            case EventKind.EVALUATED:
                self.metrics = dict(data["metrics"])
                return f"step {data['step']}, epoch {data['epoch']}: {_numbers(data['metrics'])}"
            case EventKind.CHECKPOINT_COMMITTED:
                return f"checkpoint of step {data['step']}, {data['size_bytes'] / 1e6:.1f} MB"
            case EventKind.CHECKPOINT_FAILED:
                return f"the checkpoint of step {data['step']} failed: {data['error']}"
            case _:
                return None

    def _steps(self, points: list[dict[str, Any]]) -> str | None:
        if points:
            self.step = int(points[-1]["step"])
        if not points or time.monotonic() - self._printed_at < STEPS_EVERY_S:
            return None
        self._printed_at = time.monotonic()
        values = points[-1]["values"]
        return (
            f"step {self.step}{f'/{self._total_steps}' if self._total_steps else ''}: "
            f"{_numbers({name: values[name] for name in _SHOWN if name in values})}"
        )


def open_local_journal(
    run_dir: RunDir, submission: int, attempt: int, rank: int, stopping: threading.Event, say: Say
) -> LocalJournal:
    """Return the journal client of one rank. Rank 0 becomes the submission's only writer.
    ``stopping`` requests a pause."""
    client = None
    if rank == 0:
        writer = JournalServer(run_dir, submission)
        client = ActorJournalClient(
            writer.deliver,
            f"rank-0.a{attempt:03d}",
            attempt,
            interval_s=max(0.5, run_dir.storage.batch_s),
        )
    return LocalJournal(client, stopping, say)


def _beginning(data: dict[str, Any]) -> str:
    """Return the line to print for ``training_started``. A user's own loop does not reveal all of
    its facts."""
    known = {
        "parameters": data["num_parameters"],
        "samples": data["num_samples"],
        "steps": data["total_steps"],
    }
    words = [f"{number:,} {name}" for name, number in known.items() if number is not None]
    if data["micro_batch_size"] is not None:
        words.append(f"micro-batches of {data['micro_batch_size']}")
    _, warned, warning = str(data.get("guarantee")).partition("WARNING: ")
    warnings = [*([warning] if warned else []), *(data.get("warnings") or ())]
    return ", ".join([*words, f"on {data['device']}"]) + "".join(
        f"\nWARNING: {each}" for each in warnings
    )


def _numbers(values: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
