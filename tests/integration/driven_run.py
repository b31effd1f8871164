"""A run under a real driver process, followed through its journal as the service follows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent, read_journal
from storage.run_dir import RunDir
from tests.integration.ray_cluster import REPOSITORY, RayCluster
from train_fn.node.node_dir import shared_memory_root

PATIENCE_S = 150.0
"""Longest wait for any one fact; a fact that does not come fails the test with the driver's
output."""

SMALL = {
    "name": "image_classification",
    "model": {"name": "mini_resnet", "args": {"width": 8}},
    "data": {"name": "digits"},
}


def spec(*, workers: tuple[int, int] = (1, 2), **sections: Any) -> RunSpec:
    """A small request; ``sections`` replace those of the spec."""
    return RunSpec.model_validate(
        {
            "name": "driven",
            "task": SMALL,
            "scaling": {"min_workers": workers[0], "max_workers": workers[1]},
            **sections,
        }
    )


class DrivenRun:
    """One run in ``storage``. ``small`` runs the small training function of these tests in place of
    the loop; ``module`` is the driver's."""

    def __init__(
        self,
        cluster: RayCluster,
        storage: Path,
        run_spec: RunSpec,
        *,
        small: bool = False,
        module: str = "train_fn.driver",
    ) -> None:
        self.run_dir: RunDir = RunDir(open_storage(str(storage)), f"run_{uuid.uuid4().hex[:12]}")
        self.run_dir.write_spec(run_spec)
        self.events: list[JournalEvent] = []
        self._cluster = cluster
        self._storage = storage
        self._module = "tests.integration.small_driver" if small else module
        self._cursor: str | None = None
        self.submission = 0
        self.driver: subprocess.Popen[bytes] | None = None

    def start(self, submission: int = 1, **env: str) -> None:
        """Start the driver of a submission."""
        self.submission, self._cursor = submission, None
        arguments = [
            "--storage",
            str(self._storage),
            "--run-id",
            self.run_dir.run_id,
            "--submission",
            str(submission),
        ]
        with self._output.open("ab") as output:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", self._module, *arguments],
                env={**self._cluster.env, **env},
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
            )

    def wait_for(self, fact: Callable[[], Any], what: str) -> Any:
        """The first truthy value of ``fact``, asked again after every look at the journal."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self.driver is not None and self.driver.poll() is not None
            self.read()
            if found := fact():
                return found
            if ended:
                raise AssertionError(f"the driver ended before {what}\n{self.describe()}")
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{what} did not come within {PATIENCE_S:g} s\n{self.describe()}"
                )
            time.sleep(0.02)

    def wait_for_step(self, step: int, *, attempt: int = 0) -> None:
        """Until that many steps are done, by an attempt later than ``attempt``."""
        self.wait_for(
            lambda: any(n >= step for n, number in self.steps() if number > attempt),
            f"step {step} after attempt {attempt}",
        )

    def wait_for_end(self) -> int:
        """The driver's exit code."""
        driver = self.driver
        assert driver is not None
        code = self.wait_for(
            lambda: None if driver.poll() is None else ("ended", driver.returncode),
            "the driver's end",
        )[1]
        self.read()
        return int(code)

    def kill_driver(self) -> None:
        """SIGKILL to the driver, as when its node runs out of memory."""
        assert self.driver is not None
        self.driver.kill()
        self.driver.wait()
        self.driver = None

    def wait_for_no_actors(self) -> None:
        """Until nothing of any run is left in the cluster."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.cluster_actors():
            assert time.monotonic() < deadline, f"actors are left: {left}\n{self.describe()}"
            time.sleep(0.05)

    def read(self) -> None:
        found, self._cursor = read_journal(self.run_dir, self.submission, self._cursor, 5000)
        self.events += found

    def read_all(self) -> None:
        """Read the journal to its end, once the driver has ended."""
        before = -1
        while len(self.events) != before:
            before = len(self.events)
            self.read()

    def of(self, kind: EventKind) -> list[JournalEvent]:
        return [event for event in self.events if event.kind is kind]

    def last(self, kind: EventKind) -> JournalEvent:
        found = self.of(kind)
        assert found, f"no {kind} event\n{self.describe()}"
        return found[-1]

    def steps(self) -> list[tuple[int, int]]:
        """(step, attempt) of every metric point, in the journal's order."""
        return [
            (point["step"], event.attempt)
            for event in self.of(EventKind.METRICS)
            for point in event.data["points"]
        ]

    def worker(self, rank: int) -> dict[str, Any]:
        """Place of a rank in the newest attempt."""
        workers: list[dict[str, Any]] = self.last(EventKind.ATTEMPT_STARTED).data["workers"]
        return next(worker for worker in workers if worker["rank"] == rank)

    def actor_pid(self, class_name: str) -> int:
        """Process id of this cluster's actor of a class."""
        for process in psutil.process_iter(["cmdline"]):
            title = " ".join(process.info["cmdline"] or [])
            if class_name in title and title.startswith("ray::") and self._is_of_cluster(process):
                return process.pid
        raise AssertionError(f"no process of {class_name}")

    def cluster_actors(self) -> list[tuple[int, str]]:
        """Process id and title of every actor of this cluster that lives."""
        titles = [
            (process.pid, " ".join(process.info["cmdline"] or []), process)
            for process in psutil.process_iter(["cmdline"])
        ]
        return [
            (pid, title)
            for pid, title, process in titles
            if title.startswith("ray::")
            and "IDLE" not in title
            and "Agent" not in title
            and self._is_of_cluster(process)
        ]

    def _is_of_cluster(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("RAY_TMPDIR") == self._cluster.env["RAY_TMPDIR"]
        except psutil.Error:
            return False

    def check_sequence(self) -> None:
        """The journal is one sequence without gaps, and holds nothing twice."""
        numbers = [event.n for event in self.events]
        assert numbers == list(range(1, len(numbers) + 1))
        sent = [(event.source, event.source_n) for event in self.events]
        assert len(set(sent)) == len(sent)
        for source in {name for name, _ in sent}:
            own = [n for name, n in sent if name == source]
            assert own == sorted(own)

    def stop(self) -> None:
        """End the driver, and remove what a run that did not end leaves in shared memory."""
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        shutil.rmtree(shared_memory_root() / self.run_dir.run_id, ignore_errors=True)

    def describe(self) -> str:
        """What happened, for a failed test."""
        lines = [
            f"{event.n} {event.kind} a{event.attempt} {event.source} {str(event.data)[:600]}"
            for event in self.events
            if event.kind is not EventKind.METRICS
        ]
        lines.append(f"steps {self.steps()[-3:]}")
        if self._output.exists():
            lines.append(self._output.read_text(errors="replace")[-3000:])
        return "\n".join(lines)

    @property
    def _output(self) -> Path:
        return self._storage / "driver.out"
