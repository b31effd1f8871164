"""Ask for known vulnerabilities of a list of pinned packages: ``python scripts/audit.py
[constraints.txt]``.

Exit code 0: none is known; 1: some are; 2: the advisories could not be asked, so that nothing is
known.
"""

from __future__ import annotations

import json
import subprocess
import sys

CANNOT_ASK = 2


def main(path: str = "constraints.txt") -> int:
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--requirement",
        path,
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
    ]
    ended = subprocess.run(
        [*command, "--progress-spinner", "off"], capture_output=True, text=True, check=False
    )
    try:
        packages = json.loads(ended.stdout)["dependencies"]
    except ValueError:
        print(f"the advisories could not be asked: {ended.stderr.strip()[-500:]}", file=sys.stderr)
        return CANNOT_ASK
    asked = [package for package in packages if "skip_reason" not in package]
    for package in asked:
        for fault in package["vulns"]:
            mended = ", ".join(fault["fix_versions"]) or "no version"
            print(f"{package['name']} {package['version']}: {fault['id']}, mended in {mended}")
    skipped = [package for package in packages if "skip_reason" in package]
    if skipped:
        print(
            f"{len(skipped)} of {len(packages)} packages were not audited: "
            f"{skipped[0]['skip_reason']}",
            file=sys.stderr,
        )
    if any(package["vulns"] for package in asked):
        return 1
    if skipped:
        return CANNOT_ASK
    print(f"{len(asked)} packages, no known vulnerability")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
