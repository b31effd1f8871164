"""A package index that is a directory: wheels of one module each, made for a test."""

from __future__ import annotations

import zipfile
from pathlib import Path

_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"


def add_wheel(
    index: Path, name: str, version: str, *, requires: tuple[str, ...] = (), source: str = ""
) -> None:
    """Put a wheel into ``index``; its module has ``source`` and says its ``version``."""
    info = f"{name}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    index.mkdir(exist_ok=True)
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n{source}")
        archive.writestr(
            f"{info}/METADATA", _METADATA.format(name=name, version=version, requires=lines)
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")


def only_from(index: Path) -> dict[str, str]:
    """What makes pip install from ``index`` and from nowhere else, whatever this machine's
    configuration says."""
    return {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_CACHE_DIR": "1",
    }
