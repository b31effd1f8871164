"""The runbook names every alert that can ring and every verdict that can be given, and its links
lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from everstep.wire import Verdict

ROOT = Path(__file__).parents[3]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()


def test_every_alert_has_its_section() -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set(re.findall(r"^### (Everstep\w+)$", RUNBOOK, re.MULTILINE)) == alerts


def test_every_verdict_has_its_row() -> None:
    table = RUNBOOK.partition("\n## Verdicts\n")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {
        verdict.value for verdict in Verdict
    }


def test_links_between_the_documents_lead_somewhere() -> None:
    for document in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", document.read_text()
        ):
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name}: {target}"
            if anchor and path.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
                slugs = {
                    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                    for heading in headings
                }
                slugs |= set(re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE))
                assert anchor in slugs, f"{document.name}: {target}#{anchor}"
