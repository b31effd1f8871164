"""deploy/backup.sh and deploy/restore.sh when a step of theirs fails, with a stand-in for docker.

tests/compose runs both on a real engine.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[3] / "deploy"
DOCKER = """#!/usr/bin/env bash
# Note the words, and answer as the variables say. FAILS is a part of the call that fails after its
# output.
echo "$*" >>"$CALLS"
case "$*" in
    *"ps --quiet"*) printf '%s' "$RUNNING" ;;
    *pg_dump*) echo rows ;;
    *"tar --create"*) echo objects ;;
    *"find /data"*) printf '%s' "$HELD" ;;
    *psql*) echo "$TABLES" ;;
    *"tar --extract"* | *pg_restore*) cat >/dev/null ;;
esac
[ -z "$FAILS" ] || case "$*" in *"$FAILS"*) exit 1 ;; esac
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def run(tmp_path: Path, calls: Path) -> Run:
    """Run a script of deploy/ in ``tmp_path``; named variables change docker's answers."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)

    def run(script: str, *words: str, **answers: str) -> subprocess.CompletedProcess[str]:
        calls.write_text("")
        env: Mapping[str, str] = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(calls),
            **{"RUNNING": "", "HELD": "", "TABLES": "0", "FAILS": ""},
            **answers,
        }
        return subprocess.run(
            [DEPLOY / script, *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize("name", ["copy", "copy/", "of/this/week"])
def test_a_backup_has_both_parts_and_their_digests(run: Run, tmp_path: Path, name: str) -> None:
    assert run("backup.sh", name, RUNNING="c1").returncode == 0
    copy = tmp_path / name
    parts = {"everstep.dump": b"rows\n", "objects.tar": b"objects\n"}
    for part, content in parts.items():
        assert (copy / part).read_bytes() == content
        assert hashlib.sha256(content).hexdigest() in (copy / "SHA256SUMS").read_text()
    assert sorted(path.name for path in copy.iterdir()) == ["SHA256SUMS", *sorted(parts)]
    assert copy.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("step", ["pg_dump", "stop object-store", "tar --create"])
def test_a_backup_that_fails_leaves_nothing_and_starts_the_store_again(
    run: Run, calls: Path, tmp_path: Path, step: str
) -> None:
    assert run("backup.sh", "copy", RUNNING="c1", FAILS=step).returncode != 0
    assert not [*tmp_path.glob("copy*")]
    called = calls.read_text().splitlines()
    order = [call for call in called if "object-store" in call or "pg_dump" in call]
    assert "stop object-store" in order[1], "before the database: no row names what is deleted then"
    assert "start object-store" in called[-1]


def test_a_store_that_does_not_start_again_is_named(run: Run) -> None:
    ended = run("backup.sh", "copy", RUNNING="c1", FAILS="start object-store")
    assert ended.returncode != 0
    assert "docker compose start object-store" in ended.stderr


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> str:
    assert run("backup.sh", "copy", RUNNING="c1").returncode == 0
    return str(tmp_path / "copy")


def test_a_copy_is_restored(run: Run, calls: Path, copy: str) -> None:
    ended = run("restore.sh", copy)
    assert ended.returncode == 0 and ended.stdout.endswith("--scale worker=N\n")
    assert "has not finished" not in ended.stderr
    order = ["pg_restore", "tar --extract", "storage --adopt"]
    called = calls.read_text()
    assert sorted(order, key=called.index) == order


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"RUNNING": "c1"}, "docker compose down"),
        ({"HELD": "/data/everstep"}, "object store is not empty"),
        ({"TABLES": "40"}, "has tables already"),
        ({"FAILS": "ps --quiet"}, ""),
        ({"FAILS": "find /data"}, ""),
        ({"FAILS": "psql"}, ""),
    ],
)
def test_a_deployment_that_holds_something_or_does_not_answer_is_left_alone(
    run: Run, calls: Path, copy: str, answers: dict[str, str], named: str
) -> None:
    ended = run("restore.sh", copy, **answers)
    assert ended.returncode != 0 and named in ended.stderr
    assert "has not finished" not in ended.stderr
    assert "restore --" not in calls.read_text() and "extract" not in calls.read_text()


def test_a_damaged_copy_is_refused(run: Run, calls: Path, copy: str) -> None:
    (Path(copy) / "objects.tar").write_text("other objects\n")
    ended = run("restore.sh", copy)
    assert ended.returncode != 0 and "is damaged" in ended.stderr and calls.read_text() == ""


@pytest.mark.parametrize("step", ["pg_restore", "tar --extract", "up --detach --wait service-a"])
def test_a_restore_that_does_not_finish_says_what_to_do(run: Run, copy: str, step: str) -> None:
    ended = run("restore.sh", copy, FAILS=step)
    assert ended.returncode != 0
    assert "docker compose down --volumes, and try again" in ended.stderr
