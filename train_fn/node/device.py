"""What a device says about itself, and whether its arithmetic and kernels are right."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from everstep.wire.events import GPU_FAULTY
from train_fn.node.memory import KERNEL_LOG, kernel_lines
from train_fn.recovery.evidence import RankError
from train_fn.samples.sampler import MASK64
from train_fn.step.fingerprints import word_sum

ASK_S = 5.0
"""Longest wait for ``nvidia-smi``, which hangs where a GPU is lost."""

RECENT_S = 600.0
"""An older Xid may have been cured by a reset of its GPU."""

_BASE = {"pci": "pci.bus_id", "name": "name", "temperature_c": "temperature.gpu"}
_HEALTH = {
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "retired_pages_pending": "retired_pages.pending",
    "row_remap_pending": "remapped_rows.pending",
    "row_remap_failed": "remapped_rows.failure",
}
"""By our names, fields of ``nvidia-smi --query-gpu``; a driver may not know those of health."""

FAULTY_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    63: "memory row remapped or page retired",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's own processor does not answer",
    120: "error of the GPU's own processor",
    140: "unrecovered ECC error",
}
"""NVIDIA's numbers of errors that a program cannot cause. Others, such as 13 and 31 (an illegal
access), may be the program's."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def with_device_evidence(
    error: RankError, device: torch.device, kernel_log: Path = KERNEL_LOG
) -> RankError:
    """Return a rank's error with what its node says of its GPU. Where that is a fault of the
    hardware, the message says so."""
    found = look_at_gpu(visible_gpu(device.index or 0), kernel_log)
    faults = faults_of(found)
    message = f"{error.message}; {GPU_FAULTY}{', '.join(faults)}" if faults else error.message
    return dataclasses.replace(error, message=message, device={**found, "faults": faults})


def visible_gpu(index: int) -> str:
    """Return how ``nvidia-smi`` names the GPU that is the ``index``-th one of this process."""
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return visible[index] if index < len(visible) else str(index)


def look_at_gpu(gpu: str, kernel_log: Path = KERNEL_LOG) -> dict[str, Any]:
    """Return name, PCI id, temperature, memory errors and Xids of a GPU, as far as they are known.

    ``problem`` says why nothing is known."""
    try:
        found = _ask(gpu, _BASE | _HEALTH) or _ask(gpu, _BASE) or {}
    except (OSError, subprocess.TimeoutExpired) as exc:
        found = {"problem": f"nvidia-smi: {exc}"}
    pci = str(found.get("pci") or "")
    found["xids"] = _xids(pci, kernel_log)
    return found


def faults_of(found: Mapping[str, Any]) -> list[str]:
    """Return in words what says that the hardware is broken."""
    xids = dict.fromkeys(xid for xid in found.get("xids", ()) if xid in FAULTY_XIDS)
    place = f" ({found['pci']})" if found.get("pci") else ""
    faults = [f"Xid {xid}{place}: {FAULTY_XIDS[xid]}" for xid in xids]
    if _is_set(found.get("ecc_uncorrected")):
        faults.append(f"{found['ecc_uncorrected']} uncorrected ECC errors{place}")
    for name in ("retired_pages_pending", "row_remap_pending", "row_remap_failed"):
        if _is_set(found.get(name)):
            faults.append(f"{name.replace('_', ' ')}{place}")
    return faults


