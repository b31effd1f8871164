"""What is left of older submissions, by name; and when a driver counts as dead."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading

import psutil

from tests.support.service_process import wait_for
from train_fn.ray_train.journal_actor import actors_of_older, controller_name
from train_fn.recovery.marks import DriverProcess


def test_only_what_older_submissions_of_the_same_run_left_is_found() -> None:
    older = [controller_name("run_a-s001", 2), "journal-run_a-s001-s002"]
    others = [
        controller_name("run_a-s001", 3),
        "journal-run_a-s001-s004",
        controller_name("run_a", 1),
        "else",
    ]
    assert actors_of_older([*others, *older], "run_a-s001", 3) == older


def test_a_driver_is_dead_once_it_has_ended_and_not_while_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        driver = DriverProcess(process.pid, psutil.Process(process.pid).create_time())
        process.send_signal(signal.SIGSTOP)
        wait_for(
            lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 60, "its stop"
        )
        assert driver.is_alive()
        assert not dataclasses.replace(driver, began_at=driver.began_at - 1).is_alive(), (
            "another process has its id"
        )
        dataclasses.replace(driver, began_at=driver.began_at - 1).wait()  # ended long ago
        waiting = threading.Thread(target=driver.wait, daemon=True)
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive(), "a driver that is only stopped may go on"
        process.kill()
        waiting.join(60)
        assert not waiting.is_alive() and not driver.is_alive()
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert not driver.is_alive()
    assert DriverProcess.own().is_alive()
