"""What this node's driver and kernel say of a GPU, once an error of the device stopped a rank.

The rank's own CUDA context may be broken by then: ``nvidia-smi`` and the kernel log are asked.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from everstep.wire.events import GPU_FAULTY
from train_fn.node.out_of_memory import KERNEL_LOG, kernel_lines
from train_fn.recovery.rank_error import RankError

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
