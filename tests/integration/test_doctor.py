"""`everstep doctor` on a real cluster: every node looks at itself and at the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from everstep.doctor.findings import check_findings
from everstep.wire.deployment import DeploymentReport
from tests.support.service_process import ServiceProcess


def test_every_node_is_asked_and_nothing_is_wrong(service: ServiceProcess) -> None:
    environment = {**os.environ, "EVERSTEP_URL": service.url, "EVERSTEP_TOKEN": service.token}
    command = [sys.executable, "-m", "everstep.cli.main", "doctor", "--all-reduce", "1", "--json"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {
        finding["check"]: finding["message"] for finding in json.loads(ended.stdout)["findings"]
    }
    assert "all 4 nodes" in found["nodes"]
    assert "over 3 nodes with gloo" in found["all_reduce"]
    assert "torch" in found["versions"] and "read each other's files" in found["storage"]
    [check_id] = [entry.name for entry in (service.home / "storage/cluster/checks").iterdir()]
    with service.client() as client:
        check = client.wait_deployment_check(check_id)
    assert isinstance(check.report, DeploymentReport)
    assert all(
        node.clock_offset_s is not None and not node.unreachable for node in check.report.nodes
    )
    assert not (service.home / "storage/cluster/checks" / check_id / "probes").exists()
    assert any(
        finding.check == "ports" and finding.level == "ok"
        for finding in check_findings(check, check.service.at)
    )
