"""The command ``python -m service.annexes.backup create|restore DIRECTORY``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from everstep.options.model import SettingsError
from everstep.options.serve import FLAGS
from everstep.spec.plain_text import printable, printable_lines
from service.annexes.backup.copies import BackupError, create, restore
from service.annexes.backup.tree_copy import LinkedRoot
from service.db.engine import DatabaseError
from service.settings import HomeError, Settings
from storage.errors import StorageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 on success, else 1."""
    parser = argparse.ArgumentParser(
        prog="everstep backup|restore",
        description="Back up a service's database and storage, and restore them.",
    )
    parser.add_argument("what", choices=("create", "restore"))
    parser.add_argument("directory", type=Path)
    for name in ("database_url", "storage_uri"):
        parser.add_argument(FLAGS[name].flag, dest=name, metavar=FLAGS[name].metavar)
    parser.add_argument(
        "--database-only", action="store_true", help="create: leave out the storage"
    )
    parser.add_argument(
        "--follow",
        action="append",
        default=[],
        metavar="NAME",
        help="create: also copy this directory of the storage if you made it a link",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        flags = {
            name: value
            for name in ("database_url", "storage_uri")
            if (value := getattr(given, name)) is not None
        }
        settings = Settings.read(os.environ, flags, only=("home", "database_url", "storage_uri"))
        directory = given.directory.absolute()
        if given.what == "create":
            done = create(
                settings, directory, with_storage=not given.database_only, follow=given.follow
            )
        else:
            done = restore(settings, directory)
    except (
        BackupError,
        LinkedRoot,
        SettingsError,
        HomeError,
        StorageError,
        DatabaseError,
        OSError,
    ) as exc:
        words = f"everstep {'backup' if given.what == 'create' else 'restore'}: {exc}"
        print(
            json.dumps({"error": {"message": str(exc)}}) if given.json else printable_lines(words),
            file=sys.stderr,
        )
        return 1
    if given.json:
        print(json.dumps({**asdict(done), "directory": str(done.directory)}))
        return 0
    print(
        f"{done.directory}: {done.num_runs} runs, {done.num_checkpoints} checkpoints, "
        f"{done.size_bytes / 1e6:.1f} MB"
    )
    for name in done.missing:
        print(f"  not copied: {printable(name)}, which retention deleted meanwhile")
    if done.num_skipped:
        print(f"  left out: {done.num_skipped} links, FIFOs and other special files:")
    for words in done.skipped:
        print(f"    {printable(words)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
