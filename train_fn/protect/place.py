"""Where a protected loop runs: in a run of the service, or on its own under torchrun or as one
process."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.own_loop import Left, Protection
from train_fn.standalone.place import Place, launch_of, place_alone
from train_fn.standalone.process import stop_on_signals
from train_fn.standalone.rank import CLOSE_S, begin_attempt, report_end, save_left, say_line
from train_fn.step.nccl import backend_of
from train_fn.step.peers import Peers

_NO_ARCHIVE = "sha256:" + "0" * 64
"""Stands for the code of a loop that no service runs."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnItsOwn:
    """Settings of a loop that no service runs. In a service, the run's spec takes their place."""

    storage: str
    run_id: str | None
    """None for the name of the script."""
    checkpoint: Mapping[str, Any]
    """The section ``checkpoint`` of a spec. By default, ``every_steps`` is ``auto``: how large the
    model is and how long its steps are is not known."""
    fresh: bool
    """Delete what an earlier run of this id left."""


class Home(Protocol):
    """The run that a loop belongs to."""

    @property
    def ctx(self) -> WorkerContext: ...

    def finished(self, stop: Stop | None) -> None:
        """The loop has ended, and its state is saved."""

    def failed(self, left: Left) -> None:
        """An error ended the loop."""


def find_home(protection: Protection, settings: OnItsOwn, device: torch.device) -> Home:
    """Return the run of this process. A collective outside of a service. Raises BadTask."""
    present = own_loop.present
    if present is None:
        return _own_home(settings, device)
    if present.protection is not None:
        raise BadTask("es.protect was entered twice: a run has one state; pass lists to one call")
    if present.has_begun:
        # The run has heard that it continues from what the function reported, or begins anew.
        raise BadTask(
            "`with state:` comes after the function's beginning was reported: enter it before the "
            "first ray.train.report, and import everstep.train in a file of the archive"
        )
    present.protection = protection
    return _ServiceHome(present)


@dataclass(frozen=True)
class _ServiceHome:
    """A run of the service, whose Ray layer called the loop."""

    present: own_loop.OwnLoop

    @property
    def ctx(self) -> WorkerContext:
        return self.present.ctx

    def finished(self, stop: Stop | None) -> None:
        self.present.stop = stop

    def failed(self, left: Left) -> None:
        pass


class _OwnHome:
    """A run without a service. Rank 0 writes its journal; signals ask it to stop."""

    def __init__(
        self, run_dir: RunDir, spec: RunSpec, place: Place, device: torch.device, *, fresh: bool
    ) -> None:
        self._handlers: dict[int, Any] = {}
        stopping = threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            stopping = stop_on_signals()
        self._where = f"{run_dir.local_path or run_dir.uri}/checkpoints"
        self.ctx, self._journal = begin_attempt(
            spec, run_dir, place, device, fresh, stopping, say_line
        )

    def finished(self, stop: Stop | None) -> None:
        report_end(self._journal, stop)
        self._close()
        if self.ctx.world_rank == 0:
            how = "paused" if stop else "done"
            say_line(f"{how} at step {self._journal.step}; checkpoints are in {self._where}")

    def failed(self, left: Left) -> None:
        error = left.error
        logger.error(
            "rank %d stopped at step %s: %s; %s",
            error.rank,
            error.step,
            error.summary,
            left.problem or "its state is kept on this node",
        )
        if self.ctx.world_rank == 0:
            save_left(self.ctx, say_line)
        self._close()

    def _close(self) -> None:
        self._journal.close(CLOSE_S)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _own_home(settings: OnItsOwn, device: torch.device) -> _OwnHome:
    run_id = settings.run_id or name_of(Path(sys.argv[0]))
    spec = _spec(run_id, settings.checkpoint)
    place = _place(os.environ)
    run_dir = RunDir(open_storage(settings.storage), run_id)
    return _OwnHome(run_dir, spec, place, device, fresh=settings.fresh)


def name_of(script: Path) -> str:
    """Return a name for the run of a script, or of a package that ``python -m`` runs."""
    name = script.parent.name if script.stem == "__main__" else script.stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-") or "loop"


def _spec(run_id: str, checkpoint: Mapping[str, Any]) -> RunSpec:
    raw = {
        "name": run_id,
        "code": {"archive": _NO_ARCHIVE, "train_fn": "script:main"},
        "checkpoint": {"every_steps": "auto", **checkpoint},
    }
    try:
        return parse_spec(raw)
    except InvalidSpec as exc:
        raise BadTask(f"es.protect(run_id=…, checkpoint=…): {exc}") from exc


def _place(env: Mapping[str, str]) -> Place:
    """Return this process's place among its peers. A collective if there are some. Raises
    BadTask."""
    if not dist.is_initialized():
        if int(env.get("WORLD_SIZE", "1")) > 1:
            raise BadTask(
                f"es.protect: WORLD_SIZE is {env['WORLD_SIZE']}, but there is no process group; "
                "call torch.distributed.init_process_group() before `with state:`"
            )
        return place_alone()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node = os.uname().nodename
    nodes = Peers(rank, world_size, _device_of_group()).gather(node)
    agent = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid())
    local_rank = nodes[:rank].count(node)
    return Place(rank, world_size, local_rank, nodes.count(node), node, launch_of(agent))


def _device_of_group() -> torch.device:
    """Return a device whose tensors the process group exchanges."""
    return torch.device("cuda" if backend_of(dist.group.WORLD) == "nccl" else "cpu")
