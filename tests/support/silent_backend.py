"""A collective backend that fails as NCCL does, over gloo, so that a CPU shows what GPUs would do.

- A collective with a dead or stopped peer neither fails nor ends, and no peer hears of an abort.
- It ends once this process aborts its group: without an error, and its output is partly garbage.
- The next collective of an aborted group raises, as torch's does over NCCL.
- The group itself is made by the first collective, and that may hang as any other.
- With ``run_ahead`` the host does not wait for a gradient's sum, a broadcast or a gather: what
  reads one before it has asked for the group's error reads what was there before.

``claim_cpu`` makes it torch's backend for CPUs. ``autoload`` writes what makes every process that
imports torch do so, as torch's own plug-ins do; ``SilentOptions`` travel in the environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.futures import Future

NAME = "silent"
_OPTIONS_VARIABLE = "SILENT_BACKEND_OPTIONS"
_FOR_EVER = timedelta(days=1)
_KEPT_WORKS = 4096
"""torch holds a work's C++ part alone; without the Python part what it overrides is lost."""


@dataclass(frozen=True)
class SilentOptions:
    """How the backend behaves in this process."""

    abort_s: float = 0.0
    """How long an abort takes before the collectives end."""
    abort_until: str = ""
    """A file that an abort waits for as well."""
    run_ahead: bool = False
    delay_s: float = 0.0
    """How long a collective takes beyond what gloo needs."""

    def env(self) -> dict[str, str]:
        """The environment that says so."""
        return {_OPTIONS_VARIABLE: json.dumps(asdict(self))}


def claim_cpu() -> None:
    """Let torch take this backend for tensors on the CPU, where nobody names another one."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = NAME


def autoload(directory: Path, options: SilentOptions) -> dict[str, str]:
    """Write a plug-in of torch's to ``directory``. Return the environment in which every process
    that imports torch claims the CPU."""
    return {**autoload_plugin(directory, "silent_backend", claim_cpu), **options.env()}


def autoload_plugin(directory: Path, name: str, claim: Callable[[], None]) -> dict[str, str]:
    """Write a plug-in of torch's to ``directory``. Return the environment in which every process
    that imports torch calls ``claim``, a function of a module of this repository."""
    info = directory / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[torch.backends]\n{name} = {claim.__module__}:{claim.__name__}\n"
    )
    repository = Path(__file__).parents[2]
    return {"PYTHONPATH": os.pathsep.join([str(repository), str(directory)])}


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> SilentGroup:
    group = SilentGroup(store, rank, size, SilentOptions(**_told_options()))
    _stays(group)
    return group


def _told_options() -> dict[str, Any]:
    options: dict[str, Any] = json.loads(os.environ.get(_OPTIONS_VARIABLE, "{}"))
    return options


def _stays(thing: object) -> None:
    """Keep it until the process ends: taking a gloo group apart waits for its peers."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show a frame of torch in a rank's stack: the code of a real backend is not Python."""
    function.__code__ = function.__code__.replace(co_filename=dist.__file__)
    return function


@_of_torch
def _held(lock: Any) -> None:
    lock.acquire()
    lock.release()


class SilentWork(dist._Work):
    """One collective: has ended once its output is there, or once its group was aborted."""

    def __init__(self, outputs: list[torch.Tensor], waits: bool) -> None:
        super().__init__()
        self.outputs, self._waits = outputs, waits
        self.future: Future[Any] = Future()
        self.has_ended = False
        self._running = threading.Lock()
        self._running.acquire()

    def end(self) -> None:
        self.has_ended = True
        self._running.release()
        if self._waits:
            self.future.set_result(self.outputs)

    def join(self) -> None:
        _held(self._running)

    def wait(self, timeout: timedelta = _FOR_EVER) -> bool:  # type: ignore[override]
        if self._waits:
            self.join()
        return True

    def get_future(self) -> Any:
        return self.future


