"""Checks of the deployment: each a short job of ours on the Ray cluster, whose report comes back
through the storage."""

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
from service.cluster.ray_jobs import Job, RayJobs, RayUnavailable
from service.db.ids import new_check_id
from storage.cluster.deployment_checks import read_report
from storage.filesystem import Storage

NAME: Final = "everstep-deployment-check"


class DeploymentChecks:
    """Starts checks and tells what became of them. Keeps nothing: a check is its job and its
    report.

    Args:
        storage: The one that runs use.
        ray: The cluster; None where the service is connected to none.
        clock: Unix seconds.
    """

    def __init__(self, storage: Storage, ray: RayJobs | None, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._ray = ray
        self._clock = clock

    async def start(self, all_reduce_s: float) -> DeploymentCheck:
        """Submit a check. Raises RayError."""
        check_id = new_check_id(self._clock())
        words = [
            "python",
            "-m",
            "train_fn.deployment_check",
            "--storage",
            self._storage.uri,
            "--check-id",
            check_id,
        ]
        command = shlex.join([*words, "--all-reduce-s", f"{all_reduce_s:g}"])
        await self._cluster().submit(check_id, command, {"name": NAME})
        return await self._answer(check_id, "running")

    async def get(self, check_id: str) -> DeploymentCheck:
        """What is known of a check. Raises JobNotFound where there is neither job nor report,
        RayError, StorageError."""
        if (report := await self._report(check_id)) is not None:
            return await self._answer(check_id, "done", report=report)
        job = await self._cluster().job(check_id)
        if not job.status.ended:
            return await self._answer(check_id, "running")
        # The report may have come between the two questions.
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
        except ValidationError:  # written by an Everstep of another version on the head
            return None

    def _failure(self, job: Job) -> str:
        if job.driver_exit_code == 0:
            return (
                "the check ended well, and the service cannot read its report in "
                f"{self._storage.uri}: head and "
                "service do not use the same storage, or not the same version of Everstep"
            )
        return (
            f"the check's job ended {job.status}: "
            f"{(job.message or 'without a message').strip()[-1500:]}"
        )

    def _cluster(self) -> RayJobs:
        if self._ray is None:
            raise RayUnavailable("the service is connected to no Ray cluster")
        return self._ray

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
