"""A rehearsal beside a run: what it is kept by, what ends it, and what becomes of the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from storage.cluster import read_rehearsal, rehearsal_key, write_rehearsal
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import tar_gz
from tests.support.raw_specs import SCRIPT, spec
from train_fn.driver import watch
from train_fn.driver.watch import RestartRehearsal, refusal_of, rehearsal_environment
from train_fn.journal.client import ActorJournalClient
from train_fn.node.node_check import versions
from train_fn.recovery.history import History
from train_fn.recovery.outcome import Stopping
from train_fn.recovery.settings import RecoverySettings
from train_fn.rehearsal import beside
from train_fn.rehearsal.beside import EndedEarly, guarded

REPLAY = {"run_id": "r", "from_step": 0, "to_step": 2}
VERSIONS = {"torch": "2", "python": "3"}
EQUAL: dict[str, Any] = {
    "outcome": "equal",
    "text": "A restart was rehearsed on this code: equal in every bit.",
    "ranks": 2,
    "steps": 12,
    "rows": [],
    "notes": [],
}


def of(**fields: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "a", "code": SCRIPT, **fields})


# ---------------------------------------------------------------- when, and what it is kept by


@pytest.mark.parametrize(
    ("raw", "mode"),
    [
        (spec(), "off"),
        (spec(recovery={"rehearse": "require"}), "require"),
        ({"name": "a", "code": SCRIPT}, "off"),
        ({"name": "a", "code": SCRIPT, "recovery": {"rehearse": "warn"}}, "warn"),
        (spec(recovery={"rehearse": "warn"}, replay=REPLAY), "off"),
    ],
)
def test_code_runs_a_second_time_only_where_asked_for(raw: dict[str, Any], mode: str) -> None:
    assert RunSpec.model_validate(raw).rehearses == mode


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"name": "b", "tags": {"a": "b"}, "priority": 3}, True),
        ({"scaling": {"max_workers": 8}}, True),
        ({"checkpoint": {"every_steps": 7}}, True),
        ({"recovery": {"rehearse": "require"}}, True),
        ({"resume_from": {"run_id": "other"}}, True),
        ({"scaling": {"max_workers": 1}}, False),
        ({"env": {"LR": "0.2"}}, False),
        ({"code": SCRIPT | {"argv": ["--lr", "0.2"]}}, False),
        ({"code": SCRIPT | {"archive": f"sha256:{'1' * 64}"}}, False),
        ({"project": "another"}, False),
    ],
)
def test_runs_of_the_same_code_share_a_rehearsal(fields: dict[str, Any], same: bool) -> None:
    one = rehearsal_key(of(scaling={"max_workers": 4}), VERSIONS)
    other = of(**{"scaling": {"max_workers": 4}} | fields)
    assert (rehearsal_key(other, VERSIONS) == one) is same
    assert rehearsal_key(of(), VERSIONS) != rehearsal_key(of(), VERSIONS | {"torch": "3"})


def test_what_it_showed_is_kept_in_the_storage(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert read_rehearsal(storage, "k") is None
    write_rehearsal(storage, "k", EQUAL)
    assert read_rehearsal(storage, "k") == EQUAL
    (tmp_path / "cluster" / "rehearsals" / "k.json").write_text("{")
    assert read_rehearsal(storage, "k") is None


# ---------------------------------------------------------------- what it takes


def test_idle_processors_are_those_that_no_load_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    assert watch.idle_cpus() == 1.5


@pytest.fixture
def gone_driver() -> Iterator[int]:
    """The write end of a pipe in place of standard input."""
    kept, (read, write) = os.dup(0), os.pipe()
    os.dup2(read, 0)
    yield write
    os.dup2(kept, 0)
    for each in (kept, read):
        os.close(each)


def wait_in_guard(limit_s: float) -> str:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(EndedEarly) as caught, guarded(limit_s):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    return str(caught.value)


def test_it_ends_when_its_driver_is_gone(gone_driver: int) -> None:
    os.close(gone_driver)
    assert wait_in_guard(60) == "the run ended first"


def test_it_ends_after_its_time(gone_driver: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "shortage", lambda: None)
    assert wait_in_guard(0.1) == "it took longer than 0.1 s"
    os.close(gone_driver)


def test_it_ends_before_memory_or_disk_runs_short(
    gone_driver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "LEAST_FREE", 1.1)
    assert "of its memory free" in wait_in_guard(60)
    os.close(gone_driver)


# ---------------------------------------------------------------- what becomes of the run


class Told:
    """A journal's client that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, dict[str, Any]]] = []

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        self.events.append((kind, data))

    @property
    def states(self) -> list[str]:
        return [data["state"] for kind, data in self.events if kind is EventKind.REHEARSAL]


PROGRAM = """
import json, os, sys
say = lambda **facts: print(json.dumps(facts), flush=True)
"""
PROTECTED = "import everstep.train as es\n"


@pytest.fixture
def told() -> Told:
    return Told()


def rehearsal(
    told: Told,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    mode: str,
    source: str = PROTECTED,
    **settings: float,
) -> RestartRehearsal:
    """A driver's rehearsal of a script, whose process runs ``program``."""
    (directory / "rehearsal_stand_in.py").write_text(PROGRAM + program)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.setattr(watch, "_PROGRAM", "rehearsal_stand_in")
    monkeypatch.setattr(watch, "own_temporary_dir", lambda: directory)
    storage = open_storage(str(directory / "storage"))
    archive = CodeStore(storage).put(tar_gz({"train.py": source})).digest
    run_spec = of(code=SCRIPT | {"archive": archive}, recovery={"rehearse": mode})
    given = {"rehearse_after_s": 0.01, "rehearse_idle_cpus": 0.0} | settings
    return RestartRehearsal(
        RunDir(storage, "run-1"),
        run_spec,
        RecoverySettings(**given),  # type: ignore[arg-type]
        cast(ActorJournalClient, told),
    )


