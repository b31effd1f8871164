"""The start of a run without a service: the program that trains it, what of the program has changed
since the run began, and the numbers of the attempt.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.code import OWN_PACKAGES
from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.claims import claim_submission, newest_attempt, supersede_submission
from storage.errors import AlreadyClaimed, StorageNotFound
from storage.logs.journal import journal_events
from storage.run_dir import RunDir
from train_fn.errors import few
from train_fn.recovery.history import History, read_history

_PACKAGES = ("site-packages", "dist-packages")
_CONFIGS = (".cfg", ".ini", ".toml", ".yaml", ".yml")
"""Ends of names of files that a program reads its settings from, if an argument names them."""
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Program:
    """A script, or a module that ``python -m`` runs, with its arguments."""

    script: Path
    arguments: tuple[str, ...]

    def run_name(self, storage: str) -> str:
        """Return the name of its run: the script's path below the working directory, as a module's.
        It ends with a digest if there are arguments, or if another script might have that name
        among the runs in ``storage``."""
        here = Path.cwd()
        is_below = self.script.is_relative_to(here)
        path = self.script.relative_to(here) if is_below else Path(self.script.name)
        module = ".".join(path.with_suffix("").parts)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", module).lstrip("._-") or "loop"
        # train.2 is the second training of train.py
        is_clear = is_below and not path.stem.isdigit() and len(name) <= _LONGEST_NAME
        is_clear &= path == Path(*name.split(".")).with_suffix(".py")
        is_shared = "://" in storage or not Path(storage).expanduser().resolve().is_relative_to(
            here
        )
        if is_clear and not is_shared and not self.arguments:
            return name
        told = (str(path if is_below and not is_shared else self.script), *self.arguments)
        return f"{name[-_LONGEST_NAME:].lstrip('._-')}-{_digest(told)[:6]}"

    def facts(self, run_dir: RunDir) -> dict[str, Any]:
        """Return what tells whether the program has changed since a run began: the script's place,
        seen from the run's directory, and digests of its arguments, which may hold a secret, and of
        each of its files."""
        place = str(self.script)
        if run_dir.local_path is not None:
            place = os.path.relpath(place, run_dir.local_path)
        return {
            "script": _text(place),
            "arguments": _digest(self.arguments),
            "files": {
                _text(os.path.relpath(path, self.script.parent)): digest
                for path in sorted({self.script, *_modules(), *self._configs()})
                if (digest := _digest_of(path)) is not None
            },
        }

    def _configs(self) -> Iterator[Path]:
        """Yield the files with settings that arguments name. Others may be the program's own
        output."""
        for argument in self.arguments:
            path = Path(argument.rpartition("=")[2])
            if path.suffix in _CONFIGS:
                yield path.absolute()


def present_program() -> Program | None:
    """Return the program of this process; None in a notebook or a prompt, which have no file."""
    file = vars(sys.modules["__main__"]).get("__file__")
    if file is None:
        return None
    given = Path(sys.argv[0])
    # a profiler and the like run a script in their own place
    script = given if _is_installed(Path(file)) and given.is_file() else Path(file)
    return Program(script.parent.resolve() / script.name, tuple(sys.argv[1:]))


def changes(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has changed between two ``facts`` of a program, in words. Files that only one of
    them knows do not count: when a module is imported may depend on where the training is."""
    found = [
        name
        for name, digest in now.get("files", {}).items()
        if kept.get("files", {}).get(name, digest) != digest
    ]
    if kept.get("arguments") not in (None, now.get("arguments")):
        found.append("the arguments")
    if kept.get("script") not in (None, now.get("script")):
        found.append(f"the script's place ({kept['script']}, now {now.get('script')})")
    return found if now else []


def _modules() -> Iterator[Path]:
    """Yield the files of imported modules that belong to no installed package."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and name.partition(".")[0] not in OWN_PACKAGES:
            path = Path(file).absolute()
            if path.suffix == ".py" and not _is_installed(path):
                yield path


def _is_installed(path: Path) -> bool:
    standard = sysconfig.get_path("stdlib")
    return path.is_relative_to(standard) or any(part in _PACKAGES for part in path.parts)


def _text(path: str) -> str:
    """Return a path as text that can be stored: a name on disk need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _digest(words: tuple[str, ...]) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _digest_of(path: Path) -> str | None:
    """Return a digest of a file; None if it cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return None


# ---------------------------------------------------------------- submission

# How a start of these processes becomes a submission and an attempt of the run.

NO_ARCHIVE = "sha256:" + "0" * 64
"""Stands for the code of a loop that no service runs. ``code.config`` holds its program then."""
MAY_CHANGE = frozenset(
    {"name", "project", "priority", "tags", "scaling", "checkpoint", "recovery", "env"}
)
"""Fields of a spec that another start of the same run may change: none of them changes what is
computed."""


@dataclass(frozen=True)
class LocalStart:
    """The numbers that rank 0 chose for this start, for all ranks."""

    submission: int
    attempt: int
    was_done: bool = False
    """Whether an earlier start has made all steps."""
    note: str | None = field(default=None, compare=False)
    """What was found in the run's directory, as a line for people."""


