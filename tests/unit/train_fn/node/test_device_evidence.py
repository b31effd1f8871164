"""What a node says of a GPU after an error of the device: a fault of the hardware is told from an
error that a program may have caused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from everstep.wire import ErrorKind
from everstep.wire.events import GPU_FAULTY
from train_fn.node import device
from train_fn.node.device import look_at_gpu, visible_gpu, with_device_evidence
from train_fn.recovery.evidence import RankError

CUDA = torch.device("cuda", 1)
SOUND = "00000000:3B:00.0, NVIDIA H100, 41, 0, No, No, No"


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("6,1,2,-;usb 1-1: new device\n")
    return path


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name that answers with the file beside it, and keeps its arguments."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$@" >> "$0.asked"\n'
        'case "$@" in *remapped*) test -e "$0.old" && exit 2;; esac\ncat "$0.answer"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    answer(program, SOUND)
    return program


def answer(program: Path, line: str) -> None:
    program.with_name("nvidia-smi.answer").write_text(f"{line}\n")


def log(kernel_log: Path, xid: int, pci: str = "0000:3b:00", ago_s: float = 1.0) -> None:
    at = int((time.clock_gettime(time.CLOCK_MONOTONIC) - ago_s) * 1e6)
    with kernel_log.open("a") as file:
        file.write(f"3,2,{at},-;NVRM: Xid (PCI:{pci}): {xid}, pid=77, name=python\n")


def error() -> RankError:
    message = "CUDA error: unspecified launch failure"
    return RankError(1, ErrorKind.DEVICE, "AcceleratorError", message, "", 7, "step", 1.0)


def test_a_gpu_that_is_sound_may_have_run_a_broken_program(smi: Path, kernel_log: Path) -> None:
    log(kernel_log, 31)
    log(kernel_log, 79, ago_s=3600)  # before a reset
    found = with_device_evidence(error(), CUDA, kernel_log)
    assert found.message == error().message
    assert found.device == {
        "pci": "00000000:3B:00.0",
        "name": "NVIDIA H100",
        "temperature_c": "41",
        "ecc_uncorrected": "0",
        "retired_pages_pending": "No",
        "row_remap_pending": "No",
        "row_remap_failed": "No",
        "xids": [31],
        "faults": [],
    }
    asked = smi.with_name("nvidia-smi.asked").read_text()
    assert asked.startswith("-i GPU-abc --query-gpu=pci.bus_id,name,temperature.gpu,")


@pytest.mark.parametrize(
    ("xid", "line", "fault"),
    [
        (79, SOUND, "Xid 79 (00000000:3B:00.0): the GPU has fallen off the bus"),
        (None, SOUND.replace("41, 0", "41, 2"), "2 uncorrected ECC errors (00000000:3B:00.0)"),
        (None, f"{SOUND[:-2]}Yes", "row remap failed (00000000:3B:00.0)"),
    ],
)
def test_a_fault_of_the_hardware_is_said_in_the_message(
    xid: int | None, line: str, fault: str, smi: Path, kernel_log: Path
) -> None:
    answer(smi, line)
    if xid is not None:
        log(kernel_log, xid)
    log(kernel_log, 48, pci="0000:5e:00")  # of another GPU
    found = with_device_evidence(error(), CUDA, kernel_log)
    assert found.message == f"{error().message}; {GPU_FAULTY}{fault}"
    assert found.device is not None and found.device["faults"] == [fault]


@pytest.mark.parametrize("xid", [48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140])
def test_an_xid_that_no_program_causes_is_a_fault(xid: int, smi: Path, kernel_log: Path) -> None:
    log(kernel_log, xid)
    log(kernel_log, xid)
    found = with_device_evidence(error(), CUDA, kernel_log)
    assert found.device is not None and len(found.device["faults"]) == 1, "named once"
    assert found.device["faults"][0].startswith(f"Xid {xid} (")


@pytest.mark.parametrize(
    ("place", "fault"),
    [(4, "retired pages pending"), (5, "row remap pending"), (6, "row remap failed")],
)
@pytest.mark.parametrize("word", ["Yes", "1"])
def test_each_sign_of_broken_memory_counts(
    place: int, fault: str, word: str, smi: Path, kernel_log: Path
) -> None:
    fields = SOUND.split(", ")
    fields[place] = word
    answer(smi, ", ".join(fields))
    found = with_device_evidence(error(), CUDA, kernel_log)
    assert found.device is not None
    assert found.device["faults"] == [f"{fault} (00000000:3B:00.0)"]


@pytest.mark.parametrize("broken", ["exit 9", "echo one, two"])
def test_an_answer_that_is_none_is_not_read(broken: str, smi: Path, kernel_log: Path) -> None:
    smi.write_text(f'#!/bin/sh\ncat "$0.answer"\n{broken}\n')
    answer(smi, SOUND if broken.startswith("exit") else "one")
    assert look_at_gpu("0", kernel_log) == {"xids": []}


def test_an_older_driver_tells_what_it_knows(smi: Path, kernel_log: Path) -> None:
    smi.with_name("nvidia-smi.old").touch()
    answer(smi, "00000000:3B:00.0, Tesla V100, 50")
    found = look_at_gpu("0", kernel_log)
    assert found == {
        "pci": "00000000:3B:00.0",
        "name": "Tesla V100",
        "temperature_c": "50",
        "xids": [],
    }


def test_a_driver_that_hangs_is_given_up_and_the_kernel_is_asked_all_the_same(
    smi: Path, kernel_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(device, "ASK_S", 0.2)
    log(kernel_log, 79)
    found = with_device_evidence(error(), CUDA, kernel_log)
    assert found.device is not None and found.device["problem"].startswith("nvidia-smi: ")
    assert found.message.endswith(f"{GPU_FAULTY}Xid 79: the GPU has fallen off the bus")


def test_a_machine_without_gpus_says_so(
    kernel_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = with_device_evidence(error(), CUDA, kernel_log)
    assert found.message == error().message
    assert found.device is not None and "nvidia-smi" in found.device["problem"]


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [("3,GPU-abc", 0, "3"), ("3,GPU-abc", 1, "GPU-abc"), ("", 2, "2"), ("5", 1, "1")],
)
def test_a_gpu_is_named_as_the_driver_does(
    visible: str, index: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpu(index) == expected
