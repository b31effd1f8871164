"""Killed at every system call of the commit protocol and of the journal: what is left is always
whole or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.checkpoints.manifest import MANIFEST
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import event, quick_directory, save

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", params=["checkpoint", "journal"])
def wreckage(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A directory for each call of the OS at which the scenario was killed."""
    with quick_directory() as directory:
        subprocess.run(
            [sys.executable, "-m", "tests.support.storage_crash", request.param, directory],
            cwd=ROOT,
            check=True,
            timeout=120,
        )
        yield request.param, Path(directory)


def test_every_kill_leaves_whole_facts_only(wreckage: tuple[str, Path]) -> None:
    scenario, directory = wreckage
    places = sorted(path for path in directory.iterdir() if path.suffix == ".said")
    assert len(places) > 20
    for said in places:
        claims = said.read_text().splitlines()
        (_check_checkpoints if scenario == "checkpoint" else _check_journal)(
            said.with_suffix(""), claims
        )


PROTOCOL = [
    # begun: the writer's own directory and its marker
    *("mkdir .begun-step-000000100.s001.a001", "open manifest.json.tmp"),
    *(
        "open model.pt",
        "write model.pt",
        "fsync model.pt",
        "mkdir deep",
        "mkdir er",
        "open state.pt",
        "write state.pt",
    ),
    *("fsync state.pt", "fsync er", "fsync .begun-step-000000100.s001.a001"),  # bytes, then names
    # the manifest, last
    *("write manifest.json.tmp", "fsync manifest.json.tmp", "replace manifest.json"),
    *("rename step-000000100.s001.a001", "fsync checkpoints"),  # the commit
    # deletion: the manifest first
    *("unlink manifest.json", "unlink model.pt", "rmdir step-000000050.s001.a001"),
    *(
        "rename .trash-step-000000150.s001.a001",
        "rmdir .trash-step-000000150.s001.a001",
    ),  # what was left unfinished goes
]
"""Points of the commit protocol, in the order in which the scenario comes by."""


def test_death_came_at_every_point_of_the_protocol(wreckage: tuple[str, Path]) -> None:
    scenario, directory = wreckage
    deaths = {
        mode: {path.read_text().strip() for path in directory.glob(f"*-{mode}.died")}
        for mode in ("before", "half")
    }
    if scenario == "checkpoint":
        assert set(PROTOCOL) <= deaths["before"], set(PROTOCOL) - deaths["before"]
        writes = {point for point in PROTOCOL if point.startswith("write")}
    else:
        writes = {"write s001.jsonl"}
    assert writes <= deaths["half"], writes - deaths["half"]


def _check_checkpoints(place: Path, claims: list[str]) -> None:
    run_dir = RunDir(open_storage(str(place)), "run_crash")
    store = CheckpointStore(run_dir)
    listed = store.list()
    for manifest in listed:
        store.verify(manifest.name)
    steps = {manifest.step for manifest in listed}
    acknowledged = {int(claim.split()[1]) for claim in claims if claim.startswith("committed")}
    if "deleting 50" in claims:
        acknowledged -= {50}
    if 150 in acknowledged:  # retention was under way
        acknowledged -= {100}
    assert acknowledged <= steps, (place.name, claims, steps)
    newest, rejected = store.newest_valid()
    assert rejected == [], place.name
    assert (newest.step if newest else None) == (max(steps) if steps else None)

    # Whoever comes next finds nothing in its way, and retention clears every leaving.
    save(run_dir, 100, submission=2)
    save(run_dir, 200, submission=2)
    store.retain(1, None)
    checkpoints = Path(store.path("step-000000200.s002.a001")).parent
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000200.s002.a001"], place.name


def _check_journal(place: Path, claims: list[str]) -> None:
    run_dir = RunDir(open_storage(str(place)), "run_crash")
    durable = max((int(claim.split()[1]) for claim in claims), default=0)
    before, cursor = read_journal(run_dir, 1)
    assert [found.n for found in before] == list(range(1, len(before) + 1)), place.name
    assert len(before) >= durable, (place.name, claims)

    # The next writer is sent everything that was not acknowledged, and a reader that had come this
    # far misses nothing.
    with JournalWriter(run_dir, 1) as writer:
        writer.append([event(number) for number in range(durable + 1, 9)])
    after, _ = read_journal(run_dir, 1, cursor)
    assert [found.source_n for found in before + after] == list(range(1, 9)), place.name


def test_the_manifest_is_renamed_only_after_everything_is_on_the_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine keeps what was synced: bytes, then names, then the manifest's bytes,
    its name last."""
    done: list[tuple[str, str]] = []

    def path_of(target: object) -> str:
        return (
            str(Path(f"/proc/self/fd/{target}").readlink())
            if isinstance(target, int)
            else str(target)
        )

    real_fsync, real_replace, real_rename = os.fsync, os.replace, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: done.append(("fsync", path_of(fd))) or real_fsync(fd)
    )
    monkeypatch.setattr(
        os, "replace", lambda a, b: done.append(("replace", path_of(b))) or real_replace(a, b)
    )
    monkeypatch.setattr(
        os, "rename", lambda a, b: done.append(("rename", path_of(b))) or real_rename(a, b)
    )
    run_dir = RunDir(open_storage(str(tmp_path)), "run_order")
    save(run_dir, 50, files={"model.pt": b"m", "deep/state.pt": b"s"})

    final = CheckpointStore(run_dir).path("step-000000050.s001.a001")
    [commit] = [
        number
        for number, (what, path) in enumerate(done)
        if what == "replace" and path.endswith(f"/{MANIFEST}")
    ]
    directory = str(Path(done[commit][1]).parent)
    assert (
        Path(directory).name.startswith(".begun-") and Path(directory).parent == Path(final).parent
    )
    before, after = done[:commit], done[commit + 1 :]
    for synced in (
        f"{directory}/model.pt",
        f"{directory}/deep/state.pt",
        f"{directory}/deep",
        directory,
    ):
        assert ("fsync", synced) in before, synced
    assert before[-1][1].endswith(".tmp"), "the manifest's own bytes come last before its name"
    assert before.index(("fsync", f"{directory}/model.pt")) < max(
        i for i, step in enumerate(before) if step == ("fsync", directory)
    )
    assert after[:3] == [
        ("fsync", directory),
        ("rename", final),
        ("fsync", str(Path(final).parent)),
    ]