def begin_run(
    run_dir: RunDir, spec: RunSpec, launch: str, *, fresh: bool | None = None
) -> LocalStart:
    """Create the run's directory, or continue the run that is there. Called by rank 0 alone.

    Args:
        fresh: True deletes what other launches left there. False goes on with a finished run even
            if the program has changed since it began, None refuses that.

    Raises UsageError if the directory holds a run of another spec, or of a program that has changed
    since the run was finished.
    """
    submissions = run_dir.submissions()
    newest = submissions[-1] if submissions else 0
    same = newest > 0 and _launched_by(run_dir, newest) == launch
    if fresh and not same:  # processes that torchrun has replaced go on
        run_dir.delete()
        newest = 0
    try:
        kept = run_dir.read_spec()
    except StorageNotFound:
        kept = spec
    differing = _differences(kept, spec)
    if differing:
        raise UsageError(
            f"{run_dir.uri} holds a run of another spec ({', '.join(differing)} differ); choose "
            "another --run-id, or delete that directory to begin anew"
        )
    history = read_history(run_dir)
    before, now = _program(kept), _program(spec)
    changed = few(changes(before, now))
    where = run_dir.local_path or run_dir.uri
    if newest and changed and history.finished_at is not None and fresh is None and not same:
        raise UsageError(
            f"run {run_dir.run_id} is finished at step {history.finished_at}, and {changed} "
            f"changed since it began. To train anew, delete {where}, or pass another run_id; to go "
            "on from its final state, pass fresh=False"
        )
    if now:
        files = {**before.get("files", {}), **now["files"]}
        spec = _with_program(spec, {**now, "files": files})
    run_dir.write_spec(spec)
    if not same:
        newest = _claim_next(run_dir, newest)
    attempt = newest_attempt(run_dir, newest, history.last_attempt) + 1
    return LocalStart(newest, attempt, history.succeeded, _note(run_dir, where, history, changed))


def _note(run_dir: RunDir, where: str, history: History, changed: str) -> str | None:
    """Return the line that says what was found in a run's directory; None if nothing is special."""
    run = f"run {run_dir.run_id}"
    if history.last_attempt == 0:
        return f"{run} begins in {where}"
    since = f" although {changed} changed since it began" if changed else ""
    if history.finished_at is not None:
        found = f"{run} is finished at step {history.finished_at}; only steps after that are made"
    elif changed:
        found = f"{run} goes on with its state"
    else:
        return None  # the restored state says where it goes on
    return f"{found}{since}. To begin anew, delete {where}"


def _is_loop(spec: RunSpec) -> bool:
    """Return whether a loop of its own trains, outside of any service."""
    return spec.code is not None and spec.code.archive == NO_ARCHIVE


def _program(spec: RunSpec) -> dict[str, Any]:
    """Return the facts of the program that trains (``Program.facts``); {} if none is known."""
    return spec.code.config if spec.code is not None and _is_loop(spec) else {}


def _with_program(spec: RunSpec, facts: dict[str, Any]) -> RunSpec:
    assert spec.code is not None
    return spec.model_copy(update={"code": spec.code.model_copy(update={"config": facts})})


def _claim_next(run_dir: RunDir, newest: int) -> int:
    """Claim the first submission after ``newest`` that nobody has begun. Two starts at the same
    time get one each."""
    number = newest + 1
    while True:
        try:
            claim_submission(run_dir, number)
        except AlreadyClaimed:
            number += 1
        else:
            supersede_submission(run_dir, number)
            return number


def _differences(kept: RunSpec, spec: RunSpec) -> list[str]:
    """Return the names of the fields that differ between two specs and change what is computed."""
    if _is_loop(kept) and _is_loop(spec):
        kept = _with_program(kept, _program(spec))
    before, after = kept.model_dump(), spec.model_dump()
    names = [
        name
        for name in after
        if name not in MAY_CHANGE and name != "train" and before.get(name) != after[name]
    ]
    names += [
        f"train.{name}"
        for name in after["train"]
        if name != "loader" and before["train"].get(name) != after["train"][name]
    ]
    return names + (
        ["the resolved micro_batch_size"] if kept.micro_batch_size != spec.micro_batch_size else []
    )


def _launched_by(run_dir: RunDir, submission: int) -> str | None:
    """Return who started the processes of a submission's last attempt."""
    launch = None
    for event in journal_events(run_dir, (submission,), (EventKind.ATTEMPT_STARTED,)):
        launch = event.data.get("launch")
    return launch
