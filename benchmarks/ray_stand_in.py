"""A stand-in for Ray's dashboard in a process of its own, so that what it costs is nobody's who is
measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fake_ray import FakeRay, serving


class StandIn:
    """The process, and the dashboard's URL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self.url = self._output.readline().strip()

    def run_jobs(self, job_ids: Iterable[str]) -> None:
        """Have it say from now on that these submissions' jobs run."""
        self._input.write(" ".join(job_ids) + "\n")
        self._input.flush()
        self._output.readline()


@contextmanager
def ray_stand_in() -> Iterator[StandIn]:
    """It ends with the block."""
    command = [sys.executable, "-m", "benchmarks.ray_stand_in"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        try:
            yield StandIn(process)
        finally:
            process.stdin.close()


def main() -> None:
    """Serve until the input ends; each line of it names jobs that run."""
    with serving(FakeRay()) as ray:
        print(ray.url, flush=True)
        for line in sys.stdin:
            for job_id in line.split():
                run_id, _, submission = job_id.rpartition("-s")
                about: dict[str, Any] = {
                    "metadata": {"run_id": run_id, "submission": str(int(submission))},
                    "entrypoint": "x",
                }
                ended = {"message": "", "driver_node_id": None, "driver_exit_code": None}
                ray.jobs[job_id] = about | ended | {"submission_id": job_id, "status": "RUNNING"}
            print("ready", flush=True)


if __name__ == "__main__":
    main()
