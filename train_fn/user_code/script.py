"""Run a user's script in this process, as ``python FILE`` or ``python -m MODULE`` would."""

from __future__ import annotations

import ast
import logging
import runpy
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.code import MODULE_FLAG, script_path
from everstep.wire import ErrorKind
from train_fn.errors import BadTask, PeersGone, ScriptExited
from train_fn.recovery.evidence import kind_of
from train_fn.user_code.modules import declare_missing_ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """A script's file, and the name of its module if it runs as one."""

    file: Path
    module: str | None


def find_script(directory: Path, files: Collection[str], script: str) -> Script:
    """Return the script that ``code.script`` names among ``files``, which lie in ``directory``.

    A script that imports relatively runs as a module of its package: as a plain file it could not.
    Raises BadTask if the archive has no such file.
    """
    path = script_path(files, script)
    if path is None:
        raise BadTask(f"the archive has no script {script!r}; correct code.script")
    if script.startswith(MODULE_FLAG):
        return Script(directory / path, script.removeprefix(MODULE_FLAG).strip())
    package = _package_of(path, files)
    if package and _imports_relatively(directory / path):
        return Script(directory / path, f"{package}.{Path(path).stem}")
    return Script(directory / path, None)


def run_as_main(script: Script, root: Path, argv: Sequence[str]) -> None:
    """Run a script as the main program, with its arguments, to its end.

    Args:
        root: directory from which its package is imported, if it runs as a module of one.
        argv: its arguments, without its own name.

    Raises:
        ScriptExited: it exited with another code than 0.
        PeersGone: it exited because another rank is gone.
    """
    declare_missing_ops()  # for torchvision, which the script may import
    first = str(root if script.module is not None else script.file.parent)
    before = list(sys.argv), list(sys.path)
    sys.argv, sys.path = [str(script.file), *argv], [first, *sys.path]
    try:
        with _no_handlers_of_signals():
            if script.module is None:
                runpy.run_path(str(script.file), run_name="__main__")
            else:
                runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        _check_exit(script, exc)
    finally:
        sys.argv, sys.path = before


def _check_exit(script: Script, exc: SystemExit) -> None:
    """Raise unless the script exited with code 0, or without a code."""
    if exc.code is None or exc.code == 0:
        return
    how = f"with code {exc.code}" if isinstance(exc.code, int) else f"with an error: {exc.code}"
    before = exc.__context__
    if before is not None and kind_of(before) is ErrorKind.COLLECTIVE:
        raise PeersGone(f"{script.file.name} exited {how} after {before}") from before
    raise ScriptExited(f"{script.file.name} exited {how}") from exc


def _package_of(path: str, files: Collection[str]) -> str:
    """Return the dotted name of the package that a file lies in; empty if it lies in none."""
    names: list[str] = []
    directory = path.rpartition("/")[0]
    while directory and f"{directory}/__init__.py" in files:
        directory, _, name = directory.rpartition("/")
        names.insert(0, name)
    return ".".join(names) if all(name.isidentifier() for name in names) else ""


def _imports_relatively(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return False  # running it reports the error
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


@contextmanager
def _no_handlers_of_signals() -> Iterator[None]:
    """Let ``signal.signal`` do nothing on this thread: Python would raise, as only the main thread
    of a process can have handlers."""
    real = signal.signal

    def install(number: int, handler: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return real(number, handler)
        logger.warning(
            "the handler of %s is not installed: a script runs on a thread of its rank's process. "
            "A run that is stopped interrupts it by an exception",
            signal.Signals(number).name,
        )
        return signal.getsignal(number)

    signal.signal = install  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = real
