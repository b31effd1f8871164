"""One training of a rehearsal: its ranks as processes of this machine, over several attempts."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.code import unpack
from storage.filesystem import open_storage
from storage.logs.journal import journal_events
from storage.run_dir import RunDir
from train_fn.node.network import store_at
from train_fn.node.node_dir import shared_memory_root
from train_fn.rehearsal.comparison import Record, read_record
from train_fn.rehearsal.rank import Attempt, RankEnded, serve
from train_fn.rehearsal.recorder import Orders

ATTEMPT_S = 240.0
"""Longest time of an attempt."""
FAREWELL_S = 45.0
"""Longest time that ranks may take to leave once one of them has died."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Setup:
    """What all trainings of a rehearsal have in common."""

    spec: RunSpec
    archive: bytes | None
    directory: Path
    world_size: int
    last_step: int
    most_samples: int | None
    name: str
    """Begins the ids of the runs."""

    @property
    def storage(self) -> str:
        return str(self.directory / "storage")


@dataclass
class AttemptResult:
    """What became of one attempt."""

    records: list[Record]
    ended: dict[int, RankEnded | None]
    """By rank; None for one that was killed, or that waited when it was ended."""
    done: bool
    """Whether all ranks came to the last step, or to the end of the code."""
    hung: bool = False
    was_ordered: bool = False
    """Whether the orders were to die."""
    restored: dict[str, Any] | None = None
    """The event that says where it began."""

    @property
    def failure(self) -> RankEnded | None:
        """Return how the rank ended that failed by itself, or one that followed."""
        failed = [each for each in self.ended.values() if each is not None and each.error]
        return next((each for each in failed if not each.is_collateral), next(iter(failed), None))

    @property
    def error(self) -> str | None:
        """Return what ended it, if that was not the death of a rank."""
        if (failure := self.failure) is not None:
            return failure.error
        if self.hung:
            return "a rank hung, or took too long"
        return None if self.done or self.was_ordered else "a rank's process died by itself"


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    word: str | None = None
    """"done" or "parked", once the rank waits."""
    ended: RankEnded | None = None
    is_gone: bool = False


@dataclass
class Trial:
    """A training in attempts, one after the other."""

    setup: Setup
    number: int
    attempts: list[AttemptResult] = field(default_factory=list)
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        return f"{self.setup.name}-{self.number}"

    @property
    def run_dir(self) -> RunDir:
        return RunDir(open_storage(self.setup.storage), self.run_id)

    @property
    def log(self) -> Path:
        return self.setup.directory / f"{self.run_id}.log"

    @property
    def _work_dir(self) -> Path:
        # as in a service, so that errors name the line of a file here
        return self.setup.directory / "runs" / self.run_id / "workdir"

    def attempt(self, orders: Orders) -> AttemptResult:
        """Run an attempt to its end, whatever that is."""
        setup, number = self.setup, len(self.attempts) + 1
        if not self._work_dir.exists():
            self._work_dir.mkdir(parents=True)
            code = setup.spec.code
            if setup.archive is not None and code is not None and code.script is not None:
                unpack(setup.archive, self._work_dir)
        base = setup.directory / f"{self.run_id}-{number}"
        base.mkdir()
        store = store_at("127.0.0.1", timedelta(seconds=60))
        for rank in range(setup.world_size):
            self._ranks[rank] = self._start()
            self._ranks[rank].pipe.send(
                Attempt(
                    spec=setup.spec,
                    storage=setup.storage,
                    run_id=self.run_id,
                    rank=rank,
                    world_size=setup.world_size,
                    launch=self.run_id,
                    rendezvous=str(base / "rendezvous"),
                    port=store.port,
                    record=base / f"{rank}.jsonl",
                    work_dir=self._work_dir,
                    orders=orders,
                    most_samples=setup.most_samples,
                )
            )
        done, hung = self._watch(orders)
        result = AttemptResult(
            [read_record(base / f"{rank}.jsonl") for rank in range(setup.world_size)],
            {rank: each.ended for rank, each in self._ranks.items()},
            done,
            hung,
            orders.dies_at is not None,
        )
        self.attempts.append(result)
        self._ranks = {}
        del store
        return result

    def _start(self) -> _Rank:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, str(self.log)))
        process.start()
        theirs.close()
        return _Rank(process, mine)

    def _watch(self, orders: Orders) -> tuple[bool, bool]:
        """Wait until the attempt is over, and end what waits. Return whether the training is done,
        and whether a rank had to be ended."""
        deadline, has_died = time.monotonic() + ATTEMPT_S, False
        ranks = self._ranks.values()
        while True:
            for each in ranks:
                self._hear(each)
            if not has_died and any(each.is_gone or _failed(each) for each in ranks):
                has_died = True
                deadline = min(deadline, time.monotonic() + FAREWELL_S)
            if all(each.word or each.ended or each.is_gone for each in ranks):
                break
            if time.monotonic() > deadline:
                self._kill()
                return False, True
            time.sleep(_POLL_S)
        words = {each.word for each in ranks}
        done = not has_died and "parked" not in words and all(not _failed(each) for each in ranks)
        self._kill()
        return done, False

    def _hear(self, rank: _Rank) -> None:
        if rank.is_gone:
            return
        try:
            while rank.pipe.poll():
                heard = rank.pipe.recv()
                if isinstance(heard, RankEnded):
                    rank.ended = heard
                else:
                    rank.word = heard
        except (EOFError, OSError):
            pass
        if rank.process.exitcode is not None and rank.ended is None and rank.word is None:
            rank.is_gone = True

    def _kill(self) -> None:
        """End the ranks' processes."""
        for each in self._ranks.values():
            each.is_gone = True
            each.process.kill()
            each.process.join()
            each.pipe.close()

    def finish(self) -> None:
        """End what still runs, and complete the records by what the journal has."""
        self._kill()
        attempt, result = 0, None
        for event in journal_events(self.run_dir):
            if event.kind is EventKind.ATTEMPT_STARTED:
                attempt += 1
                result = self.attempts[attempt - 1] if attempt <= len(self.attempts) else None
            elif result is None:
                continue
            elif event.kind is EventKind.RESTORED:
                result.restored = dict(event.data)
            elif event.kind is EventKind.METRICS:
                for point in event.data["points"]:
                    if (loss := point["values"].get("loss")) is not None:
                        result.records[0].losses[point["step"]] = loss


def _failed(rank: _Rank) -> bool:
    return rank.ended is not None and rank.ended.error is not None


@contextmanager
def trial(setup: Setup, number: int) -> Iterator[Trial]:
    """Yield a training. Its processes are gone afterwards, and so is what it left in memory."""
    training = Trial(setup, number)
    try:
        yield training
        training.finish()
    finally:
        training._kill()
        shutil.rmtree(shared_memory_root() / training.run_id, ignore_errors=True)