class SilentGroup(dist.ProcessGroup):
    """Hands each collective to gloo on a thread of its own, one after the other."""

    def __init__(self, store: Any, rank: int, size: int, options: SilentOptions) -> None:
        super().__init__(rank, size)
        self._options = options
        self._is_aborted = False
        self._lock = threading.Lock()
        """Held while outputs are written, by a result or by an abort."""
        self._orders: SimpleQueue[tuple[SilentWork, Callable[[Any], Any], list[torch.Tensor]]] = (
            SimpleQueue()
        )
        self._works: deque[SilentWork] = deque(maxlen=_KEPT_WORKS)
        threading.Thread(
            target=self._carry_out, args=(store, rank, size), name="silent-backend", daemon=True
        ).start()

    # -- what torch asks of a group

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        sent = [tensor.clone() for tensor in tensors]
        return self._order(tensors, sent, lambda gloo: gloo.allreduce(sent, opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:  # type: ignore[override]
        sent = [tensor.clone() for tensor in tensors]
        outputs = tensors if opts.rootRank != self.rank() else []
        return self._order(outputs, sent, lambda gloo: gloo.broadcast(sent, opts))

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        sent = [tensor.clone() for tensor in tensors]
        received = [[torch.empty_like(each) for each in row] for row in outputs]
        flat = [each for row in received for each in row]
        return self._order(
            [each for row in outputs for each in row],
            flat,
            lambda gloo: gloo.allgather(received, sent),
        )

    def all_gather_single(  # type: ignore[override]
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        sent, received = tensor.clone(), torch.empty_like(output)
        return self._order([output], [received], lambda gloo: gloo._allgather_base(received, sent))

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        sent, received = tensor.clone(), torch.empty_like(output)
        return self._order(
            [output],
            [received],
            lambda gloo: gloo.alltoall_base(received, sent, output_sizes, input_sizes),
        )

    def barrier(self, opts: Any = None) -> Any:  # type: ignore[override]
        return self._order([], [], lambda gloo: gloo.barrier())

    def abort(self) -> None:
        """End what runs, with garbage in place of a result."""
        time.sleep(self._options.abort_s)  # who waits for a collective waits for this, too
        while self._options.abort_until and not Path(self._options.abort_until).exists():
            time.sleep(0.05)
        with self._lock:
            self._is_aborted = True
            for work in self._works:
                if not work.has_ended:
                    for output in work.outputs:
                        _overwrite_partly(output)
                    work.end()

    def shutdown(self) -> None:
        """Leave gloo as it is: its connections end with the process."""

    def get_error(self) -> Any:
        """Wait for what was ordered, as for a device. An abort of one's own is no error to NCCL."""
        for work in list(self._works):
            work.join()
        return ErrorType.SUCCESS

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def getBackendName(self) -> str:
        return NAME

    # -- gloo

    def _order(
        self, outputs: list[torch.Tensor], results: list[torch.Tensor], call: Callable[[Any], Any]
    ) -> SilentWork:
        with self._lock:
            if self._is_aborted:
                raise dist.DistBackendError("NCCL communicator was aborted on this rank")
            waits = not self._options.run_ahead or any(_is_torchs_own(each) for each in results)
            work = SilentWork(outputs, waits)
            if not waits:
                work.future.set_result(outputs)
            self._works.append(work)
        self._orders.put((work, call, results))
        return work

    def _carry_out(self, store: Any, rank: int, size: int) -> None:
        """On a thread: the first error of gloo's is its last word, and everybody hangs."""
        work, call, results = self._orders.get()
        try:
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=_FOR_EVER)
            _stays(gloo)
            while True:
                call(gloo).wait(_FOR_EVER)
                time.sleep(self._options.delay_s)
                with self._lock:
                    if self._is_aborted:
                        return
                    for output, result in zip(work.outputs, results, strict=bool(work.outputs)):
                        output.detach().copy_(result)
                    work.end()
                del work, call, results
                work, call, results = self._orders.get()
        except RuntimeError:
            return


def _is_torchs_own(tensor: torch.Tensor) -> bool:
    """DDP's shapes and the order of its buckets: torch copies them to the host, and so waits."""
    return tensor.dtype in (torch.int32, torch.int64)


def _overwrite_partly(output: torch.Tensor) -> None:
    """Leave numbers that look sound in the first half: what was added up by then."""
    part = output.detach().view(-1)[: (output.numel() + 1) // 2]
    if part.is_floating_point():
        part.mul_(0.5).add_(0.125)
    elif part.dtype is torch.bool:
        part.logical_not_()
    else:
        part.add_(1)