def wait_for(fact: Any) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_requires_it_waits_and_trains_once_all_was_equal(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"say(state='made', report={EQUAL!r}, reused=False)"
    one = rehearsal(told, tmp_path, monkeypatch, program, "require")
    assert one.refusal(Stopping(None), History()) is None
    assert told.events[0][1]["code"] == ReasonCode.WAITING_FOR_REHEARSAL
    assert told.states == ["running", "made"]
    assert told.events[-1][1]["text"] == EQUAL["text"]


@pytest.mark.parametrize("mode", ["require", "warn"])
def test_one_that_is_known_is_not_made_again(
    mode: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rehearsal(told, tmp_path, monkeypatch, "sys.exit('made again')", mode)
    write_rehearsal(one._run_dir.storage, rehearsal_key(one._spec, versions()), EQUAL)
    if mode == "require":
        assert one.refusal(Stopping(None), History()) is None
    else:
        one.start()
        wait_for(lambda: told.events)
    [(kind, data)] = told.events
    assert kind is EventKind.REHEARSAL and data["reused"] and data["state"] == "made"
    assert one._process is None


@pytest.mark.parametrize(
    ("program", "source", "words"),
    [
        ("os.kill(os.getpid(), 9)", PROTECTED, "on the driver's node ended with code -9"),
        ("sys.exit(3)", PROTECTED, "its process on the driver's node ended with code 3"),
        ("say(state='not_made', text='no data here', report=None)", PROTECTED, "no data here"),
        ("print('no json')", PROTECTED, "JSONDecodeError"),
        ("say(state='made', report={})", PROTECTED, "ValidationError"),
        ("sys.exit('it runs')", "print('a script')\n", "the code calls no es.protect"),
    ],
)
def test_one_that_fails_refuses_a_run_that_requires_it_and_no_other(
    program: str,
    source: str,
    words: str,
    told: Told,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    required = rehearsal(told, tmp_path, monkeypatch, program, "require", source)
    refused = required.refusal(Stopping(None), History(last_step=3, last_attempt=1))
    assert refused is not None and refused.failed is ReasonCode.REHEARSAL_NOT_PASSED
    assert words in (refused.message or "") and refused.last_step == 3
    assert "set recovery.rehearse to warn" in (refused.message or "")
    assert told.states[-1] == "not_made"
    told.events.clear()
    beside_run = rehearsal(told, tmp_path, monkeypatch, program, "warn", source)
    assert beside_run.refusal(Stopping(None), History()) is None
    found = beside_run._made(beside=True)
    if source == PROTECTED:
        assert words in found["text"] and told.states == ["running", "not_made"]
    else:
        assert told.events == []  # no step of it is known, as its run says


def test_a_stop_ends_the_wait(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rehearsal(told, tmp_path, monkeypatch, "sys.stdin.read()", "require")
    stopping = Stopping(None)

    def stop() -> None:
        wait_for(lambda: told.states == ["running"])
        stopping.asked = "cancel"

    threading.Thread(target=stop).start()
    outcome = one.refusal(stopping, History())
    assert outcome is not None and outcome.stopped == "cancel" and outcome.failed is None
    wait_for_end(one)
    assert told.states == ["running", "not_made"]


def test_a_run_that_ends_does_not_wait_and_says_that_it_was_not_made(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rehearsal(told, tmp_path, monkeypatch, "sys.stdin.read(); say(state='made')", "warn")
    one.start()
    wait_for(lambda: told.states == ["running"])
    one.close()
    assert told.states == ["running", "not_made"]
    assert told.events[-1][1]["text"] == "the run ended first"
    wait_for_end(one)
    assert told.states == ["running", "not_made"]


def wait_for_end(one: RestartRehearsal) -> None:
    wait_for(lambda: one._process is not None and one._process.poll() is not None)
    wait_for(lambda: all(each.name != "rehearsal" for each in threading.enumerate()))


@pytest.mark.parametrize("settings", [{"rehearse_after_s": 60.0}, {"rehearse_idle_cpus": 1e6}])
def test_a_short_run_and_one_beside_which_nothing_is_idle_start_no_process(
    settings: dict[str, float], told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    one = rehearsal(told, tmp_path, monkeypatch, "", "warn", **settings)
    one.start()
    time.sleep(0.2)  # several looks
    one.close()
    wait_for(lambda: all(each.name != "rehearsal" for each in threading.enumerate()))
    assert one._process is None and told.events == []


def test_the_refusal_names_what_differs_and_the_way_out() -> None:
    made = {
        "state": "made",
        "report": EQUAL | {"outcome": "different"},
        "text": "The rate differs.",
    }
    assert refusal_of({"state": "made", "report": EQUAL, "text": ""}) is None
    words = refusal_of(made) or ""
    assert "The rate differs. Use" in words and words.endswith("set recovery.rehearse to warn")


def test_its_process_sees_neither_the_cluster_nor_a_gpu() -> None:
    found = rehearsal_environment({"RAY_ADDRESS": "1.2.3.4", "HOME": "/h", "WANDB_MODE": "online"})
    assert "RAY_ADDRESS" not in found and found["HOME"] == "/h"
    assert found["CUDA_VISIBLE_DEVICES"] == "" and found["WANDB_MODE"] == "disabled"


def test_the_program_exists() -> None:
    assert beside.__name__ == watch._PROGRAM
