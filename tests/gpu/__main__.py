"""``python -m tests.gpu``: what a GPU shows that a CPU cannot, in ten minutes.

The parts come in the order of what tells most. Each runs in a process of its own, needs none of
the others, and prints one verdict line as soon as it has ended. ``--device cpu`` runs the CPU's
share of the same code, over gloo, with small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.gpu.verdict import Shown, Verdict, Word, verdict_of
from train_fn.node.node_dir import shared_memory_root

LIMITS_S = {
    "two_ranks": 180.0,
    "sharded": 150.0,
    "broken_start": 120.0,
    "hanging_peers": 120.0,
    "bits": 180.0,
    "one_of_two": 120.0,
    "hand_over": 150.0,
    "loops": 180.0,
    "illegal_access": 60.0,
    "snapshots": 120.0,
    "memory_of_a_dead": 60.0,
    "visible_devices": 60.0,
    "nccl_abort": 60.0,
    "speed": 300.0,
}
"""The parts in their order, and how long each may take."""
CLEANING_S = 20.0
"""How long a part that is given up may take to end what it has started."""
OUT = Path("out/gpu")
REPOSITORY = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and print their verdicts. Return 1 if one failed, else 0."""
    options = _options(argv)
    missing = options.device == "cuda" and not torch.cuda.is_available()
    ends_at = time.monotonic() + 60 * options.minutes
    verdicts = []
    for name in options.parts or LIMITS_S:
        limit_s = min(LIMITS_S[name], ends_at - time.monotonic())
        if missing:
            why = "this machine has no CUDA device; --device cpu runs the CPU's share"
            verdict = Verdict(name, Word.NOT_RUN, options.device, 0.0, why)
        elif limit_s <= 0:
            why = f"the {options.minutes:g} minutes are over; name this part to run it alone"
            verdict = Verdict(name, Word.NOT_RUN, options.device, 0.0, why)
        else:
            verdict = run_part(name, options.device, limit_s)
        verdicts.append(verdict)
        print(verdict.line, flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "verdicts.json").write_text(json.dumps([asdict(each) for each in verdicts], indent=2))
    return int(any(verdict.word is Word.FAIL for verdict in verdicts))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(LIMITS_S))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no part after so many")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(LIMITS_S):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; use {', '.join(LIMITS_S)}")
    return options


def run_part(name: str, device: str, limit_s: float) -> Verdict:
    """Run a part in a process of its own, for ``limit_s`` at most, and return its verdict. Its
    output goes to ``out/gpu/NAME.log``."""
    OUT.mkdir(parents=True, exist_ok=True)
    log, began = OUT / f"{name}.log", time.monotonic()
    # short: the path of a unix socket has 107 bytes
    with tempfile.TemporaryDirectory(prefix="gpu", ignore_cleanup_errors=True) as directory:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.one_part", name, device, directory],
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                _give_up(process)
        seconds = time.monotonic() - began
        shutil.rmtree(shared_memory_root() / f"run_{Path(directory).name}", ignore_errors=True)
        if code == 0:
            return verdict_of(name, device, seconds, Shown.read(Path(directory) / "shown.json"))
    problem = f"it did not end within {limit_s:.0f} s" if code is None else _last_line(log, code)
    return Verdict(name, Word.FAIL, device, seconds, f"{problem}; see {log}")


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """Let a part end what it has started, then end it."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLEANING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-400:] if lines else f"it ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
