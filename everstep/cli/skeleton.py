"""Write the skeleton of a user task: a package that trains as it is.

Its files are templates in ``skeleton_files``.
"""

from __future__ import annotations

import importlib.resources
import json
import keyword
import sys
from pathlib import Path
from string import Template

from everstep.errors import UsageError
from everstep.spec.json_schema import spec_schema

SCHEMA_FILE = "spec.schema.json"

_TAKEN = frozenset(
    {"everstep", "storage", "service", "train_fn", "tests", "torch", "torchvision", "ray", "numpy"}
)
"""Names that would shadow, or be shadowed by, packages that run beside the task."""


def write_skeleton(name: str, parent: Path) -> Path:
    """Write the task package ``name`` into a new folder of that name below ``parent``; return the
    folder. Raise UsageError, OSError."""
    _check(name)
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not empty; choose another name, or another directory with --in"
        )
    words = {
        "name": name,
        "class_name": "".join(part[:1].upper() + part[1:] for part in name.split("_")),
        "run_name": name.strip("_").replace("_", "-"),
    }
    files = {
        f"{name}/task.py": "task.py",
        "test_task.py": "test_task.py",
        "spec.yaml": "spec.yaml",
        "README.md": "README.md",
        ".everstepignore": "everstepignore",
    }
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    for path, source in files.items():
        (folder / path).write_text(Template(_template(source)).substitute(words))
    write_schema(folder / SCHEMA_FILE)
    return folder


def write_schema(path: Path) -> None:
    """Write the JSON schema of a spec, for an editor that completes and checks YAML."""
    path.write_text(json.dumps(spec_schema(), indent=1) + "\n")


def schema_line(path: str) -> str:
    """Return the first line of a YAML file that names its schema to an editor."""
    return f"# yaml-language-server: $schema={path}"


def _template(name: str) -> str:
    folder = importlib.resources.files("everstep.cli") / "skeleton_files"
    return (folder / f"{name}.template").read_text()


def _check(name: str) -> None:
    """Raise UsageError if ``name`` cannot be imported, or is the name of another package."""
    if (
        not (name.isascii() and name.isidentifier())
        or keyword.iskeyword(name)
        or not name.strip("_")
    ):
        raise UsageError(
            f"{name!r} is not a valid package name; use letters, digits and _, for example my_task"
        )
    if name in _TAKEN or name in sys.stdlib_module_names:
        raise UsageError(
            f"{name!r} is the name of a package that runs beside the task; choose another name"
        )
