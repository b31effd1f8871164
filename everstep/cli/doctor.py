"""`everstep doctor`: check a deployment from end to end, and say what to fix."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from everstep.cli.options import JsonOption, UrlOption
from everstep.cli.terminal import Exit, command, terminal
from everstep.client.client import Client
from everstep.doctor.control_plane import cluster_findings, service_findings
from everstep.doctor.finding import Finding
from everstep.doctor.findings import check_findings
from everstep.doctor.shared_storage import identity_findings
from everstep.errors import AuthError, EverstepError, Unavailable, WaitTimeout

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_SIGNS = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}


@command
def doctor(
    all_reduce: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=60.0, help="Duration of the all-reduce test."),
    ] = 5.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Maximum time to wait for the nodes.")
    ] = 240.0,
    json_: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Check service, nodes, versions, storage, ports, clocks and network, and say what to fix.
    Needs an admin token.

    Exit code 0 without problems (warnings are possible), 1 with problems, 3 if the service cannot
    be reached.
    """
    out = terminal()
    findings: list[Finding] = []
    client = out.client()
    reached = True
    try:
        findings += service_findings(client.ready())
        findings += identity_findings(client.storage.status())
        findings += _cluster(client, all_reduce, timeout)
    except Unavailable as exc:
        reached = bool(findings)
        remedy = (
            "Check that `everstep serve` runs there and listens on that address (--host), and that "
            "no firewall or proxy in between refuses."
        )
        findings.append(Finding("service", "problem", str(exc), remedy))
    except AuthError as exc:
        remedy = (
            "Set EVERSTEP_TOKEN to an admin token: from `everstep token create NAME --role admin`, "
            "or the file EVERSTEP_HOME/token."
        )
        findings.append(Finding("service", "problem", str(exc), remedy))
    _print_findings(findings)
    if not reached:
        raise typer.Exit(Exit.UNREACHABLE)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(Exit.FAILED)


def _cluster(client: Client, all_reduce_s: float, timeout_s: float) -> list[Finding]:
    """Return the findings about the cluster, and those of its nodes."""
    info = client.cluster()
    findings = cluster_findings(info)
    if not info.available:
        return findings
    if not terminal().as_json:
        terminal().note("checking every node; this takes up to a minute")
    try:
        asked = client.start_deployment_check(all_reduce_s=all_reduce_s)
        check = client.wait_deployment_check(asked.id, timeout_s=timeout_s)
    except WaitTimeout as exc:
        remedy = (
            "A node may hang or be slow: see `everstep cluster` and Ray's dashboard, or increase "
            "--timeout."
        )
        return [*findings, Finding("nodes", "problem", str(exc), remedy)]
    except AuthError:
        raise
    except EverstepError as exc:
        return [
            *findings,
            Finding(
                "nodes", "problem", f"the check was not started: {exc}", "Read the service's log."
            ),
        ]
    return [*findings, *check_findings(check, asked.service.at)]


def _print_findings(findings: list[Finding]) -> None:
    out = terminal()
    problems = sum(finding.level == "problem" for finding in findings)
    if out.as_json:
        out.json({"ok": problems == 0, "findings": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        out.line(
            f"{_SIGNS[finding.level]} {finding.check}: {finding.message}", _STYLES[finding.level]
        )
        if finding.remedy:
            out.line(f"           {finding.remedy}")
    out.line("no problems" if problems == 0 else f"{problems} problem{'s' if problems > 1 else ''}")
