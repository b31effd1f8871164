"""What a forked process does as a rank: it joins its peers and trains on its main thread, and
answers its host on others.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from storage.run_control import Stop
from train_fn.journal.follower import Reply, SourceEvent
from train_fn.journal.rank_log import listen
from train_fn.node.network import store_at
from train_fn.node.secrets import process_redactor
from train_fn.ranks import build_once, process
from train_fn.ranks.line import RankFacts, Wire
from train_fn.ranks.rank import Outside, run_rank
from train_fn.ranks.zygote import begin_anew, show_as
from train_fn.recovery.hang import TRAINING_THREAD
from train_fn.recovery.launch import Meeting, Position, RankJob
from train_fn.step.nccl import collective_counts

REPORTS_TAKEN_S = 60.0
"""Longest wait for the host's answer that Ray Train has taken all reports."""

logger = logging.getLogger(__name__)


def be_rank(connection: Connection, facts: RankFacts) -> NoReturn:
    """Serve the host until it ends this process."""
    os.setpgid(0, 0)  # what it starts is no part of its builder's group
    if build_once.output is None:
        begin_anew(facts.streams)
    _take_environment(facts.environ)
    threading.current_thread().name = TRAINING_THREAD
    show_as(["everstep-rank"])
    rank = _Rank(facts)
    process.prepare(facts.launch, facts.ip, over_nccl=facts.use_gpu)
    rank.line = Wire(connection, rank.serve, _end)
    process.tell_host(lambda name, *told: rank.line.ask("note", name, told))
    while True:
        function, arguments, answer = rank.orders.get()
        try:
            answer.set_result(function(*arguments))
        except BaseException as exc:
            answer.set_exception(exc)
        del function, arguments, answer


def _end() -> None:
    """End this process, since its host is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def _take_environment(environ: dict[str, str]) -> None:
    """Take the environment of the host, but for what the build has changed."""
    base = build_once.base_environ
    if base is None:
        os.environ.clear()
        os.environ.update(environ)
    else:
        os.environ.update({name: each for name, each in environ.items() if base.get(name) != each})


class _Rank:
    """What the host may call."""

    def __init__(self, facts: RankFacts) -> None:
        self.line: Wire
        self.orders: queue.SimpleQueue[tuple[Any, tuple[Any, ...], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._facts = facts
        self._device = torch.device("cpu")
        self._store: TCPStore | None = None
        """The store at which the ranks meet, if this is the first one."""
        printed = None if build_once.output is None else build_once.output.end_in_fork()
        self._printed = printed

    def serve(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a call: on the main thread if it takes long, else here."""
        if name in ("join", "train"):
            answer = Future[Any]()
            self.orders.put((getattr(self, name), arguments, answer))
            return answer
        return getattr(self, name)(*arguments)

    def open_store(self, ip: str, timeout_s: float) -> int:
        """Listen for the other ranks, before any of them connects: one that came too early would
        try again only after half a second. Return the port."""
        self._store = store_at(ip, timedelta(seconds=timeout_s))
        return self._store.port

    # -- on the main thread

    def join(
        self, place: Position, meeting: Meeting, device: int | None, env: dict[str, str]
    ) -> None:
        """Form the process group."""
        os.environ.update(env)
        if device is not None:
            # Ray numbers it among the GPUs of all ranks on the node.
            index = device if device < torch.cuda.device_count() else 0
            self._device = torch.device("cuda", index)
            torch.cuda.set_device(self._device)
        os.environ.update(
            MASTER_ADDR=meeting.address,
            MASTER_PORT=str(meeting.port),
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world_size),
            LOCAL_RANK=str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_world_size),
            NODE_RANK=str(place.node_rank),
            ACCELERATE_TORCH_DEVICE=str(self._device),
        )
        timeout = timedelta(seconds=meeting.timeout_s)
        store = self._store or TCPStore(
            meeting.address, meeting.port, is_master=False, timeout=timeout
        )
        self._store = None  # the group holds it: a function may form one anew at this port
        dist.init_process_group(
            meeting.backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )

    def train(self, job: RankJob, place: Position) -> str | None:
        """Train to the end (``run_rank``)."""
        show_as(["everstep-rank", job.run_dir.run_id, str(place.rank)])
        output = listen(process_redactor())
        for line in () if self._printed is None else self._printed():
            output.add("INFO", line)
        outside = Outside(
            self._deliver,
            lambda name, metrics: self.line.ask("report", name, metrics),
            lambda: bool(self.line.call("close_reports", timeout_s=REPORTS_TAKEN_S)),
            lambda: self._device,
            self._facts.remembered,
        )
        return run_rank(job, place, outside)

    def _deliver(self, source: str, events: Sequence[SourceEvent], stop: Stop | None) -> Reply:
        reply: Reply = self.line.call("deliver", source, events, stop)
        return reply

    # -- on threads of their own

    def ping(self) -> None:
        """Show that this process answers."""

    def ask_to_yield(self, number: int, hands_over: bool) -> None:
        process.ask_to_yield(number, hands_over)

    def abandon(self) -> None:
        process.abandon()

    def stack(self) -> str:
        return process_redactor()(process.stack())

    def collective_counts(self) -> Any:
        return collective_counts()
