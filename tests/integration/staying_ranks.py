"""Ranks whose processes serve several attempts: real processes and collectives, without Ray."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.integration.ranks import (
    Job,
    Outcome,
    _notice_death,
    dead,
    prepare_process,
    run_attempt,
)
from tests.support.rank_processes import DEADLINE_S


class StayingRanks:
    """Processes by name. Each serves one attempt after the other, until it dies or the test
    ends."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["train_fn.loop.attempt", "torch._dynamo", "tests.integration.staying_ranks"]
        )
        self.processes: dict[str, Any] = {}
        self._pipes: dict[str, Connection] = {}
        self._num_attempts = 0

    def run(
        self, job: Job, names: str, meanwhile: Callable[[list[Any]], None] = lambda ranks: None
    ) -> list[Outcome]:
        """Run an attempt to its end in these processes, one letter each, by rank. Those that are
        not there yet are started. ``meanwhile`` is given the processes."""
        assert job.world_size == len(names)
        self._num_attempts += 1
        base = self._tmp_path / f"{job.run_dir.run_id}-{self._num_attempts}"
        base.mkdir(parents=True)
        for name in names:
            if name not in self.processes:
                self._start(name, job)
        for rank, name in enumerate(names):
            self._pipes[name].send((job, rank, str(base)))
        processes = [self.processes[name] for name in names]
        if job.hangs_without_peers:
            threading.Thread(target=_notice_death, args=(processes, base), daemon=True).start()
        meanwhile(processes)
        deadline = time.monotonic() + DEADLINE_S
        answers = [self._answer(name, deadline) for name in names]
        return [
            dead(base / f"{rank}.events", self.processes[names[rank]].exitcode)
            if each is None
            else each
            for rank, each in enumerate(answers)
        ]

    def call(self, name: str, function: Callable[[], Any], job: Job) -> Any:
        """Return what a function of a module returns in that process, which is started for the job
        if it is not there yet."""
        if name not in self.processes:
            self._start(name, job)
        self._pipes[name].send(function)
        return self._answer(name, time.monotonic() + DEADLINE_S)

    def _start(self, name: str, job: Job) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, job))
        process.start()
        theirs.close()
        self.processes[name], self._pipes[name] = process, mine

    def _answer(self, name: str, deadline: float) -> Any:
        """Return what a process says; None if it dies."""
        pipe, process = self._pipes[name], self.processes[name]
        left_s = max(0.0, deadline - time.monotonic())
        ready = wait([pipe, process.sentinel], left_s)
        assert ready, f"{name} does not answer"
        if pipe not in ready:
            process.join()
            return None
        try:
            return pickle.loads(pipe.recv())
        except (EOFError, ConnectionResetError):
            process.join(10)
            return None

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@contextmanager
def staying_ranks(tmp_path: Path) -> Iterator[StayingRanks]:
    """Yield processes that are gone afterwards."""
    ranks = StayingRanks(tmp_path)
    try:
        yield ranks
    finally:
        ranks.close()


def _in_new_thread(run: Callable[..., Outcome], job: Job, *rest: Any) -> Outcome:
    """Run an attempt as Ray does, in a thread of its own. Only the main one can set handlers of
    signals."""
    if "signal_handler" in (job.setup or ""):
        return run(job, *rest)
    with ThreadPoolExecutor(1, "TrainingThread") as thread:
        return thread.submit(run, job, *rest).result()


def _serve(pipe: Connection, job: Job) -> None:
    prepare_process(job)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        answer = order() if callable(order) else _in_new_thread(run_attempt, *order)
        pipe.send(pickle.dumps(answer))
