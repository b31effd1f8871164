"""All findings of a deployment check, from the report of its job. Pure."""

from __future__ import annotations

from datetime import datetime

from everstep.doctor.finding import Finding, problem
from everstep.doctor.network import all_reduce_findings, interface_findings, port_findings
from everstep.doctor.nodes import answer_findings, clock_findings, gpu_findings, memory_findings
from everstep.doctor.shared_storage import sharing_findings
from everstep.doctor.versions import version_findings
from everstep.wire.deployment import DeploymentCheck


def check_findings(check: DeploymentCheck, asked_at: datetime) -> list[Finding]:
    """Return the findings from the check's job.

    Args:
        check: a finished check.
        asked_at: the service's clock when it was requested.
    """
    if check.report is None:
        remedy = (
            "Read the job's log on Ray's dashboard. Install Everstep in the environment in which "
            "`ray start` runs."
        )
        return [problem("nodes", f"the check failed: {check.problem}", remedy)]
    nodes = check.report.nodes
    names = {node.id: f"{node.hostname} ({node.id[:8]})" for node in nodes}
    up = [node for node in nodes if node.problem is None]
    parts = (
        answer_findings(nodes, names),
        version_findings(up, names, check.service),
        clock_findings(up, names, check.report, check.service, asked_at),
        port_findings(up, names),
        interface_findings(up, names),
        sharing_findings(up, names, check.service.storage),
        memory_findings(up, names),
        gpu_findings(up, names),
        all_reduce_findings(check.report.all_reduce, names),
    )
    return [finding for part in parts for finding in part]