def _ask(gpu: str, fields: Mapping[str, str]) -> dict[str, Any] | None:
    query = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields.values())}"]
    answer = subprocess.run(
        [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=ASK_S
    )
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    if answer.returncode != 0 or len(values) != len(fields):
        return None
    return dict(zip(fields, values, strict=True))


def _xids(pci: str, kernel_log: Path) -> list[int]:
    """Return the newest Xids that the kernel log has of a GPU; of all, where its PCI id is not
    known."""
    own, now = _short(pci), time.clock_gettime(time.CLOCK_MONOTONIC)
    recent = (line for at, line in kernel_lines(kernel_log) if now - at < RECENT_S)
    found = (_XID.search(line) for line in recent)
    return [int(each[2]) for each in found if each and (not own or _short(each[1]) == own)]


def _short(pci: str) -> str:
    """``00000000:3B:00.0`` and ``0000:3b:00`` alike: bus and device."""
    return ":".join(pci.lower().partition(".")[0].split(":")[-2:]) if pci else ""


def _is_set(value: Any) -> bool:
    return str(value).lower() == "yes" or (str(value).isdigit() and int(value) > 0)


# ---------------------------------------------------------------- broken device

# A device whose context has failed, as after an illegal access: every later call of CUDA raises.
#
# Where torch frees memory that several streams have used, it first records events. On a failed
# device that raises in a destructor, and the process ends with SIGABRT, before it can report the
# error. So the objects of a broken attempt are kept until the process ends.


def is_broken(device: torch.device) -> bool:
    """Return whether the device's context has failed. Work that still runs is not waited for."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def keep_if_broken(device: torch.device, *objects: object) -> bool:
    """Return whether the device is broken. If so, keep these objects until the process ends."""
    broken = is_broken(device)
    if broken:
        keep_for_ever(*objects)
    return broken


def keep_for_ever(*objects: object) -> None:
    """Never free these objects, nor what they refer to, not even when the process ends."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


# ---------------------------------------------------------------- arithmetic

# Check a node's arithmetic by a product of random matrices: every bit of the result counts.

MATMUL_SIZE = {"cpu": 1024, "cuda": 4096}
_SEED = 6361
_BITS = 24
"""Bits of a float32's significand: each of them is drawn."""


class Product:
    """A product of fixed random matrices on one device, to be computed again and again."""

    def __init__(self, device: torch.device) -> None:
        size = MATMUL_SIZE[device.type]
        generator = torch.Generator(device).manual_seed(_SEED)
        whole = torch.randint(0, 1 << _BITS, (size, size), generator=generator, device=device)
        # Exact, so that every kernel has the same factors: numbers in [-1, 1).
        self._matrix = whole.float().mul_(2.0 ** (1 - _BITS)).sub_(1.0)
        self.digest: str | None = None
        """Digest of the whole product; None before it is computed."""

    def compute(self) -> None:
        """Multiply the matrices. Raise ValueError if the product is another one than before."""
        digest = f"{word_sum(self._matrix @ self._matrix) & MASK64:016x}"
        if self.digest not in (None, digest):
            raise ValueError("a product of matrices is another one when it is computed again")
        self.digest = digest


def compare_products(products: Mapping[int, tuple[str, str]]) -> tuple[dict[int, str], list[str]]:
    """Return the problem of each rank whose product differs from that of most ranks with the same
    kernels, and a sentence for each kind of kernels where no majority shows which rank is wrong.

    Ranks with other kernels may round differently; they are not compared.

    Args:
        products: by rank, the kernels and the digest of the product.
    """
    problems: dict[int, str] = {}
    undecided: list[str] = []
    for kind in sorted({kind for kind, _ in products.values()}):
        own = {rank: digest for rank, (name, digest) in products.items() if name == kind}
        right, count = Counter(own.values()).most_common(1)[0]
        if 2 * count > len(own):
            problems |= {
                rank: f"a product of matrices is wrong: its digest is {digest}, and {right} on "
                f"{count} of {len(own)} nodes with the same kernels ({kind})"
                for rank, digest in own.items()
                if digest != right
            }
        else:
            each = ", ".join(f"{digest} on rank {rank}" for rank, digest in own.items())
            undecided.append(
                f"products of matrices differ between nodes with the same kernels ({each}): one "
                "of them computes wrongly, and no majority shows which. Check them beside a third "
                "node"
            )
    return problems, undecided


# ---------------------------------------------------------------- kernels

# What decides the last bits of a computation on this node: nodes that are equal in all of it must
# give equal bits, others need not.

_CHOOSING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that choose kernels."""


def kernels(device: torch.device) -> str:
    """Return a text that is equal on nodes whose kernels must give equal bits: versions, processor
    or GPU, threads, and what the environment chooses."""
    chosen = [f"{name}={os.environ[name]}" for name in _CHOOSING if name in os.environ]
    parts = [
        f"torch {torch.__version__}",
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",
        *chosen,
    ]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join(parts)


@cache
def _processor() -> str:
    """Return the processor's model, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return " and ".join(sorted(models)) or platform.machine()
