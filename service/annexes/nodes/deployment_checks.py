"""Checks of the deployment. Each is a short Ray job of ours that writes its report to the
storage."""

from __future__ import annotations

import asyncio
import platform
import shlex
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from pydantic import ValidationError

from everstep.wire.deployment import DeploymentCheck, DeploymentReport, ServiceFacts, source_digest
from service.cluster.ray_jobs import RAY_PYTHON, Job, RayJobs
from service.db.ids import new_id
from storage.cluster import read_report
from storage.filesystem import Storage

NAME: Final = "everstep-deployment-check"


class DeploymentChecks:
    """Starts checks and reads their results. It has no state: a check is its job and its report.

    Args:
        storage: The storage of runs.
        ray: The cluster.
        clock: Unix seconds.
    """

    def __init__(self, storage: Storage, ray: RayJobs, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._ray = ray
        self._clock = clock

    async def start(self, all_reduce_s: float) -> DeploymentCheck:
        """Submit a check. Raises RayError."""
        check_id = new_id("check", self._clock())
        words = ["--storage", self._storage.uri, "--check-id", check_id]
        options = shlex.join([*words, "--all-reduce-s", f"{all_reduce_s:g}"])
        command = f'"{RAY_PYTHON}" -P -m train_fn.deployment_check {options}'
        await self._ray.submit(check_id, command, {"name": NAME})
        return await self._answer(check_id, "running")

    async def get(self, check_id: str) -> DeploymentCheck:
        """Return a check. Raises JobNotFound if it has neither job nor report, RayError,
        StorageError."""
        if (report := await self._report(check_id)) is not None:
            return await self._answer(check_id, "done", report=report)
        job = await self._ray.job(check_id)
        if not job.status.ended:
            return await self._answer(check_id, "running")
        # The job may have written its report after the first read.
        if (report := await self._report(check_id)) is not None:
            return await self._answer(check_id, "done", report=report)
        return await self._answer(check_id, "failed", problem=self._failure(job))

    async def _answer(
        self,
        check_id: str,
        state: str,
        *,
        problem: str | None = None,
        report: DeploymentReport | None = None,
    ) -> DeploymentCheck:
        facts = await asyncio.to_thread(self._facts)
        return DeploymentCheck.model_validate(
            {"id": check_id, "state": state, "problem": problem, "service": facts, "report": report}
        )

    async def _report(self, check_id: str) -> DeploymentReport | None:
        data = await asyncio.to_thread(read_report, self._storage, check_id)
        try:
            return None if data is None else DeploymentReport.model_validate_json(data)
        except ValidationError:  # The head runs another version of Everstep.
            return None

    def _failure(self, job: Job) -> str:
        if job.driver_exit_code == 0:
            return (
                f"the check succeeded, but its report is not in {self._storage.uri}: head and "
                "service do not use the same storage, or not the same version of Everstep. Give "
                "both the same --storage and version"
            )
        return (
            f"the check's job ended with status {job.status}: "
            f"{(job.message or 'without a message').strip()[-1500:]}"
        )

    def _facts(self) -> ServiceFacts:
        versions: dict[str, str | None] = {
            "python": platform.python_version(),
            "everstep": version("everstep"),
        }
        return ServiceFacts(
            hostname=socket.gethostname(),
            versions=versions,
            source=source_digest(),
            at=datetime.fromtimestamp(self._clock(), UTC),
            storage=self._storage.uri,
        )
