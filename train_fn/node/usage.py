"""How busy a node is: its processors, its memory, its GPUs."""

from __future__ import annotations

import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind

FIRST_REPORT_S: Final = 10.0
REPORT_EVERY_S: Final = 60.0
RANKS_A_MINUTE: Final = 16
"""Ranks of larger groups report less often after the first time: so often all together."""

WRITER_NICENESS: Final = 10
"""Niceness of threads that keep states beside training."""

logger = logging.getLogger(__name__)

Emit = Callable[[EventKind, dict[str, Any]], None]


@dataclass(frozen=True)
class HostSample:
    """Counters of this process and its host."""

    at: float
    """Monotonic seconds."""
    cpu_s: float
    """Processor time of all threads of this process so far."""
    rss_bytes: int
    """Memory of this process that is in RAM."""
    received_bytes: int
    sent_bytes: int
    """Of the host's network interfaces so far, without the loopback."""


def sample_host(proc: Path = Path("/proc")) -> HostSample:
    """Read the counters. Raises OSError where there is no such /proc."""
    pages = int((proc / "self/statm").read_text().split()[1])
    received = sent = 0
    for line in (proc / "net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            columns = numbers.split()
            received, sent = received + int(columns[0]), sent + int(columns[8])
    rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return HostSample(time.monotonic(), time.process_time(), rss_bytes, received, sent)


class HostWatch:
    """Report a rank's use of its host while its attempt trains. Its thread sleeps in between."""

    def __init__(
        self,
        emit: Emit,
        rank: int,
        world_size: int,
        node_id: str,
        sample: Callable[[], HostSample] = sample_host,
        *,
        first_s: float = FIRST_REPORT_S,
        every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._emit, self._rank, self._node_id, self._sample = emit, rank, node_id, sample
        self._first_s, self._every_s = first_s, every_s * max(1.0, world_size / RANKS_A_MINUTE)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            before, pause_s = self._sample(), self._first_s
            while not self._closing.wait(pause_s):
                now = self._sample()
                self._emit(EventKind.RANK_USE, self._between(before, now))
                before, pause_s = now, self._every_s
        except OSError as exc:
            logger.warning("the use of this host is not reported: %s", exc)

    def _between(self, before: HostSample, now: HostSample) -> dict[str, Any]:
        seconds = max(now.at - before.at, 1e-6)
        return {
            "rank": self._rank,
            "node_id": self._node_id,
            "cpu_cores": round((now.cpu_s - before.cpu_s) / seconds, 3),
            "rss_bytes": now.rss_bytes,
            "net_in_bytes_per_s": _rate(before.received_bytes, now.received_bytes, seconds),
            "net_out_bytes_per_s": _rate(before.sent_bytes, now.sent_bytes, seconds),
            "seconds": round(seconds, 1),
        }


def _rate(before: int, now: int, seconds: float) -> int | None:
    """Return bytes per second; None if the counters fell, as where an interface vanished."""
    return None if now < before else round((now - before) / seconds)


# ---------------------------------------------------------------- gpu use

# Sample how busy and how full a rank's GPU is, on a thread, and report it now and then.

SAMPLE_EVERY_S = 2.0
"""Between two samples. NVML's own figure is a mean over at most a second."""
FIRST_GPU_REPORT_S = 10.0
GPU_REPORT_EVERY_S = 60.0


@dataclass(frozen=True)
class GpuSample:
    """One sample of a GPU."""

    busy: float | None
    """Share of the last moment in which a kernel ran, 0 to 1; None if NVML does not know (no
    nvidia-ml-py, or MIG)."""
    used_bytes: int
    total_bytes: int
    allocated_bytes: int
    """Most bytes that this process's own tensors took so far."""
    power_w: float | None = None
    celsius: float | None = None
    """Of the chip; None, as the power, if NVML does not know."""


def sample_gpu(device: torch.device) -> GpuSample:
    """Sample the GPU without waiting for it. Raises RuntimeError if it does not answer."""
    free, total = torch.cuda.mem_get_info(device)
    percent, milliwatts, celsius = (
        _known(ask, device)
        for ask in (torch.cuda.utilization, torch.cuda.power_draw, torch.cuda.temperature)
    )
    return GpuSample(
        None if percent is None else percent / 100,
        total - free,
        total,
        torch.cuda.max_memory_allocated(device),
        None if milliwatts is None else milliwatts / 1000,
        celsius,
    )


def _known(ask: Callable[[torch.device], float], device: torch.device) -> float | None:
    """Return NVML's figure; None if it has none."""
    try:
        return ask(device)
    except Exception:  # NVML's own errors, or no NVML: memory is worth reporting by itself
        return None


class GpuWatch:
    """Report a rank's GPU while its attempt trains, from a thread of its own. Does nothing on
    CPUs."""

    def __init__(
        self,
        emit: Emit,
        rank: int,
        node_id: str,
        device: torch.device,
        sample: Callable[[torch.device], GpuSample] = sample_gpu,
        *,
        sample_every_s: float = SAMPLE_EVERY_S,
        first_s: float = FIRST_GPU_REPORT_S,
        every_s: float = GPU_REPORT_EVERY_S,
    ) -> None:
        self._emit, self._rank, self._node_id, self._device, self._sample = (
            emit,
            rank,
            node_id,
            device,
            sample,
        )
        self._sample_every_s, self._next_s, self._every_s = sample_every_s, first_s, every_s
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        began = time.monotonic()
        samples: list[GpuSample] = []
        while not self._closing.wait(self._sample_every_s):
            try:
                samples.append(self._sample(self._device))
            except Exception as exc:  # training notices a lost device
                logger.warning(
                    "cannot read the use of %s any more, so it is not reported: %s",
                    self._device,
                    exc,
                )
                return
            seconds = time.monotonic() - began
            if seconds >= self._next_s:
                self._emit(EventKind.GPU_USE, self._summary(samples, seconds))
                began, samples, self._next_s = time.monotonic(), [], self._every_s

    def _summary(self, samples: list[GpuSample], seconds: float) -> dict[str, Any]:
        busy = [sample.busy for sample in samples if sample.busy is not None]
        power = [sample.power_w for sample in samples if sample.power_w is not None]
        celsius = [sample.celsius for sample in samples if sample.celsius is not None]
        return {
            "rank": self._rank,
            "node_id": self._node_id,
            "name": torch.cuda.get_device_name(self._device)
            if torch.cuda.is_available()
            else str(self._device),
            "busy": round(statistics.mean(busy), 3) if busy else None,
            "used_bytes": max(sample.used_bytes for sample in samples),
            "total_bytes": samples[-1].total_bytes,
            "allocated_bytes": max(sample.allocated_bytes for sample in samples),
            "power_w": round(statistics.mean(power), 1) if power else None,
            "celsius": max(celsius) if celsius else None,
            "seconds": round(seconds, 1),
        }


# ---------------------------------------------------------------- cpu threads

# Set how many threads torch uses on a CPU, on which bitwise equal results depend.


def set_threads(spec: RunSpec) -> None:
    """Use as many torch threads as a rank has CPUs, in every attempt the same;
    ``env.OMP_NUM_THREADS`` overrides it. What a build sets has no effect, since another attempt may
    begin without one.
    """
    named = spec.env.get("OMP_NUM_THREADS", spec.scaling.resources_per_worker.get("CPU", 1))
    torch.set_num_threads(max(1, int(named)))


def give_way() -> None:
    """Let this thread run only in the time that ranks leave, on a host whose cores they all use."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.nice(WRITER_NICENESS)
