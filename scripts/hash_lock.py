"""Write locks for ``pip install --require-hashes``, one a platform: ``python
scripts/hash_lock.py``.

A lock names each package that a service or node needs, at the version of constraints.txt, with the
SHA-256 of the file that the package index at hand has for that platform. Nothing says where that
index is: pip asks its own, and refuses a file that differs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LOCKS = REPOSITORY / "locks"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MANYLINUX = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
LEFT_OUT = ("everstep", "torch")
"""This repository; and what has another file for CPUs than for each version of CUDA, from indexes
of their own."""
HEADER = """\
# Packages of a service or a node for CPython {python} on Linux x86-64, each with the SHA-256
# of its file. `make lock` writes this file.
#   pip install --require-hashes --no-deps --requirement {name}
#   pip install --constraint constraints.txt '.[server]'
# Left out, and so without a hash: {left_out},
# with what torch for CUDA brings (nvidia-*, cuda-*, triton).
"""


def main() -> int:
    """Write every lock. Returns 1 where the index lacks a file for a platform; the lock of that
    platform then stays as it was."""
    wanted = {
        name: version
        for name, (version, _) in report(["--ignore-installed", ".[server]"]).items()
        if name not in LEFT_OUT
    }
    LOCKS.mkdir(exist_ok=True)
    ended = 0
    for python in PYTHONS:
        name = f"locks/server-linux-x86_64-cp{python.replace('.', '')}.txt"
        pins = [f"{package}=={version}" for package, version in sorted(wanted.items())]
        platform = [option for tag in MANYLINUX for option in ("--platform", tag)]
        with tempfile.TemporaryDirectory() as target:
            options = [
                "--no-deps",
                "--only-binary=:all:",
                "--target",
                target,
                "--python-version",
                python,
                *platform,
            ]
            try:
                found = report([*options, *pins])
            except subprocess.CalledProcessError as exc:
                print(
                    f"{name} is not written: {exc.stderr.strip().splitlines()[-1]}", file=sys.stderr
                )
                ended = 1
                continue
        lines = [
            f"{package}=={version} \\\n    --hash=sha256:{sha256}\n"
            for package, (version, sha256) in sorted(found.items())
        ]
        text = HEADER.format(python=python, name=name, left_out=" and ".join(LEFT_OUT)) + "".join(
            lines
        )
        (REPOSITORY / name).write_text(text)
        print(f"{name}: {len(lines)} packages")
    return ended


def report(arguments: list[str]) -> dict[str, tuple[str, str]]:
    """Version and SHA-256 of each package that pip would install, by its normalised name. Raises
    CalledProcessError."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--constraint",
        "constraints.txt",
        "--report",
        "-",
    ]
    done = subprocess.run(
        [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    items: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    found = {}
    for item in items:
        metadata, archive = item["metadata"], item["download_info"].get("archive_info", {})
        name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        found[name] = (metadata["version"], archive.get("hashes", {}).get("sha256", ""))
    return found


if __name__ == "__main__":
    sys.exit(main())
