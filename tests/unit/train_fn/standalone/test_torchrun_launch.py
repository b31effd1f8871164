"""The launch script for several hosts: one torchrun a host, told apart by number, with the user's
words unbroken."""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[4] / "deploy" / "torchrun" / "launch.sh"
SSH = """#!/bin/sh
host=$4
printf '%s' "$5" >"$SEEN/$host"
echo "hello from $host"
[ "$host" != broken ]
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an ssh that connects nowhere writes what it was asked to run on each host."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path))
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setenv("IFACE", "eth1")
    return tmp_path


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(LAUNCH), *arguments], capture_output=True, text=True, timeout=60)


def test_every_host_runs_its_part_of_one_rendezvous(seen: Path) -> None:
    answer = launch("one,two", "a spec.yaml", "--set", "name=it's mine")
    assert answer.returncode == 0, answer.stderr
    commands = [shlex.split((seen / host).read_text()) for host in ("one", "two")]
    options = [dict(pairwise(words)) for words in commands]
    assert [found["--node-rank"] for found in options] == ["0", "1"]
    assert options[0]["--rdzv-id"] == options[1]["--rdzv-id"]
    for words, found in zip(commands, options, strict=True):
        assert (found["--nnodes"], found["--nproc-per-node"], found["--rdzv-endpoint"]) == (
            "2",
            "4",
            "one:29500",
        )
        assert "PYTHONHASHSEED=0" in words
        assert "NCCL_SOCKET_IFNAME=eth1" in words
        assert words[-5:] == ["-m", "train_fn.standalone", "a spec.yaml", "--set", "name=it's mine"]


def test_a_host_that_fails_fails_the_launch(seen: Path) -> None:
    assert launch("one,broken", "spec.yaml").returncode == 1


def test_without_a_spec_it_says_how_to_use_it(seen: Path) -> None:
    answer = launch("one,two")
    assert answer.returncode == 2
    assert "HOST1,HOST2" in answer.stderr
