"""Write a run's TensorBoard files from its journals, in the driver, so that no step waits for it.

Each submission has a file. Its bytes depend on the journals alone, so the driver of a later
submission completes the file of an earlier one. A step that is repeated after a failure is written
once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from google_crc32c import value as crc32c

from everstep.text import failure as failure_words
from everstep.wire import Failure
from everstep.wire.events import EventKind
from storage.logs.event_files import EventFile, open_event_file
from storage.logs.journal import JournalEvent
from storage.run_dir import RunDir
from train_fn.journal.follower import JournalFollower, measured

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

RESTARTS_TAG = "everstep/restarts"
_FRAME_BYTES = 16
_MASK32 = 0xFFFFFFFF


class TensorBoardFiles(JournalFollower):
    """Write the files of all submissions up to this one, on a thread from ``start`` to
    ``close``."""

    def __init__(self, run_dir: RunDir, submission: int) -> None:
        super().__init__(run_dir, submission, "tensorboard")
        self._points = Points()
        self._file: EventFile | None = None
        self._file_of: int | None = None
        """Its submission."""

    def take(self, submission: int, events: Sequence[JournalEvent]) -> None:
        if events and self._file_of != submission:
            name = f"events.out.tfevents.{int(events[0].at):010d}.everstep.s{submission:03d}"
            header = _framed(
                _event(events[0].at, 0, file_version="brain.Event:2").SerializeToString()
            )
            self._file, self._file_of = open_event_file(self._run_dir, name, header), submission
        for event in events:
            for record in self._points.of(event):
                data = record.SerializeToString()
                assert self._file is not None
                if self._file.add(len(data) + _FRAME_BYTES):
                    self._file.put(_framed(data))
        if self._file is not None:
            self._file.flush()


class Points:
    """Convert events to TensorBoard's records. Remembers the last step of each series, over all
    submissions."""

    def __init__(self) -> None:
        self._furthest = {EventKind.METRICS: 0, EventKind.EVALUATED: 0}
        self._last_text_step = -1
        self._failure: JournalEvent | None = None

    def of(self, event: JournalEvent) -> Iterator[Event]:
        """Yield the records for an event. Most events have none."""
        data = event.data
        match event.kind:
            case EventKind.METRICS | EventKind.EVALUATED:
                for step, at, values in measured(event):
                    yield from self._scalars(event.kind, step, at, values)
            case EventKind.FAILURE:
                self._failure = event
            case EventKind.RECOVERED if self._failure is not None:
                yield self._text(event.at, f"{_failed(self._failure)}\n\n{_recovered(data)}")
                self._failure = None
            case EventKind.FINISHED if data.get("outcome") == "failed":
                reason = data.get("reason") or {}
                failed = f"{_failed(self._failure)}\n\n" if self._failure is not None else ""
                yield self._text(
                    event.at,
                    f"{failed}The run failed: {reason.get('message') or reason.get('code')}",
                )

    def _scalars(
        self, kind: EventKind, step: int, at: float, values: dict[str, float]
    ) -> Iterator[Event]:
        if step <= self._furthest[kind] or not values:
            return
        self._furthest[kind] = step
        event = _event(at, step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        yield event

    def _text(self, at: float, text: str) -> Event:
        """Return a Markdown text at the step that the run has reached. No two texts have the same
        step, since TensorBoard would show only one of them."""
        self._last_text_step = max(self._furthest[EventKind.METRICS], self._last_text_step + 1)
        event = _event(at, self._last_text_step)
        value = event.summary.value.add(tag=RESTARTS_TAG)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append(text.encode())
        return event


def _failed(event: JournalEvent) -> str:
    failure = Failure.of(event)
    words = [failure_words.headline(failure), *failure_words.story(failure)[:-1]]
    return f"**Attempt {event.attempt} failed at step {failure.step}**: " + "\n\n".join(words)


def _recovered(data: dict[str, Any]) -> str:
    lost = failure_words.of_recovery(data)
    return (
        f"Training again after {data.get('recovery_s')} s with {data.get('world_size_after')} "
        f"ranks (before: {data.get('world_size_before')}){f', {lost}' if lost else ''}."
    )


def _event(at: float, step: int, **what: Any) -> Event:
    # Imported here, since the package imports much that no other part of the driver needs.
    from tensorboardX.proto.event_pb2 import Event

    return Event(wall_time=at, step=step, **what)


def _framed(data: bytes) -> bytes:
    """Return a record in TFRecord's form: length, its checksum, the bytes, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _checksum(length)) + data + struct.pack("<I", _checksum(data))


def _checksum(data: bytes) -> int:
    """Return the CRC-32C, rotated and masked as TFRecord's format requires."""
    value: int = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & _MASK32
