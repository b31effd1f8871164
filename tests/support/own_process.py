"""Run tests marked ``own_process`` in a process of their own.

Tests that train call native code. When that code aborts, it takes its process along. In a child,
such a crash fails one test, and the report carries the test's name, the signal, and what the
process wrote last.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

MARK = "own_process"
_STDERR = 2


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Fork, run the test in the child, and report its results here."""
    if item.get_closest_marker(MARK) is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # as runtestprotocol does
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item) -> list[Any]:
    """Return the child's reports, or a failed one if it ended without any."""
    began = time.time()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # what an earlier test left to the collector, a loader's processes too, is the parent's
        gc.freeze()
        os.close(reading)
        _run_and_exit(item, writing)
    os.close(writing)
    problem = None
    try:
        with _ended(pid) as ended, os.fdopen(reading, "rb") as pipe:
            sent = pipe.read()
    except pytest.fail.Exception as exc:  # pytest-timeout raises it wherever this process is
        sent, problem = b"", str(exc)
    if sent and ended == [0]:
        restore = item.config.hook.pytest_report_from_serializable
        return [restore(config=item.config, data=data) for data in pickle.loads(sent)]
    what = problem or f"The test's process {_how(ended[0])} before it reported a result."
    return [_crashed(item, f"{what}\n\nIts last words:\n{_last_words(item)}", began)]


@contextmanager
def _ended(pid: int) -> Iterator[list[int]]:
    """Yield a list that holds the child's exit code afterwards. A child that still runs when an
    exception passes is killed."""
    code: list[int] = []
    try:
        yield code
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        code.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run_and_exit(item: pytest.Item, writing: int) -> None:
    """Run the test and write its reports. Fixtures of a wider scope stay: they belong to the
    parent."""
    code = 1
    try:
        # glibc reports damage of the heap to stderr, not to a terminal
        os.environ["LIBC_FATAL_STDERR_"] = "1"
        faulthandler.enable(_STDERR)
        reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]
        to_plain = item.config.hook.pytest_report_to_serializable
        plain = [to_plain(config=item.config, report=report) for report in reports]
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(plain))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _last_words(item: pytest.Item) -> str:
    """Return what the child wrote. pytest's capture is a file that parent and child share."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    return "".join(capture.read_global_capture()) if capture is not None else ""


def _crashed(item: pytest.Item, text: str, began: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when="call",
        start=began,
        stop=time.time(),
        duration=time.time() - began,
    )
